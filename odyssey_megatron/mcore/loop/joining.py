"""What the training loop of a new process must know when it takes a dead rank's place in a Megatron-LM job.

Its Megatron starts like any other, alone, and reads no checkpoint. When it is about to train it joins, and takes part
in one step; then its loop is set to that step's iteration.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch.distributed import ProcessGroup

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.launch.rank.member import Member
from odyssey_megatron.mcore.loop.batches import Batches
from odyssey_megatron.mcore.model.optimizer import Origin
from odyssey_megatron.plan.placing.groups import WORLD, groups_of_cell
from odyssey_megatron.rebuild.groups import NEVER_OVER, GroupSet, build_groups

_NOTE = "start"


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where the job started: at a checkpoint's iteration, or at 0; and when."""

    began_s: float
    """Seconds since the epoch: what Megatron counts ``--exit-duration-in-mins`` from."""
    iteration: int
    consumed_train_samples: int
    skipped_train_samples: int
    consumed_valid_samples: int
    """As in the checkpoint; 0: the checkpoint has none, and Megatron works it out from the iteration, alike on all
    ranks.
    """
    floating_point_operations: float
    scheduler: dict[str, Any]
    """State of Megatron's scheduler: what a checkpoint said, and the number of samples counted so far."""
    groups: list[tuple[Any, Any]]
    """What a checkpoint said of parameter groups: see ``ModelSpec.loaded_groups``."""

    @classmethod
    def of(cls, args: Any, scheduler: Any, groups: list[tuple[Any, Any]]) -> Start:
        """The start, from Megatron's ``args`` after loading."""
        from megatron.training import training

        return cls(
            began_s=training._TRAIN_START_TIME,
            scheduler=scheduler.state_dict(),
            groups=groups,
            iteration=args.iteration,
            consumed_train_samples=args.consumed_train_samples,
            skipped_train_samples=args.skipped_train_samples,
            consumed_valid_samples=args.consumed_valid_samples,
            floating_point_operations=float(args.num_floating_point_operations_so_far),
        )

    def origin(self, given: dict[str, Any], settings: dict[str, Any]) -> Origin:
        """The start for the learning rate; ``given``: the scheduler's arguments before its state was loaded."""
        decay = "start_wd end_wd wd_incr_steps wd_incr_style".split()
        return Origin(
            step=self.iteration,
            samples=self.scheduler["num_steps"],
            settings=settings,
            first_step={name: given[name] for name in decay},
        )

    def note(self, member: Member) -> None:
        """Store the start for processes that join later."""
        member.reports.note(_NOTE, json.dumps(asdict(self)))

    @classmethod
    def noted(cls, member: Member) -> Start:
        return cls(**json.loads(member.reports.noted(_NOTE) or "{}"))

    def apply(self, args: Any, scheduler: Any, optimizer: Any) -> None:
        """Set what loading a checkpoint would have set, and the job's start in place of this process's."""
        from megatron.training import training

        training._TRAIN_START_TIME = self.began_s
        vars(scheduler).update(self.scheduler)
        optimizer.take_over(self.groups)
        args.iteration, args.consumed_train_samples = self.iteration, self.consumed_train_samples
        args.skipped_train_samples = self.skipped_train_samples
        args.consumed_valid_samples = self.consumed_valid_samples
        args.num_floating_point_operations_so_far = self.floating_point_operations

    def go_on(
        self, scheduler: Any, iteration: int, batches: Batches, *, skipped: int, replicas: int
    ) -> list[int]:
        """Advance Megatron's loop from the start to ``iteration``; before it, steps with ``skipped`` samples changed no
        weight.

        Returns:
            For each validation set the number of microbatches that evaluations have taken until then, a multiple of the
            launch line's ``replicas``.
        """
        from megatron.core import num_microbatches_calculator
        from megatron.training import get_args

        args, consumed = get_args(), batches.before(iteration)
        flops = batches.operations(args, self.iteration, iteration)
        left_out = [step for step in batches.left_out if self.iteration <= step < iteration]
        args.skipped_train_samples += sum(map(batches.size, left_out))
        if args.decrease_batch_size_if_needed:
            trained = iteration - self.iteration - len(left_out)
            args.skipped_train_samples += trained * (args.global_batch_size - batches.largest)
        args.iteration, args.consumed_train_samples = iteration, self.consumed_train_samples + consumed
        args.num_floating_point_operations_so_far = self.floating_point_operations + flops
        num_microbatches_calculator.update_num_microbatches(args.consumed_train_samples, False)
        scheduler.step(increment=consumed - skipped)
        interval, start = args.eval_interval, getattr(args, "start_eval_at_iter", None) or 0
        times = 0
        if interval:
            first = max(self.iteration, start - 1)
            times = max(0, iteration // interval - first // interval)
            times -= sum((step + 1) % interval == 0 and step >= first for step in left_out)
        sets = args.eval_iters if isinstance(args.eval_iters, list) else [args.eval_iters]
        eval_iters = [one or 0 for one in sets]  # None: this rank reads none, and is told in time
        batch = getattr(args, "eval_global_batch_size", args.global_batch_size)
        args.consumed_valid_samples += times * sum(eval_iters) * batch
        each = batch // args.micro_batch_size // replicas * replicas
        return [times * one * each for one in eval_iters]


def starting_groups(
    member: Member, cell: Cell, config: OdysseyConfig
) -> tuple[GroupSet, dict[str, ProcessGroup]]:
    """The groups that a rank begins with, and the same by a generation's names. They contain all ranks of the job;
    those of a process that joins contain its cell, which is alone until it trains, whatever generation that will be.
    """
    everyone, suffix, number = tuple(range(member.world_size)), "", 0
    if not member.joins:
        # Processes start at different times, and one that is killed before it gets here is started again.
        config = replace(config, build_timeout_s=max(config.build_timeout_s, config.store_timeout_s))
    else:
        incarnations = member.company.meet(cell)
        everyone, number = cell.ranks, NEVER_OVER
        suffix = f".{cell.worker}.{'-'.join(map(str, incarnations))}"  # unlike those of earlier incarnations
    named = {WORLD: everyone} | groups_of_cell(cell)
    built = build_groups(member, number, {name + suffix: ranks for name, ranks in named.items()}, config)
    return built, {name.removesuffix(suffix): group for name, group in built.items()}
