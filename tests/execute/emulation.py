"""What a job of emulated accelerators is to do, and the planner that its coordinator asks.

``tests/execute/preload.py`` puts that planner in the product's place, in the process that jobs are forked from.
Everything else, ``decide()`` and ``verify()`` too, is the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import ClusterState
from odyssey_megatron.codec import from_json, to_json
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.plan.checking.simulate import reduce_hops
from odyssey_megatron.plan.checking.verify import verify
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.placing.memory import activation_caps
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.plan.schedule import Op, Schedule
from odyssey_megatron.plan.scheduling.messages import with_messages
from odyssey_megatron.plan.scheduling.order import order_routes
from odyssey_megatron.plan.scheduling.programs import Programs
from odyssey_megatron.plan.scheduling.reductions import with_reductions
from odyssey_megatron.plan.scheduling.visits import Visits
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.decide import decide
from odyssey_megatron.policy.decided import Decided
from odyssey_megatron.policy.planner import PolicyPlanner
from odyssey_megatron.studies.baselines import fused


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What the accelerators and links really take.

    Neither planner nor coordinator read it: the ranks measure it, as far as they do in a job.
    """

    costs: Costs
    """Times of layers, of a message between two workers, and of the optimizer. Bytes are those of the profile."""
    noise: float
    """Each instruction and message takes up to so much more or less of its time (uniform)."""
    reduce_latency_s: float
    reduce_bytes_per_s: float
    """A sum over holders: by rate and start of its own, since a collective does not run at a message's."""

    def reduced_s(self, num_bytes: int, holders: int, copies: int = 0) -> float:
        """Of ``num_bytes`` gradients over so many holders, without noise; less where ``copies`` of a slice are kept."""
        if holders < 2:
            return 0.0
        whole_s = (
            self.reduce_latency_s * holders + num_bytes * (holders - 1) / holders / self.reduce_bytes_per_s
        )
        return whole_s * reduce_hops(holders, copies) / reduce_hops(holders)


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """A job; lies in its run folder, where ranks and planner find it."""

    job: JobSpec
    profile: Profile
    speeds: tuple[tuple[int, float], ...] = ()
    """(worker, speed) of those that are not as fast as the others; known to the planner from the start."""
    slowed: tuple[tuple[int, float, int], ...] = ()
    """(worker, speed, first step): nobody tells the planner."""
    slowed_links: tuple[tuple[int, int, float, int], ...] = ()
    """(sender, receiver, factor, first step): messages take so many times theirs; nobody tells the planner."""
    megatron_start: bool = False
    """Start with Megatron's 1F1B, backward in one, in place of the planner's own schedule."""
    seamless: bool = False
    """A step begins where the deadlines of the last one ended, so that its modelled time is exact. Otherwise when the
    rank really begins it: what the runtime does between steps then counts."""
    rests_s: float = 0.0
    """What ranks do behind each step takes so long, as writing a checkpoint does."""
    among: tuple[str, ...] = ()
    """The options that recoveries choose from; empty = all."""
    two_speed: bool = False
    """As the product does: a recovery may go on by routes first, and layers move behind the steps. Otherwise each is
    one change of plan."""
    layer_bytes: int = 0
    """Of state that a layer really has, on top of its counter: what is sent when it moves."""

    def save(self, run_dir: Path, truth: Truth | None = None) -> None:
        """Writes it into ``run_dir``, which is made. Without ``truth`` everything takes what the profile says."""
        run_dir.mkdir(parents=True)
        (run_dir / "emulation.json").write_text(to_json(self))
        if truth is not None:
            (run_dir / "truth.json").write_text(to_json(truth))


def load_emulation(run_dir: str | Path) -> Emulation:
    """What :meth:`Emulation.save` wrote."""
    return from_json(Emulation, (Path(run_dir) / "emulation.json").read_text())


def load_truth(run_dir: str | Path) -> Truth | None:
    """For the accelerators alone."""
    path = Path(run_dir) / "truth.json"
    return from_json(Truth, path.read_text()) if path.exists() else None


class EmulationPlanner(PolicyPlanner):
    """The product's planner, told about slow workers, which the control plane does not measure yet.

    The profile is as it was posted, and what the ranks measure: nothing where everything takes what the profile says.
    """

    def __init__(self, config: OdysseyConfig):
        super().__init__(config)
        self._emulation = load_emulation(config.run_dir)

    def start(self, job: JobSpec, state: ClusterState, profile_json: str) -> Decided:
        decided = super().start(job, self._slowed(state), profile_json)
        if self._emulation.megatron_start:
            return replace(decided, plan=one_f_one_b(decided.plan, self.known.given.costs))
        return decided

    def learn(self, state: ClusterState, current: Plan, observations: Sequence[str], now_s: float):
        return super().learn(self._slowed(state), current, observations, now_s)

    def rehearse(self, state: ClusterState, current: Plan, now_s: float) -> None:
        super().rehearse(self._slowed(state), current, now_s)

    def decide(self, state: ClusterState, previous: Plan, now_s: float) -> Decided:
        if self._emulation.two_speed:
            return super().decide(self._slowed(state), previous, now_s)
        decision = decide(
            job=self._job,
            state=self._slowed(state),
            previous=previous,
            profile=self.known.used,
            config=self._config,
            now_s=now_s,
            among=self._emulation.among or None,
        )
        return Decided(plan=decision.plan, rows=decision.candidates)

    def _slowed(self, state: ClusterState) -> ClusterState:
        speeds = dict(self._emulation.speeds)
        return replace(
            state, workers=tuple(replace(w, speed=speeds.get(w.worker, 1.0)) for w in state.workers)
        )


def one_f_one_b(plan: Plan, costs: Costs) -> Plan:
    """``plan``'s layout under Megatron's schedule: 1F1B order and memory, the backward in one piece."""
    layout, whole = plan.layout, fused(costs)
    order = order_routes(layout, whole, in_flight_cap=activation_caps(layout, whole))
    programs = tuple(
        (
            worker,
            tuple(
                instr._replace(op=Op.BACKWARD) if instr.op is Op.INPUT_GRAD else instr
                for instr in program
                if instr.op is not Op.WEIGHT_GRAD
            ),
        )
        for worker, program in order.schedule().programs
    )
    visits = Visits(layout)
    lowered = with_reductions(with_messages(visits.encode(Schedule(programs=programs)), visits), visits)
    schedule = Schedule(programs=tuple((worker, visits.decode(codes)) for worker, codes in lowered.items()))
    timeline = verify(layout, schedule, costs)
    return replace(
        plan,
        policy="1f1b",
        programs=Programs.from_text(schedule.to_text()),
        step_s=timeline.step_s,
        peak_bytes=timeline.peak_bytes,
    )
