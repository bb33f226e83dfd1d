"""What the next loss would do to a plan: the loss of any one GPU, or of any one node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from odyssey_megatron.cluster.events import RankDied
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.cluster.state import ClusterState, apply
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import LayersLost, PlanInfeasible
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.decide import decide
from odyssey_megatron.policy.preparing import one_of_each, prepare_for


@dataclass(frozen=True, slots=True, kw_only=True)
class NextLoss:
    """The loss of any one of several workers that have the same part in a plan."""

    workers: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    """The layers [first, last) that each of them computes."""
    policy: str = ""
    """The policy that would be taken; "": the job would end."""
    step_s: float | None = None
    alone: tuple[int, ...] = ()
    """The layers some of whose state only one worker would have then."""
    why: str = ""
    """The reason why the job would end."""


def next_losses(
    job: JobSpec,
    state: ClusterState,
    plan: Plan,
    profile: Profile,
    config: OdysseyConfig,
    say: Callable[[str], None] = lambda _: None,
) -> list[NextLoss]:
    """Return one entry for all workers whose deaths lead to equal plans; the worst first.

    ``say`` is told how far it is.
    """
    found, kinds = [], one_of_each(plan, state)
    for at, workers in enumerate(kinds):
        say(f"what the next loss would do: {at} of {len(kinds)}")
        spans = _spans(plan.layout, workers[0])
        died = RankDied(rank=state.workers[workers[0]].ranks[0], code=-9, cause="asked", t_s=0.0)
        left = apply(state, died)
        prepare_for(len(left.alive), job, profile)
        try:
            after = decide(job=job, state=left, previous=plan, profile=profile, config=config, now_s=0.0)
        except (LayersLost, PlanInfeasible) as error:
            found.append(NextLoss(workers=tuple(workers), spans=spans, why=str(error)))
        else:
            found.append(
                NextLoss(
                    workers=tuple(workers),
                    spans=spans,
                    policy=after.policy,
                    step_s=after.best.step_s,
                    alone=tuple(alone(after.best.layout)),
                )
            )
    return sorted(found, key=lambda one: (one.step_s is not None, -(one.step_s or 0.0), one.workers))


def alone(layout: Layout) -> list[int]:
    """Return the layers some of whose state only one worker has."""
    return sorted({layer for layers in layout.alone().values() for layer in layers})


def _spans(layout: Layout, worker: int) -> tuple[tuple[int, int], ...]:
    hops = (hop for route in layout.routes for hop in route.hops)
    return tuple(sorted({(hop.first, hop.last) for hop in hops if hop.worker == worker}))
