"""Megatron's training loop with the plan's steps, and evaluations that run by the plan, too."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.mcore.loop import outcome, tensorboard
from odyssey_megatron.mcore.loop.console import SurvivingLines
from odyssey_megatron.mcore.loop.feed import Feed
from odyssey_megatron.mcore.loop.joining import Start
from odyssey_megatron.mcore.loop.progress_log import since_start
from odyssey_megatron.mcore.loop.together import CommonWork
from odyssey_megatron.mcore.model import experts
from odyssey_megatron.upstream import compat, seam_table, seams


@dataclass(kw_only=True)
class Steps:
    """What Megatron's loop calls on one rank, from the end of its setup on."""

    work: CommonWork
    feed: Feed
    start: Start
    lines: SurvivingLines
    board: tensorboard.SurvivingWriter | None
    most_samples: int
    """Number of samples of the largest step."""

    def install(self) -> None:
        """Replace what Megatron's loop calls."""
        for seam, replacement in (
            (seam_table.TRAIN, self.train),
            (seam_table.TRAIN_STEP, self.train_step),
            (seam_table.DUMMY_TRAIN_STEP, self.dummy_train_step),
            (seam_table.CONSUME_SEQLEN_STATS, lambda original: self.work.runtime.position.outcome.sequences),
            (seam_table.TRAINING_LOG, self.training_log),
            (seam_table.COMPUTE_THROUGHPUTS, self.compute_throughputs),
            (seam_table.REDUCE_MAX_STAT, outcome.known_to_all),
            (seam_table.GET_FORWARD_BACKWARD_FUNC, self.get_forward_backward_func),
            (seam_table.CHECK_PARAM_HASHES, self.check_param_hashes),
            (seam_table.CALC_PARAMS_L2_NORM, self.calc_params_l2_norm),
        ):
            seams.wrap(seam, replacement)

    def train(self, original: Any, *given: Any, **named: Any) -> Any:
        if self.work.session.member.joins:
            self._join(inspect.signature(original).bind(*given, **named).arguments)
        return original(*given, **named)

    def _join(self, called: Mapping[str, Any]) -> None:
        """Join the job, and make one step with the others. Megatron's loop begins only then, at that step, and is given
        its result; until then a failure may send this rank back to wait for another.

        ``called``: the arguments of Megatron's ``train()``.
        """
        self.feed(self.work.model, called["forward_step_func"], called["train_data_iterator"])
        self.work.session.member.join()
        self.work.recovery.step()
        self.work.refresh()
        batches, step = self.work.model.microbatches.batches, self.work.runtime.committed - 1
        skipped = (
            self.work.model.loss_scale.skipped_samples
            - self.work.runtime.position.outcome.skipped * batches.size(step)
        )
        evaluated = self.start.go_on(
            called["opt_param_scheduler"], step, batches, skipped=skipped, replicas=self.feed.replicas
        )
        self.feed.join(called["valid_data_iterator"], evaluated)
        # What Megatron does with all ranks before its first step, the others did long ago.
        self.work.groups.mean_first()

    def training_log(self, original: Any, *given: Any, **named: Any) -> Any:
        if self.work.session.member.joins:  # after a first iteration Megatron does not reset its sums
            named["is_first_iteration"] = False
        return original(*given, **named)

    def compute_throughputs(self, original: Any, *given: Any, **named: Any) -> Any:
        with since_start(self.start, self.work.session.world_size):
            return original(*given, **named)

    def train_step(
        self,
        original: Any,
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        config: Any,
        forward_backward_func: Any,
        iteration: int | None = None,
        **grids: Any,
    ) -> tuple[Any, ...]:
        from megatron.training import get_args

        self.feed(self.work.model, forward_step_func, data_iterator)
        result = self._step()
        experts.show(result.aux_losses)
        self.work.model.future.show(result.losses, result.num_microbatches)
        self._log_own(self.work.runtime.committed, get_args().tensorboard_log_interval)
        if not result.skipped:
            opt_param_scheduler.step(increment=result.num_microbatches * get_args().micro_batch_size)
        return compat.train_step_result(
            outcome.shown(result, self.work.model.loss_names),
            result.grad_norm,
            result.num_zeros_in_grad,
            result.max_attention_logit,
            skipped=result.skipped,
        )

    def dummy_train_step(self, original: Any, data_iterator: Any) -> None:
        """A step for ``--iterations-to-skip``: one like any other, without microbatches, so that all ranks make it
        together.
        """
        self.work.model.microbatches.source = self.feed.source(data_iterator)
        self._step()

    def _step(self) -> outcome.StepOutcome:
        joined = self.work.groups.are_first
        if self.board is not None:
            self.board.begin(self.work.runtime.committed - joined)
        if joined:  # this rank has joined with this very step
            self.work.groups.mean_newest()
            self.work.leave_start()
        else:
            self.work.recovery.step()
            self.work.refresh()
        self.lines.begin(self.work.runtime.committed)
        result: outcome.StepOutcome = self.work.runtime.position.outcome
        return result

    def get_forward_backward_func(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        return self.forward_backward

    def forward_backward(
        self,
        *,
        forward_step_func: Any,
        data_iterator: Any,
        num_microbatches: int,
        forward_only: bool = False,
        **kwargs: Any,
    ) -> list[dict[str, torch.Tensor]]:
        """Megatron's schedule, as its evaluation calls it. Returns what every microbatch of the batch reported."""
        from megatron.training import get_args

        if not forward_only or kwargs.get("collect_non_loss_data"):
            raise ConfigError("only evaluations may call the schedule; training goes through train_step.")
        source, lanes = self.feed.source(data_iterator), self.work.groups.cell.full_lanes
        most = self.most_samples // (get_args().micro_batch_size * lanes)
        num_microbatches -= num_microbatches % self.feed.replicas  # all replicas take the same number

        def work(world: Any) -> torch.Tensor:
            self.feed(self.work.model, forward_step_func, source)
            done, wanted, tables = source.evaluated // lanes, num_microbatches // lanes, []
            for first in range(0, wanted, most):
                self.work.runtime.training.evaluate(done + first, min(most, wanted - first))
                tables.append(self.work.model.end.local_losses())
            table = torch.cat(tables)
            dist.all_reduce(table, group=world)
            return table

        table = self.work.together(work)
        source.evaluated += num_microbatches
        return outcome.losses_of(table, self.work.model.loss_names)

    def check_param_hashes(self, original: Any, model: Any, cross_check: bool = False) -> bool:
        if not self.work.groups.are_first:  # otherwise it is joining, and the others did this long ago
            # Whichever generation does it: a failure may cut one short.
            self.work.together(lambda world: self.work.runtime.training.check_holders(world))
        return True

    def calc_params_l2_norm(self, original: Any, *given: Any, **named: Any) -> float:
        def work(world: Any) -> torch.Tensor:
            total = self.work.model.end.squared_weights()
            dist.all_reduce(total, group=world)
            return total

        return math.sqrt(self.work.together(work).item())

    def _log_own(self, iteration: int, interval: int) -> None:
        """Log Odyssey's scalars, beside those that Megatron logs for ``iteration`` (counted from 1)."""
        chronicle = self.work.runtime.chronicle
        stalled_s, chronicle.stalled_s = chronicle.stalled_s, 0.0
        own = {"recovery_stall_s": stalled_s} if stalled_s else {}
        if iteration % interval == 0:
            plan = self.work.runtime.plan
            own |= {"generation": self.work.runtime.generation, "living_ranks": self.work.groups.world.size()}
            own |= {"losses_survived": plan.layout.losses_survived, "planned_step_s": plan.step_s}
        if self.board is not None:
            for name, value in own.items():
                self.board.add_scalar(f"odyssey/{name}", value, iteration)
