"""The entry point for unmodified Megatron-LM: its own ``pretrain()`` and training loop, with Odyssey's step inside.

Each rank's Megatron believes that it is alone: every group of ``parallel_state`` has one rank, and the rank's global
batch is all microbatches. Whatever spans ranks goes through Odyssey: ``train_step`` is a step of the plan; a
forward-only call of the schedule and a checkpoint are common work (``recover.Recovery.together``), as are barriers on
the default group. So logging, evaluation, checkpoints, exit conditions and timers stay Megatron's.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.cluster.job import check_world
from odyssey_megatron.config import OdysseyConfig, add_arguments
from odyssey_megatron.errors import EXIT_NOT_SAVED, ConfigError
from odyssey_megatron.mcore.loop import (
    arguments,
    checkpoint,
    deleting,
    loading,
    saving,
    shards,
    signals,
    tensorboard,
)
from odyssey_megatron.mcore.loop.background import Saves
from odyssey_megatron.mcore.loop.console import SurvivingLines
from odyssey_megatron.mcore.loop.feed import Feed, whole_indices
from odyssey_megatron.mcore.loop.joining import Start
from odyssey_megatron.mcore.loop.living import LivingGroups
from odyssey_megatron.mcore.loop.progress_log import ProgressLog
from odyssey_megatron.mcore.loop.steps import Steps
from odyssey_megatron.mcore.loop.together import CommonWork
from odyssey_megatron.mcore.model import float64, parts, span, wgrad
from odyssey_megatron.mcore.model.model import MegatronModel
from odyssey_megatron.mcore.model.optimizer import LearningRate, schedule_refused
from odyssey_megatron.mcore.model.stage import OwnStage
from odyssey_megatron.mcore.plugin import Session
from odyssey_megatron.mcore.settings import settings_of
from odyssey_megatron.plan.placing.groups import WORLD
from odyssey_megatron.recover import Recovery
from odyssey_megatron.upstream import compat, refusals, seam_table, seams


def attach(config: OdysseyConfig) -> None:
    """Install Odyssey in ``megatron.training``, which has been imported; a second call does nothing.

    Raises MegatronIncompatible.
    """
    if seams.is_applied(seam_table.PRETRAIN):
        return
    # Megatron's inference code, which its training imports, makes a process print its stack when it gets one of these
    # signals. All ranks would do so, and bury the one message that says why the job has ended.
    for number in (signal.SIGTERM, signal.SIGINT):
        faulthandler.unregister(number)
    door = Door(config)
    seams.wrap(seam_table.PRETRAIN, door.pretrain)
    seams.wrap(seam_table.ADD_MEGATRON_ARGUMENTS, door.add_megatron_arguments)
    seams.wrap(seam_table.PARSE_AND_VALIDATE_ARGS, door.parse_and_validate_args)


class Door:
    """One rank's Megatron-LM run."""

    def __init__(self, config: OdysseyConfig):
        self._config = config
        self._joined_with: Session | None = None
        self._parser = refusals.MegatronParser()
        self._work: CommonWork | None = None
        self._stage = OwnStage()
        self._feed = Feed(self._stage)
        self._lines = SurvivingLines(
            note=lambda place: self._session.member.reports.note("printed", place),
            noted=lambda: self._session.member.reports.noted("printed"),
        )
        self._chunks: list[Any] = []
        self._board: tensorboard.SurvivingWriter | None = None
        self._saved = shards.Saved()
        self._saves = Saves(self._together, self._chunks)
        self._progress = ProgressLog(
            joins=lambda: self._groups.are_first and self._session.member.joins,
            not_saved=lambda: self._saves.not_saved,
        )

    # -- start and end --------------------------------------------------------------------------------------------

    def add_megatron_arguments(self, original: Any, parser: Any) -> Any:
        parser = original(parser)
        self._parser = refusals.MegatronParser.of(parser, compat.check_version())
        add_arguments(parser)
        return parser

    @property
    def _session(self) -> Session:
        assert self._joined_with is not None
        return self._joined_with

    @contextlib.contextmanager
    def _joined(self) -> Iterator[None]:
        """In the body this rank has joined the job, and whatever ends the job ends this process."""
        if self._joined_with is not None:
            with self._session.ending():
                yield
            return
        with Session.start(self._config, default_group=False) as self._joined_with:
            self._replace()
            if args := arguments.early():
                self._refuse(args)
            yield

    def _refuse(self, args: Any) -> None:
        """Refuse ``args``, as the user gave them, if they cannot work. Raises ConfigError."""
        refusals.check(args, self._parser, self._config.accepted, strict=self._config.is_strict)

    def parse_and_validate_args(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        with self._joined():
            return original(*args, **kwargs)

    def pretrain(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        with self._joined():
            compat.check_pretrain(kwargs)
            if refused := refusals.script_refused(sys.argv[0]):
                raise ConfigError(refused)
            try:
                result = original(*args, **kwargs)
            except SystemExit as end:
                if not end.code:
                    self._finish()
                raise
            self._finish()
            return result

    def _replace(self) -> None:
        """Replace everything of Megatron's that Odyssey replaces, except what its loop calls (``steps.py``). Raises
        MegatronIncompatible, in which case nothing has been replaced.
        """
        seams.demand_all(seam_table.SEAMS)
        for module in (span, wgrad, saving, deleting):
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
            (seam_table.SAVE_CHECKPOINT, self._saves.save_checkpoint),
            (seam_table.SCHEDULE_ASYNC_SAVE, self._saves.schedule),
            (seam_table.MAYBE_FINALIZE_ASYNC_SAVE, self._saves.finalize),
            (seam_table.SHARDED_METADATA, self._saved.say),
            (seam_table.GENERATE_STATE_DICT, self._saved.describe),
            (seam_table.LOAD_BASE_CHECKPOINT, self._saved.note),
            (seam_table.REPORT_KEYS, loading.report_keys),
            (seam_table.INIT_PERSISTENT_ASYNC_WORKER, lambda original, *args, **kwargs: None),
            (seam_table.APPEND_TO_PROGRESS_LOG, self._progress.append),
            (seam_table.GET_START_TIME_FROM_PROGRESS_LOG, self._progress.start_time),
            (seam_table.PRINT_RANK_LAST, self.print_rank_last),
        ):
            seams.wrap(seam, replacement)

    def _finish(self) -> None:
        from megatron.training import get_args

        if self._work is None:
            return
        if self._board is not None:
            self._board.close()
        runtime = self._work.runtime
        self._work.recovery.settle()
        self._session.note_end(runtime, self._work.model)
        self._groups.world.repeat_with(None)
        is_done = runtime.committed >= get_args().train_iters
        early = runtime.committed if runtime.ends and not is_done else -1
        self._work.recovery.finish(early)
        if self._saves.not_saved:
            raise SystemExit(EXIT_NOT_SAVED)

    # -- setting up -----------------------------------------------------------------------------------------------

    def validate_args(self, original: Any, args: Any, *rest: Any, **kwargs: Any) -> Any:
        self._refuse(args)
        arguments.say_moot(args, self._parser, self._config)
        beside_training = args.async_save
        arguments.leave_out_moot(args)
        self._optimizer_copies = arguments.optimizer_copies(args, self._config)
        self._saved.distributed = args.use_distributed_optimizer
        with arguments.refused_by_megatron():
            result = original(args, *rest, **kwargs)
            compat.check_microbatches(args)
        refusals.check(args, self._parser)
        self._feed.replicas = self._saved.replicas = args.data_parallel_size
        self._split_of, self._checks = arguments.split_of(args), args.check_for_nan_in_loss_and_grad
        self._moments = arguments.moments_of(args)
        arguments.adapt(args, self._config)
        session = self._session
        arguments.profile_as_launched(args, session.rank, session.world_size, joins=session.member.joins)
        args.async_save = beside_training
        saving.check(args, joins=session.member.joins, is_first=session.rank == 0)
        return result

    def initialize_distributed(self, original: Any, *unused: Any, **kwargs: Any) -> None:
        from megatron.training import get_args

        args, session = get_args(), self._session
        check_world(session.world_size, args.pipeline_model_parallel_size, Cell.in_job(session.rank, args))
        cell = session.member.cell(args)
        # Megatron waits for others up to its own timeout, e.g. while the first rank builds an index.
        patience_s = max(self._config.op_timeout_s, 60.0 * args.distributed_timeout_minutes)
        self._config = session.config = replace(self._config, op_timeout_s=patience_s)
        session.member.liveness.wait_up_to(patience_s)
        self._groups = LivingGroups(session, cell, self._config)
        args.data_parallel_size = 1
        compat.count_all_microbatches(args, self._feed.replicas)

    def setup_model_and_optimizer(
        self, original: Any, *given: Any, **named: Any
    ) -> tuple[list[Any], Any, Any]:
        from megatron.training import get_args, training
        from megatron.training.arguments import core_transformer_config_from_args

        args = get_args()
        model_provider, args.model_type, context = compat.setup_arguments(original, *given, **named)
        config = core_transformer_config_from_args(args)
        arguments.prepare_hybrid(args, config)
        if config.params_dtype == torch.float64:
            float64.install()
        split, batches = self._split_of(config), arguments.batches_of(args)
        arguments.check_batches(args, batches, self._feed.replicas)
        whole = parts.adapt(config, self._groups.cell)
        model = MegatronModel(
            arguments.spec_of(
                args, config, split, model_provider, moments=self._moments, overflow_ends_job=self._checks
            ),
            num_microbatches=batches.largest // args.micro_batch_size,
            replicas=self._feed.replicas,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            spare_on_host=self._config.spare_on_host,
            groups_of_cell=self._groups.of_cell,
            cell=self._groups.cell,
            world_size=self._session.world_size,
            cuts_activations=args.sequence_parallel,
        )
        optimizer = checkpoint.OptimizerView(model, self._groups.of_cell, self._saved, lambda: work.runtime)
        # This sets train_iters if the job's length was given in samples; the schedule depends on which of both was
        # given.
        with schedule_refused():
            scheduler = training.get_optimizer_param_scheduler(optimizer)
        schedule = arguments.schedule_of(scheduler)
        largest, copies = batches.largest, self._optimizer_copies
        job = arguments.job_of(args, whole, self._config, split, batch_size=largest, optimizer_copies=copies)
        model.microbatches.balance = arguments.balance_of(
            args, whole, self._config, places=job.num_microbatches
        )
        settings = settings_of(args, model.spec.optimizer_config, schedule)
        self._session.post(job, arguments.profile_of(args, whole, self._config, self._moments), settings)
        work = self._work = self._enter(model)
        args.iteration = args.num_floating_point_operations_so_far = 0
        start = self._started(work, optimizer, scheduler, context)
        model.microbatches.batches = arguments.batches_of(
            args, consumed=args.consumed_train_samples, first_step=args.iteration
        )
        origin = start.origin(schedule, optimizer.settings)
        model.end.learning_rate = LearningRate(origin, **arguments.schedule_of(scheduler))
        work.runtime.position.committed = args.iteration
        Steps(
            work=work,
            feed=self._feed,
            start=start,
            lines=self._lines,
            board=self._board,
            most_samples=largest,
        ).install()
        return self._chunks, optimizer, scheduler

    def _started(self, work: CommonWork, optimizer: Any, scheduler: Any, context: Any) -> Start:
        """Load what there is to load. A process that joins takes over what the others have noted of it instead."""
        from megatron.training import get_args

        args, member = get_args(), self._session.member
        if member.joins:
            start = Start.noted(member)
            start.apply(args, scheduler, optimizer)
            return start
        if args.load is not None or args.pretrained_checkpoint is not None:
            replicas = self._feed.replicas
            loading.load(args, self._chunks, optimizer, scheduler, context, work.together, replicas=replicas)
        start = Start.of(args, scheduler, work.model.spec.loaded_groups)
        start.note(member)
        return start

    def _enter(self, model: MegatronModel) -> CommonWork:
        """Enter the first generation, after which the groups of the start are not needed any more."""
        from megatron.training import get_args

        session = self._session
        runtime = session.enter(
            model, on_commit=lambda step, outcome: None, on_groups=self._on_groups, joins=False
        )
        signals.install(get_args(), runtime, session.member)
        work = CommonWork(
            session=session,
            runtime=runtime,
            recovery=Recovery(session.member, runtime),
            model=model,
            groups=self._groups,
            chunks=self._chunks,
        )
        self._saves.attach(session, runtime, model, session.injector.at)
        if not session.member.joins:
            work.recovery.carry_out(lambda generation: None)
            work.leave_start()
        work.refresh()
        return work

    def _together(self, work: Callable[[Any], Any]) -> Any:
        assert self._work is not None, "nothing is common work before the first generation"
        return self._work.together(work)

    def _on_groups(self, named: Any) -> None:
        """Update who is rank 0 and who is the last rank in a new generation."""
        from megatron.training import get_args

        self._groups.mean(named)
        world, args = named[WORLD], get_args()
        args.rank, args.world_size = world.rank(), world.size()
        last = world.rank() == world.size() - 1
        for one in (self._lines, self._board):
            if one is not None:
                one.become_last() if last else one.hand_over()

    def set_tensorboard_writer(self, original: Any, args: Any) -> None:
        self._board = tensorboard.replace_writer(args, self._session.member)
        if self._board is None:
            original(args)

    def print_rank_last(self, original: Any, message: str) -> None:
        self._lines.say(lambda: original(message))

    def build_data_iterators(self, original: Any, provider: Any) -> Any:
        """Build the data iterators as one piece of common work: if the first rank dies while it builds an index,
        another rank has to build it.
        """
        from megatron.training import get_args

        args = get_args()
        eval_iters = args.eval_iters

        def build(world: Any) -> Any:
            args.eval_iters = eval_iters  # an earlier attempt may have replaced it by the data's
            return original(provider)

        # Megatron's compiled helpers keep the GIL while they build an index.
        with self._session.member.liveness.excused(), whole_indices():
            return build(None) if self._groups.are_first else self._together(build)
