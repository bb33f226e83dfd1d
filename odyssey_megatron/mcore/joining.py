"""A new process that takes a dead rank's place in a Megatron-LM job: what its training loop must believe.

Its Megatron starts like any other, alone, without reading a checkpoint. When it is about to train it joins; then its
loop is set to the iteration that the others are at.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from odyssey_megatron.launch.member import Member

_NOTE = "start"


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where the job started: at a checkpoint's iteration, or at 0."""

    iteration: int
    consumed_train_samples: int
    floating_point_operations: float

    @classmethod
    def of(cls, args: Any) -> Start:
        """As Megatron's ``args`` say after loading."""
        return cls(
            iteration=args.iteration,
            consumed_train_samples=args.consumed_train_samples,
            floating_point_operations=float(args.num_floating_point_operations_so_far),
        )

    def note(self, member: Member) -> None:
        """For processes that join later."""
        member.note(_NOTE, json.dumps(asdict(self)))

    @classmethod
    def noted(cls, member: Member) -> Start:
        return cls(**json.loads(member.noted(_NOTE) or "{}"))

    def apply(self, args: Any) -> None:
        """Sets what loading would have set."""
        args.iteration, args.consumed_train_samples = self.iteration, self.consumed_train_samples
        args.num_floating_point_operations_so_far = self.floating_point_operations

    def go_on(self, args: Any, scheduler: Any, iteration: int, operations_per_step: float) -> None:
        """Sets Megatron's loop, which stands at the start, to ``iteration``."""
        done = iteration - self.iteration
        args.iteration = iteration
        args.consumed_train_samples = self.consumed_train_samples + done * args.global_batch_size
        args.num_floating_point_operations_so_far = (
            self.floating_point_operations + done * operations_per_step
        )
        scheduler.step(increment=done * args.global_batch_size)

    def evaluated(self, args: Any, iteration: int) -> int:
        """Batches that evaluations have taken since the start."""
        if not args.eval_interval:
            return 0
        return args.eval_iters * (iteration // args.eval_interval - self.iteration // args.eval_interval)
