"""The door for unmodified Megatron-LM: its own ``pretrain()`` and training loop, with Odyssey's step inside.

Each rank's Megatron believes to be alone: every group of ``parallel_state`` has one rank, and a global batch is all its
microbatches. What spans ranks goes through Odyssey: ``train_step`` is a step of the plan, a forward-only call of the
schedule and a checkpoint are common work (``recover.Recovery.together``), and barriers on the default group are too. So
logging, evaluation, checkpoints, exit conditions and timers stay Megatron's.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.cluster.job import check_world
from odyssey_megatron.config import OdysseyConfig, add_arguments
from odyssey_megatron.errors import EXIT_NOT_SAVED, ConfigError, OdysseyError, Superseded
from odyssey_megatron.launch.inject import Injector
from odyssey_megatron.mcore.loop import (
    arguments,
    checkpoint,
    loading,
    outcome,
    saving,
    shards,
    signals,
    tensorboard,
)
from odyssey_megatron.mcore.loop.background import Saves
from odyssey_megatron.mcore.loop.console import SurvivingLines
from odyssey_megatron.mcore.loop.feed import Feed
from odyssey_megatron.mcore.loop.joining import Start, starting_groups
from odyssey_megatron.mcore.loop.progress_log import ProgressLog
from odyssey_megatron.mcore.model import experts, float64, groups, parts, span, wgrad
from odyssey_megatron.mcore.model.layers import empty_chunk
from odyssey_megatron.mcore.model.model import MegatronModel
from odyssey_megatron.mcore.model.optimizer import LearningRate, schedule_refused
from odyssey_megatron.mcore.model.stage import OwnStage
from odyssey_megatron.mcore.plugin import Session
from odyssey_megatron.plan.groups import WORLD
from odyssey_megatron.recover import Recovery
from odyssey_megatron.upstream import compat, refusals, seam_table, seams


def attach(config: OdysseyConfig) -> None:
    """Puts Odyssey into ``megatron.training``, which has been imported; a second call does nothing.

    Raises MegatronIncompatible.
    """
    if seams.is_applied(seam_table.PRETRAIN):
        return
    door = Door(config)
    seams.wrap(seam_table.PRETRAIN, door.pretrain)
    seams.wrap(seam_table.ADD_MEGATRON_ARGUMENTS, door.add_megatron_arguments)
    seams.wrap(seam_table.PARSE_AND_VALIDATE_ARGS, door.parse_and_validate_args)


class Door:
    """One rank's Megatron-LM run."""

    def __init__(self, config: OdysseyConfig):
        self._config = config
        self._session: Any = None
        self._parser = refusals.Parser()
        self._recovery: Any = None
        self._stage = OwnStage()
        self._feed = Feed(self._stage)
        self._lines = SurvivingLines(
            note=lambda place: self._session.member.note("printed", place),
            noted=lambda: self._session.member.noted("printed"),
        )
        self._chunks: list[Any] = []
        self._board: tensorboard.SurvivingWriter | None = None
        self._progress = ProgressLog(
            self._together, joins=lambda: self._alone is not None and self._session.member.joins
        )
        self._saved = shards.Saved()
        self._saves = Saves(self._together, self._chunks)

    # -- start and end --------------------------------------------------------------------------------------------

    def add_megatron_arguments(self, original: Any, parser: Any) -> Any:
        parser = original(parser)
        self._parser = refusals.Parser.of(parser, compat.check_version())
        add_arguments(parser)
        return parser

    @contextlib.contextmanager
    def _joined(self) -> Iterator[None]:
        """In the body this rank has joined the job, and what ends the job ends this process."""
        if self._session is not None:
            with self._session.ending():
                yield
            return
        with Session.start(self._config, default_group=False) as self._session:
            self._replace()
            if args := arguments.early():
                self._refuse(args)
            yield

    def _refuse(self, args: Any) -> None:
        """Of ``args`` as the user gave them. Raises ConfigError."""
        refusals.check(args, self._parser, self._config.accepted, strict=self._config.is_strict)

    def parse_and_validate_args(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        with self._joined():
            return original(*args, **kwargs)

    def pretrain(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        with self._joined():
            compat.check_pretrain(kwargs)
            try:
                result = original(*args, **kwargs)
            except SystemExit as end:
                if not end.code:
                    self._finish()
                raise
            self._finish()
            return result

    def _replace(self) -> None:
        """Everything of Megatron's that Odyssey replaces. Raises MegatronIncompatible, and then nothing is."""
        seams.demand_all(seam_table.SEAMS)
        for module in (span, wgrad, saving):
            module.install()
        for seam, replacement in (
            (seam_table.VALIDATE_ARGS, self.validate_args),
            (seam_table.TRANSFORMER_CONFIG, self._stage.transformer_config),
            (seam_table.INITIALIZE_DISTRIBUTED, self.initialize_distributed),
            (seam_table.SET_TENSORBOARD_WRITER, self.set_tensorboard_writer),
            (seam_table.SETUP_MODEL_AND_OPTIMIZER, self.setup_model_and_optimizer),
            (seam_table.BUILD_DATA_ITERATORS, self.build_data_iterators),
            (seam_table.CYCLIC_ITER, lambda original, source: source),
            (seam_table.BUILD_PRETRAINING_DATA_LOADER, self._feed.build_pretraining_data_loader),
            (seam_table.TRAIN, self.train),
            (seam_table.TRAIN_STEP, self.train_step),
            (seam_table.DUMMY_TRAIN_STEP, self.dummy_train_step),
            (seam_table.CONSUME_SEQLEN_STATS, lambda original: self._runtime.outcome.sequences),
            (seam_table.TRAINING_LOG, self.training_log),
            (seam_table.REDUCE_MAX_STAT, outcome.known_to_all),
            (seam_table.GET_FORWARD_BACKWARD_FUNC, self.get_forward_backward_func),
            (seam_table.SAVE_CHECKPOINT, self._saves.save_checkpoint),
            (seam_table.SCHEDULE_ASYNC_SAVE, self._saves.schedule),
            (seam_table.MAYBE_FINALIZE_ASYNC_SAVE, self._saves.finalize),
            (seam_table.SHARDED_METADATA, self._saved.say),
            (seam_table.LOAD_BASE_CHECKPOINT, self._saved.note),
            (seam_table.INIT_PERSISTENT_ASYNC_WORKER, lambda original, *args, **kwargs: None),
            (seam_table.CHECK_PARAM_HASHES, self.check_param_hashes),
            (seam_table.CALC_PARAMS_L2_NORM, self.calc_params_l2_norm),
            (seam_table.APPEND_TO_PROGRESS_LOG, self._progress.append),
            (seam_table.GET_START_TIME_FROM_PROGRESS_LOG, self._progress.start_time),
            (seam_table.PRINT_RANK_LAST, self.print_rank_last),
        ):
            seams.wrap(seam, replacement)

    def _finish(self) -> None:
        if self._recovery is None:
            return
        if self._board is not None:
            self._board.close()
        self._session.note_end(self._runtime, self._model)
        self._living.repeat_with(None)
        early = self._runtime.committed if self._runtime.ends and not self._is_done() else -1
        self._recovery.carry_out(lambda generation: self._session.member.finish(generation.number, early))
        if self._saves.not_saved:
            raise SystemExit(EXIT_NOT_SAVED)

    def _is_done(self) -> bool:
        from megatron.training import get_args

        return self._runtime.committed >= get_args().train_iters

    # -- setting up -----------------------------------------------------------------------------------------------

    def validate_args(self, original: Any, args: Any, *rest: Any, **kwargs: Any) -> Any:
        self._refuse(args)
        arguments.say_moot(args, self._parser)
        beside_training = args.async_save
        arguments.leave_out_moot(args)
        self._optimizer_copies = arguments.optimizer_copies(args, self._config)
        self._saved.distributed = args.use_distributed_optimizer
        result = arguments.refused_by_megatron()(original)(args, *rest, **kwargs)
        refusals.check(args, self._parser)
        self._feed.replicas = args.data_parallel_size
        self._split_of, self._checks = arguments.split_of(args), args.check_for_nan_in_loss_and_grad
        arguments.adapt(args, self._config)
        args.async_save = beside_training
        saving.check(args)
        return result

    def initialize_distributed(self, original: Any, *unused: Any, **kwargs: Any) -> None:
        from megatron.training import get_args

        args, session = get_args(), self._session
        check_world(session.world_size, args.pipeline_model_parallel_size, Cell.in_job(session.rank, args))
        cell = session.member.cell(args)
        # Megatron waits that long for others, e.g. while the first rank builds an index.
        patience_s = max(self._config.op_timeout_s, 60.0 * args.distributed_timeout_minutes)
        self._config = session.config = replace(self._config, op_timeout_s=patience_s)
        self._cell = groups.OwnCell(cell, session.world_size, self._config.device, data_parallel=True)
        self._living = self._cell.living
        self._alone: dict[str, dist.ProcessGroup] | None
        self._start_groups, self._alone = starting_groups(session.member, cell, self._config)
        self._follow(self._alone)
        args.data_parallel_size = 1
        compat.count_all_microbatches(args)

    def setup_model_and_optimizer(
        self, original: Any, *given: Any, **named: Any
    ) -> tuple[list[Any], Any, Any]:
        from megatron.training import get_args, training
        from megatron.training.arguments import core_transformer_config_from_args

        args = get_args()
        model_provider, args.model_type, context = compat.setup_arguments(original, *given, **named)
        config = core_transformer_config_from_args(args)
        if config.params_dtype == torch.float64:
            float64.install()
        split, self._batches = self._split_of(config), arguments.batches_of(args)
        arguments.check_batches(args, self._batches, self._feed.replicas)
        whole = parts.adapt(config, self._cell.cell)
        self._model = MegatronModel(
            arguments.spec_of(args, config, split, model_provider, overflow_ends_job=self._checks),
            num_microbatches=self._batches.largest // args.micro_batch_size,
            replicas=self._feed.replicas,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            spare_on_host=self._config.spare_on_host,
            groups_of_cell=self._cell.groups,
            cell=self._cell.cell,
            cuts_activations=args.sequence_parallel,
        )
        optimizer = checkpoint.OptimizerView(
            self._model, self._cell.groups, self._saved, lambda: self._runtime
        )
        # It sets train_iters where samples were given, and what was given decides on the schedule.
        with schedule_refused():
            scheduler = training.get_optimizer_param_scheduler(optimizer)
        schedule = arguments.schedule_of(scheduler)
        largest, copies = self._batches.largest, self._optimizer_copies
        job = arguments.job_of(args, whole, self._config, split, batch_size=largest, optimizer_copies=copies)
        self._session.post(job, arguments.profile_of(args, whole, self._config))
        self._enter()
        self._refresh()
        args.iteration = args.num_floating_point_operations_so_far = 0
        member = self._session.member
        if member.joins:
            self._start = Start.noted(member)
            self._start.apply(args, scheduler, optimizer)
        elif args.load is not None or args.pretrained_checkpoint is not None:
            loading.load(args, self._chunks, optimizer, scheduler, context, self._together)
        if not member.joins:
            self._start = Start.of(args, scheduler, self._model.spec.loaded_groups)
            self._start.note(member)
        self._model.batches = arguments.batches_of(
            args, consumed=args.consumed_train_samples, first_step=args.iteration
        )
        self._model.learning_rate = LearningRate(
            self._start.origin(schedule, optimizer.settings),
            **arguments.schedule_of(scheduler),
        )
        self._runtime.committed = args.iteration
        return self._chunks, optimizer, scheduler

    def _enter(self) -> None:
        """The first generation; the groups of the start are not needed any more."""
        from megatron.training import get_args

        session = self._session
        self._runtime = session.enter(
            self._model,
            on_commit=lambda step, outcome: None,
            on_groups=self._on_groups,
            joins=False,
        )
        signals.install(get_args(), self._runtime, session.member)
        self._recovery = Recovery(session.member, self._runtime)
        self._fault_point = Injector(
            self._config.injections, session.rank, None, session.member.incarnation
        ).at
        self._saves.attach(session, self._runtime, self._fault_point)
        if not session.member.joins:
            self._recovery.carry_out(lambda generation: None)
            self._leave_start()

    @functools.cached_property
    def _empty_chunk(self) -> Any:
        return empty_chunk(self._model.spec, self._cell.groups)

    def _leave_start(self) -> None:
        """From here on what Megatron does with all ranks is common work of the job."""
        self._start_groups.close()
        arguments.quiet_rebuilding()
        self._alone = None
        self._living.repeat_with(self._together)

    def train(self, original: Any, *given: Any, **named: Any) -> Any:
        if self._session.member.joins:
            self._join(inspect.signature(original).bind(*given, **named).arguments)
        return original(*given, **named)

    def _join(self, called: Mapping[str, Any]) -> None:
        """Into the job, and through one step with the others. Only then does Megatron's loop begin, at that step, and
        is told what came of it: until then a failure may send this rank back to wait for another one.

        ``called``: the arguments of Megatron's ``train()``.
        """
        self._feed(self._model, called["forward_step_func"], called["train_data_iterator"])
        self._session.member.join()
        self._recovery.step()
        self._refresh()
        batches, step = self._model.batches, self._runtime.committed - 1
        skipped = self._model.loss_scale.skipped_samples - self._runtime.outcome.skipped * batches.size(step)
        evaluated = self._start.go_on(called["opt_param_scheduler"], step, batches, skipped)
        self._feed.join(called["valid_data_iterator"], evaluated)
        # What Megatron does with all ranks before its first step, the others have done long ago.
        self._follow(self._alone)

    def training_log(self, original: Any, *given: Any, **named: Any) -> Any:
        if self._session.member.joins:  # behind a first iteration Megatron does not reset its sums
            named["is_first_iteration"] = False
        return original(*given, **named)

    def _follow(self, named: Any) -> None:
        self._living.follow(named[WORLD])
        self._cell.follow(named)

    def _on_groups(self, named: Any) -> None:
        """Rank 0 and the last rank may be others now."""
        from megatron.training import get_args

        self._named = named
        self._follow(named)
        world = named[WORLD]
        args = get_args()
        args.rank, args.world_size = world.rank(), world.size()
        last = world.rank() == world.size() - 1
        for one in (self._lines, self._board):
            if one is not None:
                one.become_last() if last else one.hand_over()

    def set_tensorboard_writer(self, original: Any, args: Any) -> None:
        self._board = tensorboard.replace_writer(args, self._session.member)
        if self._board is None:
            original(args)

    def _log_own(self, iteration: int, interval: int) -> None:
        """Odyssey's scalars, beside those that Megatron logs of ``iteration`` (counted from 1)."""
        chronicle = self._runtime.chronicle
        stalled_s, chronicle.stalled_s = chronicle.stalled_s, 0.0
        own = {"recovery_stall_s": stalled_s} if stalled_s else {}
        if iteration % interval == 0:
            plan = self._runtime.plan
            own |= {"generation": self._runtime.generation, "living_ranks": self._living.size()}
            own |= {"losses_survived": plan.layout.losses_survived, "planned_step_s": plan.step_s}
        if self._board is not None:
            for name, value in own.items():
                self._board.add_scalar(f"odyssey/{name}", value, iteration)

    def print_rank_last(self, original: Any, message: str) -> None:
        self._lines.say(lambda: original(message))

    def _refresh(self) -> None:
        """Megatron's list of model chunks is this worker's blocks, which a recovery may have changed; never empty, as
        its loop looks at the first.
        """
        blocks = self._model.blocks
        chunks = [block.model for block in blocks] or [self._empty_chunk]
        if chunks != self._chunks:
            for block in blocks:
                checkpoint.prepare(self._model, block)
            self._chunks[:] = chunks

    # -- common work ----------------------------------------------------------------------------------------------

    def _together(self, work: Callable[[Any], Any]) -> Any:
        def guarded(world: Any) -> Any:
            self._refresh()
            with self._living.inside():
                try:
                    return work(world)
                except OdysseyError:
                    raise
                except Exception as error:
                    # Libraries wrap what their collectives raise.
                    if self._session.member.newer_than(self._runtime.generation):
                        raise Superseded("a newer generation exists") from error
                    raise

        result = self._recovery.together(guarded)
        self._refresh()
        return result

    def build_data_iterators(self, original: Any, provider: Any) -> Any:
        # Megatron's compiled helpers keep the GIL while they build an index.
        with self._session.member.excused():
            return original(provider)

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

        self._feed(self._model, forward_step_func, data_iterator)
        result = self._step()
        experts.show(result.aux_losses)
        self._model.future.show(result.losses, result.num_microbatches)
        self._log_own(self._runtime.committed, get_args().tensorboard_log_interval)
        if not result.skipped:
            opt_param_scheduler.step(increment=result.num_microbatches * get_args().micro_batch_size)
        return compat.train_step_result(
            outcome.shown(result, self._model.loss_names),
            result.grad_norm,
            result.num_zeros_in_grad,
            skipped=result.skipped,
        )

    def dummy_train_step(self, original: Any, data_iterator: Any) -> None:
        """Of ``--iterations-to-skip``: a step like any other, of no microbatches, so that all are as far."""
        self._model.source = self._feed.source(data_iterator)
        self._step()

    def _step(self) -> outcome.StepOutcome:
        joined = self._alone is not None
        if self._board is not None:
            self._board.begin(self._runtime.committed - joined)
        if joined:  # with this very step
            self._follow(self._named)
            self._leave_start()
        else:
            self._recovery.step()
            self._refresh()
        self._lines.begin(self._runtime.committed)
        result: outcome.StepOutcome = self._runtime.outcome
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
        """Megatron's schedule, as its evaluation calls it: what every microbatch of the batch reported."""
        from megatron.training import get_args

        if not forward_only or kwargs.get("collect_non_loss_data"):
            raise ConfigError("only evaluations may call the schedule; training goes through train_step.")
        source, lanes = self._feed.source(data_iterator), self._cell.cell.lanes
        most = self._batches.largest // (get_args().micro_batch_size * lanes)

        def work(world: Any) -> torch.Tensor:
            self._feed(self._model, forward_step_func, source)
            done, wanted, tables = source.evaluated // lanes, num_microbatches // lanes, []
            for first in range(0, wanted, most):
                self._runtime.evaluate(done + first, min(most, wanted - first))
                tables.append(self._model.local_losses())
            table = torch.cat(tables)
            dist.all_reduce(table, group=world)
            return table

        table = self._together(work)
        source.evaluated += num_microbatches
        return outcome.losses_of(table, self._model.loss_names)

    def check_param_hashes(self, original: Any, model: Any, cross_check: bool = False) -> bool:
        if self._alone is None:  # else it joins, and the others have done this long ago
            self._together(self._runtime.check_holders)
        return True

    def calc_params_l2_norm(self, original: Any, *given: Any, **named: Any) -> float:
        def work(world: Any) -> torch.Tensor:
            total = self._model.squared_weights()
            dist.all_reduce(total, group=world)
            return total

        return math.sqrt(self._together(work).item())
