"""The curves go on when the last rank, which writes them, has died; Odyssey's own stand beside them."""

from __future__ import annotations

import pytest

from tests.megatron_lm.jobs import FLOAT32, MOCK


def curves(folder):
    """Tag -> {step: value}, of all files in ``folder``."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for path in sorted(folder.glob("events*")):
        events = EventAccumulator(str(path)).Reload()
        for tag in events.Tags()["scalars"]:
            found.setdefault(tag, {}).update({one.step: one.value for one in events.Scalars(tag)})
    return found


def test_no_point_is_missing_after_the_last_ranks_have_died(jobs, name):
    folder, plain_folder = jobs.folder / f"{name}-curves", jobs.folder / f"{name}-plain-curves"
    timers = "--log-timers-to-tensorboard --timing-log-level 2"
    run = jobs.odyssey(
        name, f"{MOCK} --tensorboard-dir {folder} --log-memory-to-tensorboard {timers}", ranks=6, stages=2,
        inject="rank=5,step=2,at=backward;rank=4,step=4,at=reduce",
    )  # fmt: skip
    assert run.exit_code == 0, run.log[-3000:]
    assert run.killed == [4, 5]
    assert run.log.count("[odyssey] --timing-log-level 2: forward-compute, ") == 1
    jobs.plain(f"{MOCK} --tensorboard-dir {plain_folder} {timers}", ranks=6, stages=2)
    ours, theirs = curves(folder), curves(plain_folder)
    assert len(list(folder.glob("events*"))) == 3, "one file of each rank that was the last"
    for tag in ("lm loss", "learning-rate", "batch-size", "lm loss vs samples", "lm loss validation"):
        assert ours[tag] == pytest.approx(theirs[tag], rel=FLOAT32), tag
    assert set(ours["lm loss"]) == set(ours["mem-allocated-bytes"]) == set(range(1, 7))
    assert min(ours["mem-allocated-bytes"].values()) > 1e8, "of a process that has imported torch"
    for one in ("forward-compute", "backward-compute", "batch-generator"):
        assert set(ours[f"{one}-time"]) == set(theirs[f"{one}-time"]) == set(range(1, 7)), one
        assert f"{one} ." in run.log
        assert min(ours[f"{one}-time"].values()) > 0.0
    assert ours["odyssey/generation"] == {1: 1, 2: 1, 3: 2, 4: 2, 5: 3, 6: 3}
    assert ours["odyssey/living_ranks"] == {1: 6, 2: 6, 3: 5, 4: 5, 5: 4, 6: 4}
    holders = {
        event["generation"]: event["layout"]["holders"]
        for event in run.events
        if event["event"] == "decision"
    }
    assert ours["odyssey/losses_survived"] == {
        step: min(map(len, holders[int(generation)])) - 1
        for step, generation in ours["odyssey/generation"].items()
    }
    assert min(ours["odyssey/planned_step_s"].values()) > 0.0
    stalls = ours["odyssey/recovery_stall_s"]
    assert set(stalls) == {3, 5}
    assert min(stalls.values()) > 0.0
    assert not [tag for tag in theirs if tag.startswith("odyssey")]
