"""Ranks settle what they train, over a real store."""

from __future__ import annotations

import contextlib
import hashlib
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.codec import to_json
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import ConfigError, ControlPlaneLost
from odyssey_megatron.launch.agent.hosting import Hosting
from odyssey_megatron.launch.rank import starting
from odyssey_megatron.launch.rank.starting import Starting
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire.control import Control
from tests.launch.toy import posted_job

JOB, PROFILE = posted_job(pipeline=2, steps=3)
SETTINGS = {"lr": "0.01", "seed": "1"}


def posted(job: JobSpec = JOB, **settings: str) -> str:
    """What a rank posts."""
    return to_json({"job": to_json(job), "profile": PROFILE, "settings": SETTINGS | settings})


DIGEST = hashlib.sha256(posted().encode()).hexdigest()
ALONE = SimpleNamespace(newer_than=lambda number: False)


@pytest.fixture
def ranks(connect):
    """Rank 0 of so many, of which the others have posted ``digests``."""
    control = connect()

    def ranks(world_size: int, digests: dict[int, str], timeout_s: float = 20.0) -> Starting:
        control.put_all({keys.digest_key(rank): digest for rank, digest in digests.items()})
        return Starting(
            rank=0, world_size=world_size, incarnation=0, control=control, watch=ALONE, timeout_s=timeout_s
        )  # fmt: skip

    return ranks


def test_a_rank_of_many_asks_for_the_others_jobs_at_once(ranks, monkeypatch):
    count, calls = 1000, list[str]()
    first = ranks(count, dict.fromkeys(range(1, count), DIGEST))
    for name in ("get", "peek", "read", "has", "wait", "put"):
        method = getattr(Control, name)

        def counted(*args, method=method, name=name, **named):
            calls.append(name)
            return method(*args, **named)

        monkeypatch.setattr(Control, name, counted)
    first.post_job(JOB, PROFILE, SETTINGS)
    assert len(calls) < 15, calls


def test_whose_jobs_differ_is_said(ranks, connect):
    """And in what: otherwise replicas would train with two learning rates, and nothing would say so."""
    count, other = 600, posted(replace(JOB, train_steps=9), lr="0.003")
    first = ranks(count, dict.fromkeys(range(1, count), DIGEST) | {7: "other", 555: "other"})
    connect().put(keys.OTHER_JOB, other)  # by rank 7
    said = r"on rank\(s\) \[7, 555\] and on rank 0 lr is 0.003 and 0.01, train_steps is 9 and 3\. Use"
    with pytest.raises(ConfigError, match=said):
        first.post_job(JOB, PROFILE, SETTINGS)


def test_a_process_with_other_settings_does_not_join(ranks, connect):
    ranks(1, {}).post_job(JOB, PROFILE, SETTINGS)
    for settings, said in (
        (SETTINGS, None),
        (SETTINGS | {"lr": "0.003"}, "here and there lr is 0.003 and 0.01"),
    ):
        fresh = Starting(
            rank=0, world_size=1, incarnation=1, control=connect(), watch=ALONE, timeout_s=5.0
        )  # fmt: skip
        with pytest.raises(ConfigError, match=said) if said else contextlib.nullcontext():
            fresh.post_job(JOB, PROFILE, settings)


@pytest.mark.parametrize(
    ("there", "missing"),
    [([1, 2, 4, 5], r"\[3\]"), ([], r"\[1, 2, 3, 4, 5\]"), (None, r"\[1, 2, .* 16\] and 83 more")],
)
def test_ranks_that_do_not_come_are_named(ranks, there, missing):
    first = ranks(100 if there is None else 6, dict.fromkeys(there or [], DIGEST), timeout_s=0.3)
    with pytest.raises(
        ControlPlaneLost, match=rf"rank 0 waited 0.3 s, but rank\(s\) {missing} have not said"
    ):
        first.post_job(JOB, PROFILE, SETTINGS)


def test_a_barrier_is_waited_for_once(ranks, monkeypatch):
    """And not looked at all the time by each of a thousand ranks."""
    first, looks, has = ranks(2, {}, timeout_s=2.0), list[float](), Control.has

    def look(control: Control, names: list[str]) -> bool:
        looks.append(time.monotonic())
        return has(control, names)

    monkeypatch.setattr(Control, "has", look)
    with pytest.raises(ControlPlaneLost, match="not every rank has reached barrier 'ready'"):
        first.wait_all("ready")
    assert looks[-1] - looks[0] < 3.5
    assert len(looks) < 2.0 / starting._LONGEST_PAUSE_S + 15


def test_nodes_that_have_come_and_do_not_start_are_named(connect, tmp_path):
    config = OdysseyConfig(run_dir=str(tmp_path / "run"), store_timeout_s=0.3)
    (tmp_path / "run").mkdir()
    control, hosting = connect(), Hosting(config, None, "", here=0)
    for node in (0, 2):
        control.put(keys.node_key(node), "[0]")
        control.put(keys.lease_key(node), "")
    control.put(keys.node_key(3), "[0]")  # it ended right behind that
    verdict = hosting._await_nodes(control, 4)
    assert "the agent(s) of node(s) [1, 3] came, and have not started their ranks within 0.3 s" in verdict.why
