"""Routes that visit workers twice, down the stages and up or down again: as exact as any other, whatever fails.

    bash tests/run.sh tests/e2e/test_visits.py -m ""        # all of it, half an hour on two cores

Jobs begin with them under ``--odyssey-layout auto``, by a profile in which memory is short. In most nothing is measured
(``unmeasured.py``): so plans are the same in each run, and so is what moves to get there, and when.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest

from odyssey_megatron.config import policies
from odyssey_megatron.faults import RECOVERY_POINTS, STEP_POINTS
from odyssey_megatron.policy.costs.profile import Profile
from tests.e2e.jobs import SCRIPT, assert_equal_runs, cases_of
from tests.e2e.test_rejoin import members
from tests.launch.jobserver import CHECKOUT
from tests.plan.samples import layer, uniform_costs

pytestmark = pytest.mark.timeout(300)

UNMEASURED = CHECKOUT / "tests" / "e2e" / "unmeasured.py"
UNIT = 2**30
ROOM = {"turning": 18, "interleaved": 22}
"""Routes -> the memory of a worker, in units, with which they have the shortest step."""
CELLS = "--tensor-model-parallel-size 2"
SLICED = "--use-distributed-optimizer"
TIED = "--share-embeddings-and-output-weights --attention-dropout 0.1 --hidden-dropout 0.1"
STATES = {
    # ranks, stages of the launch line, flags of the model, flags of how its state is kept
    "replicated": (6, 3, "", ""),
    "sliced": (6, 3, "", SLICED),
    "cells": (8, 2, CELLS, ""),
    "sliced-cells": (8, 2, CELLS, SLICED),
    "tied": (6, 3, TIED, ""),
    "thirds": (6, 2, "--num-layers 4", SLICED),
}
FIRST_TWO = ("replicated", "sliced")
JOBS = [one for one in itertools.product(STATES, ROOM) if one != ("thirds", "interleaved")]
PAIRS = {
    # Workers 0, 1, 2 and 4, 5, 3: the first has embedding and head, and at the last the route turns.
    ("turning", 6): {"first": (2, 4), "turn": (1, 3), "middle": (0, 5)},
    # Workers 0 and 1, 2 and 3, 4 and 5.
    ("interleaved", 6): {"first": (1, 4), "last": (0, 3)},
    # Workers 0 and 2, 1 and 3, of two ranks each; interleaved, 2 and 0, 3 and 1.
    ("turning", 8): {"first": (5, 2), "turn": (1, 4)},
    ("interleaved", 8): {"first": (0, 5), "last": (5, 0)},
}
THIRDS = PAIRS["interleaved", 6]
"""Of three pipelines that turn, of the same workers: two of three holders have a slice, as of interleaved ones."""
"""Routes and ranks -> of each kind of victim, who dies first, and who dies next or alone. The latter gives or takes
layers after the former's death, and holds none alone then.
"""
GATHERS = (("sliced", "interleaved"), ("thirds", "turning"))
BEHIND_STEPS = (
    ("groups", 3), ("agree", 3), ("transfer", 3), ("reduce", 3), ("commit", 3),
    ("groups", 4), ("transfer", 4), ("backward", 4), ("optimizer", 4),
)  # fmt: skip
"""Points, and the generation that they are in: that which fills new holders, and that which routes to them."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One job, and what kills its ranks."""

    routes: str
    state: str
    inject: str
    policy: str = "auto"
    state_bytes: int = 1
    """Of a layer, by the profile: what takes long moves behind steps."""
    more: str = ""

    @property
    def model(self) -> str:
        return f"{STATES[self.state][2]} {self.more}".strip()

    def profile(self, path):
        """With memory for little more than 1F1B's activations."""
        one = replace(
            layer(1e-3, 1e-3, 1e-3, UNIT, self.state_bytes),
            weight_bytes=UNIT, gradient_bytes=UNIT, optimizer_bytes=2 * UNIT,
        )  # fmt: skip
        layers, room = (4, 14) if self.state == "thirds" else (6, ROOM[self.routes])
        costs = uniform_costs(layers, ends=True)
        costs = replace(
            costs, layers=(costs.layers[0], *(one,) * layers, costs.layers[-1]), link_bytes_per_s=1e12,
            memory_bytes=room * UNIT, tied=layer() if self.state == "tied" else None,
        )  # fmt: skip
        Profile(costs=costs, group_build_s=0.0).save(path)
        return path


def pairs_of(routes: str, state: str) -> dict[str, tuple[int, int]]:
    return THIRDS if state == "thirds" else PAIRS[routes, STATES[state][0]]


def victims_of(routes: str, state: str, number: int) -> dict[str, tuple[int, int]]:
    """The pairs of that job in the first two states; in the others one of them, by turns."""
    pairs = pairs_of(routes, state)
    if state in FIRST_TWO:
        return pairs
    name = [*pairs][number % len(pairs)]
    return {name: pairs[name]}


def one_after_the_other(pair: tuple[int, int], point: str, generation: int) -> str:
    first, second = pair
    return f"rank={first},step=2,at=backward;rank={second},step=-1,at={point},generation={generation}"


def cases_in_a_step() -> dict[str, Case]:
    """Each kind of victim, and at some points two at once."""
    found = {}
    for (n, point), (state, routes) in itertools.product(enumerate(STEP_POINTS), JOBS):
        if point == "param_gather" and (state, routes) not in GATHERS:
            continue  # two holders of a layer keep all of it, and gather nothing
        who = {name: (second,) for name, (_, second) in victims_of(routes, state, n).items()}
        if state in FIRST_TWO and point in ("forward", "reduce", "optimizer"):
            who["two"] = PAIRS[routes, 6]["first"]
        for m, (name, victims) in enumerate(who.items()):
            found[f"{routes}-{state}-{point}-{name}"] = Case(
                routes=routes, state=state, policy=policies()[(n + m) % len(policies())],
                inject=";".join(f"rank={rank},step=2,at={point}" for rank in victims),
            )  # fmt: skip
    return found


def cases_in_a_recovery() -> dict[str, Case]:
    found = {}
    for (n, point), (state, routes) in itertools.product(enumerate(RECOVERY_POINTS), JOBS):
        for name, pair in victims_of(routes, state, n).items():
            generation = 1 if point == "abort" else 2  # that phase ends the one before
            inject = one_after_the_other(pair, point, generation)
            found[f"{routes}-{state}-{point}-{name}"] = Case(routes=routes, state=state, inject=inject)
    return found


def cases_behind_steps() -> dict[str, Case]:
    found = {}
    for (n, (point, generation)), (state, routes) in itertools.product(enumerate(BEHIND_STEPS), JOBS):
        if state == "tied" or (state not in FIRST_TWO and n % 2):
            continue
        # With slices, weights come by what is gathered after each step, and then slices move.
        if point == "transfer" and generation != (4 if SLICED in STATES[state][3] else 3):
            continue
        # Cells end in one pipeline, and turning ones have no room to be filled first: then nobody may be lost.
        last = 3 if routes == "turning" and state == "cells" else 4
        if "cells" in state and generation >= last and (generation > last or point not in RECOVERY_POINTS):
            continue
        names = ("first", "turn") if routes == "turning" and state != "thirds" else ("first", "last")
        name = names[(n if state in FIRST_TWO else n // 2) % 2]
        found[f"{routes}-{state}-{point}-{generation}-{name}"] = Case(
            routes=routes, state=state, state_bytes=100 * UNIT, more="--train-iters 20",
            inject=one_after_the_other(pairs_of(routes, state)[name], point, generation),
        )  # fmt: skip
    return found


def cases_of_returns() -> dict[str, Case]:
    """One rank comes back; that process dies as it is filled, and a third one comes; another rank dies meanwhile."""
    found = {}
    for state, routes in JOBS:
        name, (first, second) = next(iter(pairs_of(routes, state).items()))
        and_then = {
            "": "",
            "-dies-again": f";rank={second},step=-1,at=transfer,incarnation=1",
            "-another-dies": f";rank={first},step=-1,at=agreement,generation=3",
        }
        for then, inject in and_then.items() if state in FIRST_TWO else [("", "")]:
            found[f"{routes}-{state}-{name}{then}"] = Case(
                routes=routes,
                state=state,
                more="--train-iters 40",
                inject=f"rank={second},step=2,at=backward{inject}",
            )
    return found


STEPS, RECOVERIES = cases_in_a_step(), cases_in_a_recovery()
BEHIND, RETURNS = cases_behind_steps(), cases_of_returns()
ALWAYS = {
    "interleaved-sliced-reduce-two",
    "turning-replicated-transfer-turn",
    "interleaved-sliced-cells-transfer-last",
    "turning-sliced-transfer-4-first",
}
"""In every run of the tests."""


@pytest.fixture
def shot(jobs, undisturbed, tmp_path, name):
    """A job that has come to the same as an undisturbed one, and whose routes were these when the first rank died."""

    def run(case: Case, more: str = "", script=UNMEASURED):
        ranks, stages, _, kept = STATES[case.state]
        found = case.profile(tmp_path / "short_of_memory.json")
        flags = f"{case.model} {kept} {more} --odyssey-layout auto --odyssey-profile {found}"
        flags += f" --odyssey-hang-s 5 --odyssey-policy {case.policy} --odyssey-inject {case.inject}"
        outcome = jobs.run(name, ranks=ranks, stages=stages, flags=flags, script=script, timeout_s=200.0)
        assert_equal_runs(outcome, undisturbed(case.model), kills=case.inject.count("rank="))
        assert_visits(outcome.named("decision")[0], case.routes)
        if script is UNMEASURED:
            assert outcome.named("injected")[0]["generation"] == 1
        return outcome

    return run


def visits(decision) -> list[list[int]]:
    """The workers that each route goes through."""
    return [[hop["worker"] for hop in route["hops"]] for route in decision["layout"]["routes"]]


def assert_visits(decision, routes: str) -> None:
    """All routes of that plan are such ``routes``."""
    for one in visits(decision):
        assert one == (one[::-1] if routes == "turning" else 2 * one[: len(one) // 2])
        assert len(one) > len({*one})


def assert_moves(before, after) -> None:
    """Somebody is to hold what it did not hold, and some workers are visited more than once then, too."""
    held = zip(before["layout"]["holders"], after["layout"]["holders"], strict=True)
    assert any(set(now) - set(then) for then, now in held), "no layer moves"
    assert any(len(one) > len({*one}) for one in visits(after))


@pytest.mark.parametrize("case", cases_of(STEPS, ALWAYS))
def test_killed_in_a_step(shot, case):
    shot(STEPS[case])


@pytest.mark.parametrize("case", cases_of(RECOVERIES, ALWAYS))
def test_killed_in_a_recovery(shot, case):
    """In which layers move at once."""
    before, after, *_ = shot(RECOVERIES[case]).named("decision")
    assert (after["generation"], after["planned"]) == (2, False)
    assert_moves(before, after)


@pytest.mark.parametrize("case", cases_of(BEHIND, ALWAYS))
def test_killed_while_layers_move_behind_steps(shot, case):
    first, at_once, behind, *_ = shot(BEHIND[case]).named("decision")
    assert [one["planned"] for one in (first, at_once, behind)] == [False, False, True]
    assert at_once["policy"] in ("reroute", "drop")
    assert_moves(at_once, behind)


@pytest.mark.matrix
@pytest.mark.parametrize("case", RETURNS)
def test_ranks_come_back_to_the_same_routes(shot, case):
    outcome = shot(RETURNS[case], more="--odyssey-respawn 2")
    assert members(outcome)[-1] == STATES[RETURNS[case].state][0], members(outcome)
    decided = outcome.named("decision")
    for what in (
        "layout",
        "schedule",
    ):  # where there is no room to be filled first, the last plan moves layers
        assert decided[0][what] == decided[-1][what]


MEASURED = {
    "turning": ("turning", "tied", "rank=3,step=2,at=backward;rank=0,step=2,at=agree,generation=2"),
    "interleaved": ("interleaved", "sliced", "rank=0,step=2,at=forward;rank=3,step=2,at=agree,generation=2"),
}
"""The second one dies before there is a plan without the first, which may leave a single holder of each layer."""


@pytest.mark.matrix
@pytest.mark.parametrize("case", MEASURED)
def test_what_follows_goes_by_measured_costs(shot, case):
    routes, state, inject = MEASURED[case]
    shot(Case(routes=routes, state=state, inject=inject), script=SCRIPT)
