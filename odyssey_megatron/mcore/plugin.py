"""The entry point for a training script: connect to the job, describe the model, train.

    with Session.start(config) as session:  # after parsing the flags, before importing Megatron
        with session.rank_zero_first():
            dataset = ...
        session.train(TrainingJob(...))

Whatever ends the job becomes the process's exit code (docs/running.md).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from odyssey_megatron import recover
from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.codec import to_json
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import (
    EXIT_FENCED,
    ConfigError,
    ControlPlaneLost,
    Fenced,
    JobStopped,
    LeftOut,
    PeerFailed,
    Superseded,
    Unsound,
)
from odyssey_megatron.faults import check_can_strike
from odyssey_megatron.launch.process.ending import will_exit_with
from odyssey_megatron.launch.rank.environment import journal_of
from odyssey_megatron.launch.rank.injector import Injector
from odyssey_megatron.launch.rank.member import Member
from odyssey_megatron.mcore import device
from odyssey_megatron.mcore.checks import check_job, check_samples, digest_of_samples
from odyssey_megatron.mcore.estimate import estimate, experts_work
from odyssey_megatron.mcore.settings import settings_of
from odyssey_megatron.metrics.journal import Journal
from odyssey_megatron.metrics.outlet import say
from odyssey_megatron.policy.costs.profile import Profile, load_profile
from odyssey_megatron.rebuild import world
from odyssey_megatron.upstream import compat, smaller

if TYPE_CHECKING:
    from odyssey_megatron.execute.rank import RankRuntime
    from odyssey_megatron.mcore.loop.balance import Balance
    from odyssey_megatron.mcore.loop.outcome import StepOutcome
    from odyssey_megatron.mcore.model.groups import OwnCell
    from odyssey_megatron.mcore.model.holdings import Holdings
    from odyssey_megatron.mcore.model.layers import ModelSpec
    from odyssey_megatron.mcore.model.model import MegatronModel
    from odyssey_megatron.mcore.model.passes import ForwardStep


_LAST_WORDS_S = 1.0
"""Time that a rank which leaves has to write its last journal lines to disk."""


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """Everything that a training run is made of. Sizes are as in Megatron's arguments of the same name."""

    model: ModelSpec
    forward_step: ForwardStep
    """Megatron's forward step, called with an iterator over the plan's microbatches and a model chunk: for any
    microbatch, and for the same one again. What it draws from torch's default generators depends on the step and the
    microbatch alone. Its loss function reports a tensor under each of ``loss_names``: one number, whose mean over
    microbatches is logged, or a sum and a count.
    """
    dataset: Sequence[Any]
    """The samples, indexed by global sample number: step i takes the ``global_batch_size`` samples from
    ``i * global_batch_size`` on, in order. They are the same on all ranks, and do not depend on what was read before.
    """
    train_iters: int
    global_batch_size: int
    micro_batch_size: int
    seq_length: int
    vocab_size: int
    pipeline_model_parallel_size: int
    optimizer_copies: int = 0
    """Number of holders that keep a layer's optimizer state; 0: all of them."""
    scheduler: dict[str, Any]
    """Arguments of Megatron's OptimizerParamScheduler, apart from the optimizer. Its steps are samples: a warm-up over
    two batches is ``lr_warmup_steps=2 * global_batch_size``. ``max_lr`` and ``min_lr`` are the OptimizerConfig's ``lr``
    and ``min_lr``.
    """
    loss_names: Sequence[str] = ("lm loss",)
    check_weight_hash_across_dp_replicas_interval: int = 0
    """Number of steps between two checks that all holders of a layer have the same weights and optimizer state; 0: no
    checks.
    """
    squared_lengths: Callable[[int], float] | None = None
    """For ``--odyssey-sequence-balance``: maps a sample's global index to the sum of the squared lengths of the
    sequences packed in it, which determines the cost of attention; at most ``seq_length**2``. It must be the same on
    all ranks. They call it for the next step's samples in every step, so it should not read the samples themselves.
    """
    on_step: Callable[[int, StepOutcome], None] = lambda step, outcome: None
    """Called after each committed step (counted from 0) on the lowest living rank, e.g. to print. If that rank dies
    soon after a step, the next one calls it for the same step once more.
    """
    on_end: Callable[[Holdings], None] | None = None
    """Called on all ranks with the final weights (``Holdings.weights``), e.g. to write them. It is part of the job: if
    a rank dies before all ranks have finished it, the survivors move its layers and call it again. It must tolerate
    being interrupted at any point. In it ``torch.distributed``'s default group consists of the living ranks, and the
    lowest of them is rank 0. Everywhere else in training, operations on that group raise.
    """


class Session:
    """This process as a rank of the job. Use as a context manager."""

    def __init__(self, config: OdysseyConfig, member: Member, journal: Journal):
        self.config, self.member, self._journal = config, member, journal
        self.rank, self.world_size = member.rank, member.world_size
        self._has_trained = False
        self.injector = Injector(config.injections, member.rank, journal, member.incarnation)
        """Fires the faults that this rank is to have, wherever in the job they are armed for."""

    @classmethod
    @contextmanager
    def start(cls, config: OdysseyConfig, *, default_group: bool = True) -> Iterator[Session]:
        """Join the job, and turn whatever ends it into exit codes (docs/running.md).

        Args:
            default_group: initialise ``torch.distributed``.

        Raises:
            ConfigError: the process was not started by ``odyssey run``.
            SystemExit: with the job's exit code.
        """
        member = Member.connect(config)
        journal = journal_of(member.rank, config.run_dir)
        member.journal = journal
        session = cls(config, member, journal)
        with session.ending():
            device.install(config)
            compat.check_version()
            if default_group:
                if dist.is_initialized():
                    raise ConfigError(
                        "torch.distributed is initialised already. Session.start does that, and Session.train makes "
                        "Megatron's groups: leave out init_process_group and initialize_model_parallel."
                    )
                from odyssey_megatron.rebuild.groups import init_default_group

                init_default_group(member)
            yield session

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Turn whatever ends the job in the body into the end of this process.

        Raises:
            SystemExit: with the job's exit code.
        """
        try:
            with self._ending():
                yield
        except SystemExit as end:
            will_exit_with(end.code if isinstance(end.code, int) else int(end.code is not None))
            raise
        except BaseException:
            will_exit_with(1)
            raise

    @contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            yield
        except (ConfigError, Unsound) as error:
            self.member.refuse(error)
        except JobStopped as stop:
            self._journal.event("stopped", why=str(stop), exit_code=stop.exit_code)
            raise SystemExit(stop.exit_code) from None
        except LeftOut as end:
            say(f"[odyssey] rank {self.rank} stops: {end}")
            with suppress(OSError, ValueError):
                sys.stdout.flush()
            self._journal.flush(_LAST_WORDS_S)
            os._exit(
                end.exit_code
            )  # the others wait for this exit, and an interpreter with a GPU ends slowly
        except (Fenced, ControlPlaneLost) as end:
            sys.stderr.write(f"[odyssey] rank {self.rank} stops: {end}\n")
            # One that is left out for its memory is not to be started again for ever.
            is_sound = isinstance(end, Fenced) and not self.member.reports.ran_out
            raise SystemExit(EXIT_FENCED if is_sound else 1) from None
        except (PeerFailed, Superseded) as end:
            sys.stderr.write(
                f"[odyssey] rank {self.rank} stops: a rank was lost before training began ({end})\n"
            )
            # A process that joins got here because its cell has lost another rank.
            raise SystemExit(EXIT_FENCED if self.member.joins else 1) from None
        except Exception as error:  # libraries wrap what their collectives raise
            if not self.member.is_fenced:
                self.member.fail(error)
                raise
            sys.stderr.write(f"[odyssey] rank {self.rank} stops: its cell has lost a rank ({error})\n")
            raise SystemExit(EXIT_FENCED) from None

    def rank_zero_first(self) -> AbstractContextManager[None]:
        """Run the body on rank 0 first, then on all others: for index files that Megatron's datasets cache."""
        return self.member.starting.rank_zero_first()

    def train(self, job: TrainingJob) -> Holdings:
        """Train to the last step, through failures, and return what this rank holds, with the final weights.

        A rank that dies after that, but before its script has ended, is not replaced; the job's exit code is then 1.
        Whatever must be on disk when the job is over belongs in ``job.on_end``.

        Raises:
            ConfigError: before anything was trained.
            JobStopped: no holder of some layer is left.
            Unsound: the loss is not finite, or the holders of a layer differ (where that is checked).
        """
        if self._has_trained:
            raise RuntimeError(
                "Session.train was called a second time: a job trains once. Start another job."
            )
        self._has_trained = True
        check_job(job, sequence_balance=self.config.sequence_balance)
        length = {"train_iters": job.train_iters, "global_batch_size": job.global_batch_size}
        check_samples(job.dataset, **length)
        spec = self._job_spec(job)
        configs = job.model.config, job.model.optimizer_config
        settings = settings_of(*configs, job.scheduler, seed=job.model.seed)
        settings["the digest of the data set's first and last sample"] = digest_of_samples(
            job.dataset, **length
        )
        self.post(spec, self._profile(job), settings)
        own = self.member.cell(spec)
        if self.member.joins and own.full > 1:
            self.member.company.meet(own)
        cell = self._take_cell(own, job.model)
        model = self._model(job, own, cell)
        model.microbatches.balance = self._balance(job, places=spec.num_microbatches)
        rank = self.enter(
            model, on_commit=job.on_step, on_groups=cell.follow if cell else lambda groups: None
        )

        def check(recovery: recover.Recovery) -> None:
            every = job.check_weight_hash_across_dp_replicas_interval
            if every and rank.committed % every == 0:
                recovery.together(lambda world: rank.training.check_holders(world))

        end = self._ending_of(job, model.holdings, cell)
        try:
            recover.train(self.member, rank, train_steps=job.train_iters, after_step=check, at_end=end)
        except (JobStopped, Unsound):
            self.note_end(rank, model)
            raise
        self.note_end(rank, model)
        return model.holdings

    def _ending_of(
        self, job: TrainingJob, holdings: Holdings, cell: OwnCell | None
    ) -> Callable[[recover.Recovery], None]:
        """What calls ``job.on_end``, which alone reaches the other ranks by ``torch.distributed``'s default group."""
        device, nobody = self.config.device, world.Unreachable(self.rank, self.world_size)
        everyone = cell.living if cell else world.become_default(self.rank, self.world_size, device)
        everyone.follow(nobody)

        def work(living: dist.ProcessGroup) -> None:
            assert job.on_end is not None
            everyone.follow(living)
            try:
                job.on_end(holdings)
            finally:
                everyone.follow(nobody)

        return lambda recovery: recovery.together(work) if job.on_end is not None else None

    def note_end(self, rank: RankRuntime, model: MegatronModel) -> None:
        """Record the last step, the sizes of the state and the digests of the weights in the journal."""
        rank.chronicle.log_last_step()
        sizes: dict[str, Any] = {
            "state_bytes": model.holdings.state_bytes(),
            "optimizer_bytes": model.holdings.optimizer_bytes(),
            "host_bytes": model.holdings.host_bytes(),
        }
        self._journal.event("weights", step=rank.committed, **sizes, digest=model.holdings.digests())

    def note_save(self, step: int, save_s: float) -> None:
        """Record in the journal that ``step`` waited ``save_s`` seconds for a checkpoint."""
        self._journal.event("saved", step=step, save_s=save_s)

    def note_not_saved(self, iteration: int, why: str) -> None:
        """Tell the user, and the journal, that a checkpoint is missing."""
        sys.stderr.write(f"[odyssey] THE CHECKPOINT OF ITERATION {iteration} WAS NOT SAVED: {why}.\n")
        self._journal.event("not_saved", step=iteration, why=why)

    def post(self, spec: JobSpec, profile: Profile, settings: Mapping[str, str]) -> None:
        """Tell the coordinator what to plan for. Collective. Raises ConfigError."""
        spec.check(self.world_size)
        check_can_strike(
            self.config.inject,
            train_steps=spec.train_steps,
            cuts_state=spec.optimizer_copies > 0,
            times_links=self.config.time_links == "on",
        )
        self.member.starting.post_job(spec, to_json(profile), settings)

    def enter(
        self,
        model: MegatronModel,
        *,
        on_commit: Callable[[int, Any], None],
        on_groups: Callable[[Any], None] = lambda groups: None,
        first_step: int = 0,
        joins: bool = True,
    ) -> RankRuntime:
        """Build the object through which ``recover.Recovery`` drives this rank. Waits until all ranks have built their
        models.

        Args:
            joins: a process that takes the place of a dead rank reports here that it is ready; if False, the caller
                does so later.
        """
        from odyssey_megatron.execute.rank import RankRuntime
        from odyssey_megatron.rebuild.groups import build_groups, libraries_for

        self.member.starting.wait_all("model-built")
        libraries = libraries_for(self.config)
        rank = RankRuntime(
            config=self.config,
            member=self.member,
            model=model,
            build=lambda number, named, before: build_groups(
                self.member, number, named, self.config, libraries, before
            ),
            tagged_messages=not self.config.uses_nccl,
            fault_point=self.injector.at,
            slowness=self.injector.slowness,
            slow_links=self.injector.slow_links,
            journal=self._journal,
            on_commit=on_commit,
            on_groups=on_groups,
            cell=model.holdings.cell,
            first_step=first_step,
        )
        if self.member.joins:
            model.holdings.stand_in()
        if self.member.joins and joins:
            self.member.join()
        return rank

    def _job_spec(self, job: TrainingJob) -> JobSpec:
        config = job.model.config
        tp, cp = config.tensor_model_parallel_size, config.context_parallel_size
        parts = (tp if config.sequence_parallel else 1) * (2 * cp if cp > 1 else 1)
        if job.seq_length % parts:
            asked = (
                [f"--tensor-model-parallel-size {tp} with --sequence-parallel"]
                if config.sequence_parallel
                else []
            )
            asked += [f"--context-parallel-size {cp}, whose ranks compute two pieces each"] if cp > 1 else []
            raise ConfigError(
                f"--seq-length {job.seq_length} is not divisible by {parts}, as {' and '.join(asked)} cut it. Choose a "
                "multiple of it."
            )
        lanes = Cell.in_job(self.rank, config).lanes
        if job.global_batch_size % (job.micro_batch_size * lanes):
            times = (
                f" times {lanes}, the replicas over which --expert-model-parallel-size "
                f"{config.expert_model_parallel_size} spreads experts"
            )
            raise ConfigError(
                f"--global-batch-size {job.global_batch_size} is not divisible by --micro-batch-size "
                f"{job.micro_batch_size}{times if lanes > 1 else ''}. Choose a multiple of "
                f"{job.micro_batch_size * lanes}."
            )
        kept = smaller.kept_whole(
            config, optimizer=job.model.optimizer_config.optimizer, is_packed=job.model.is_packed
        )
        return JobSpec(
            num_layers=job.model.num_layers,
            is_tied=job.model.shares_embedding,
            pipeline_model_parallel_size=job.pipeline_model_parallel_size,
            tensor_model_parallel_size=config.tensor_model_parallel_size,
            context_parallel_size=config.context_parallel_size,
            hierarchical_context_parallel_sizes=tuple(config.hierarchical_context_parallel_sizes or ()),
            expert_model_parallel_size=config.expert_model_parallel_size,
            expert_tensor_parallel_size=config.expert_tensor_parallel_size,
            num_microbatches=job.global_batch_size // (job.micro_batch_size * lanes),
            tokens_per_step=job.global_batch_size * job.seq_length,
            train_steps=job.train_iters,
            optimizer_copies=job.optimizer_copies,
            whole_cells_only=kept.whole,
            whole_shards_only=kept.shards,
            even_gangs_only=kept.even,
            num_experts=config.num_moe_experts or 0,
            packs_sequences=job.model.is_packed or job.squared_lengths is not None,
            experts_work=experts_work(config, seq_length=job.seq_length, vocab_size=job.vocab_size),
            least_holders=self.config.least_holders,
            eager_forwards=self.config.eager_forwards,
            slower_for_memory=self.config.slower_for_memory,
            save_steps=0,
        )

    def _profile(self, job: TrainingJob) -> Profile:
        if self.config.profile:
            return load_profile(self.config.profile)
        return self._estimated(job, job.seq_length)

    def _estimated(self, job: TrainingJob, seq_length: int) -> Profile:
        return estimate(
            job.model.config,
            self.config,
            seq_length=seq_length,
            micro_batch_size=job.micro_batch_size,
            vocab_size=job.vocab_size,
            is_tied=job.model.is_tied,
        )

    def _balance(self, job: TrainingJob, *, places: int) -> Balance:
        from odyssey_megatron.mcore.loop.balance import Balance

        return Balance.of(
            self.config,
            is_packed=job.squared_lengths is not None,
            speaks=self.rank == 0,
            places=places,
            steps=job.train_iters,
            seq_length=job.seq_length,
            rows=job.micro_batch_size,
            profile=lambda length: self._estimated(job, length),
        )

    def _take_cell(self, cell: Cell, model: ModelSpec) -> OwnCell | None:
        """Set up the cell of ``cell.size`` ranks that compute together; None if this rank alone is a worker."""
        if cell.size == 1:
            return None
        from odyssey_megatron.mcore.model.groups import OwnCell

        dist.destroy_process_group()  # the placeholder
        own = OwnCell(cell, self.world_size, self.config.device, data_parallel=model.looks_ahead)
        own.living.follow(world.Unreachable(self.rank, self.world_size))
        return own

    def _model(self, job: TrainingJob, own: Cell, cell: OwnCell | None) -> MegatronModel:
        from odyssey_megatron.mcore.loop.data import MicrobatchSource
        from odyssey_megatron.mcore.model import float64, parts, wgrad
        from odyssey_megatron.mcore.model.model import MegatronModel
        from odyssey_megatron.mcore.model.optimizer import LearningRate

        wgrad.install()
        if job.model.config.params_dtype == torch.float64:
            float64.install()
        whole = parts.adapt(job.model.config, own)
        return MegatronModel(
            job.model,
            forward_step=job.forward_step,
            source=MicrobatchSource(
                job.dataset,
                micro_batch_size=job.micro_batch_size,
                squared_lengths=job.squared_lengths,
            ),
            learning_rate=LearningRate(**job.scheduler),
            num_microbatches=job.global_batch_size // job.micro_batch_size,
            seq_length=job.seq_length,
            micro_batch_size=job.micro_batch_size,
            loss_names=job.loss_names,
            spare_on_host=self.config.spare_on_host,
            groups_of_cell=cell.groups if cell else None,
            cell=own,
            cuts_activations=whole.sequence_parallel,
        )
