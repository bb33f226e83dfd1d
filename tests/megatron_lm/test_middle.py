"""``--fim-data``: what is cut out of a sample depends on which sample it is, not on who reads it, or read before."""

from __future__ import annotations

import pytest

from tests.launch.jobserver import CHECKOUT
from tests.megatron_lm.jobs import FLOAT64, assert_same_lines, indexed

SCRIPT = str(CHECKOUT / "tests" / "megatron_lm" / "middle.py")
TOKENS = "--fim-prefix-token 250 --fim-middle-token 251 --fim-suffix-token 252 --fim-pad-token 253 --fim-eod-token 254"
HOW = {"ranks": 6, "stages": 2}
INJECT = "rank=5,step=1,at=backward;rank=0,step=3,at=evaluate;rank=2,step=4,at=reduce"


@pytest.fixture(scope="module")
def data(jobs):
    """Flags for two indexed data sets of bytes."""
    from pydoc_data.topics import topics

    texts = [text.encode("ascii", "replace") for _, text in sorted(topics.items())]
    sets = [indexed(jobs.folder / "middle" / str(half), texts[half::2]) for half in range(2)]
    return [
        f"--data-path {one} --fim-data --fim-rate 0.5 --fim-spm-rate 0.5 {TOKENS}"
        for one in (sets[0], f"0.3 {sets[0]} 0.7 {sets[1]}")
    ]


def test_samples_are_those_of_plain_megatron_lm_that_draws_for_each(jobs, name, data):
    plain = jobs.plain_once(f"{name}-plain", data[0], before=[SCRIPT, "by-sample"], **HOW)
    assert plain.exit_code == 0, plain.log[-3000:]
    run = jobs.odyssey(name, data[0], inject=INJECT, before=[SCRIPT], **HOW)
    assert_same_lines(run, plain)
    assert run.killed == [0, 2, 5]
    as_it_is = jobs.plain(data[0].partition(" --fim-data")[0], **HOW)
    losses = [[round(one.loss, 3) for one in job.iterations] for job in (run, as_it_is)]
    assert losses[0] != losses[1], "nothing was cut"


def test_blended_sets_to_the_last_digits(jobs, name, data):
    flags = f"{data[1]} --odyssey-float64 on"
    undisturbed = jobs.odyssey(f"{name}-undisturbed", flags, before=[SCRIPT], **HOW)
    shot = jobs.odyssey(name, flags, inject=INJECT, before=[SCRIPT], **HOW)
    assert_same_lines(shot, undisturbed, rel=FLOAT64)
    assert shot.killed == [0, 2, 5]
