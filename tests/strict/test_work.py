"""What steps are not made of alone, under the rules of CUDA and NCCL: a weight with two places, evaluations and other
common work between steps, messages that are sent for their times.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from tests.execute.alone import HEAD, TIED  # noqa: E402
from tests.strict.cases import DEVICES, LINKS, TIGHT, case, profile  # noqa: E402
from tests.strict.checking import check  # noqa: E402
from tests.strict.job import Case, Kill  # noqa: E402
from tests.strict.test_jobs import PLANS  # noqa: E402


def tied(*kills, stages=2, replicas=2, **others):
    return Case(
        stages=stages, replicas=replicas, profile=profile(tied=True), kills=kills, tied=True, **others
    )


@pytest.mark.parametrize("copies", [0, 2])
def test_a_tied_weight_is_summed_over_both_its_places(copies):
    ended = check(
        tied(stages=3, replicas=3 if copies else 1, copies=copies, flags={"redundancy": "off"}), seed=1
    )
    layers = [set(rank.model.held) for rank in ended.ranks]
    assert [TIED in own for own in layers] == [bool({0, HEAD} & own) for own in layers]
    assert not all(TIED in own for own in layers)


@pytest.mark.parametrize(
    ("rank", "point", "copies"),
    [(0, "backward", 0), (5, "reduce", 0), (0, "weight_grad", 2), (5, "param_gather", 2)],
)
def test_one_of_its_places_is_lost(rank, point, copies):
    kill, sizes = Kill(rank=rank, step=1, point=point), (2, 3) if copies else (3, 2)
    one = tied(kill, stages=sizes[0], replicas=sizes[1], copies=copies, **(TIGHT if rank else {}))
    assert check(one, seed=int(rank > 0)).outcomes()


def test_both_places_on_one_worker():
    """Routes turn, on one hardware queue."""
    ample = replace(profile(tied=True).costs, link_latency_s=0.0, link_bytes_per_s=1e12, memory_bytes=10**9)
    quick = replace(profile(tied=True), costs=ample)
    one = replace(tied(steps=2, virtual_stages=2, **TIGHT), profile=quick)
    ended = check(one, seed=1)
    assert any({0, HEAD, TIED} <= set(rank.model.held) for rank in ended.ranks)


def evaluating(*kills, copies=0, **others):
    replicas = 3 if copies else 2
    return Case(
        stages=2, replicas=replicas, profile=profile(), kills=kills, copies=copies, evaluates=True, **others
    )


@pytest.mark.parametrize("copies", [0, 2])
@pytest.mark.parametrize("rank", [0, 3])
def test_killed_in_an_evaluation(rank, copies):
    """Of the weights that the last step has left; it is done again, and has changed nothing."""
    kill = Kill(rank=rank, step=1, point="evaluate")
    assert check(evaluating(kill, copies=copies, **(TIGHT if rank else {})), seed=int(rank > 0)).struck


@DEVICES
def test_links_are_timed_between_steps(device):
    one = Case(stages=3, replicas=2, profile=profile(), flags=LINKS, **device)
    ended = check(one, seed=1)
    measured = [json.loads(rank.measured) for rank in ended.ranks]
    assert all(one["links"] for one in measured)
    # Before the first step: those of routes, and of the last stage that of its sum.
    assert [one["link"]["worker"] for one in measured] == [2, 3, 0, 1, 5, 4]
    assert sum(bool(one["sums"]) for one in measured) >= 3, "of each stage to one of those who hold it"


@pytest.mark.parametrize("rank", [0, 3])
def test_killed_while_links_are_timed(rank):
    kill = Kill(rank=rank, step=1, point="exchange")
    one = Case(stages=3, replicas=2, profile=profile(), kills=(kill,), flags=LINKS, **(TIGHT if rank else {}))
    assert check(one, seed=int(rank > 0)).outcomes()


KINDS = {
    "tied": {"tied": True},
    "tied and cut": {"tied": True, "copies": 2},
    "evaluates": {"evaluates": True},
    "evaluates, cut": {"evaluates": True, "copies": 2},
    "times links": {"times_links": True},
    "all": {"tied": True, "evaluates": True, "times_links": True},
}


@pytest.mark.matrix
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", range(5))
def test_all_random_jobs(part, kind):
    for number in range(part, PLANS // 4, 5):
        for seed in range(2):
            one = replace(case(number, **KINDS[kind]), **(TIGHT if seed else {}))
            check(one, 100 * number + seed)


def test_messages_are_let_go_of_once_the_device_has_sent_them(monkeypatch):
    """Not at the end of the program, before which a stage has sent all its microbatches' activations."""
    from odyssey_megatron.execute.channels import Channels

    left, wait = list[int](), Channels.wait_sent

    def waits(self):
        left.append(len(self._sent))
        return wait(self)

    monkeypatch.setattr(Channels, "wait_sent", waits)
    one = Case(stages=2, replicas=1, steps=3, profile=profile())
    for seed in range(4):
        check(one, seed)
    assert min(one for one in left if one) < max(left)
