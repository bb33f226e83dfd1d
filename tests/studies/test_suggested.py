import json

import pytest

from odyssey_megatron.studies.whatif import main_plan

LOST = "--model llama2-7b --kill 0:0 --mtbf-s 600 --json --cluster 1x4 --pipeline-model-parallel-size 2"
STANDBY = "--odyssey-redundancy state"


def answer(capsys, flags):
    assert main_plan(flags.split()) == 0
    return json.loads(capsys.readouterr().out)


def score(found):
    return next(row["score"] for row in found["candidates"] if row["chosen"])


@pytest.mark.parametrize(
    ("more", "is_better"),
    [
        ("--num-microbatches 1 --gpu-memory-gib 120", True),
        ("--num-microbatches 2 --gpu-memory-gib 200 --mtbf-s 86400", False),
    ],
)
def test_a_second_holder_after_a_loss_is_priced_after_that_loss(capsys, more, is_better):
    """A healthy step takes as long with the flag as without, and steps after the loss much longer."""
    without, with_it = answer(capsys, f"{LOST} {more}"), answer(capsys, f"{LOST} {more} {STANDBY}")
    found = [(flag, why) for flag, why in without["flags"] if "after this loss" in why]
    assert (score(with_it) > score(without)) == is_better
    assert [flag for flag, _ in found] == [STANDBY if is_better else ""]
    steps_ms = [f"{one['after']['step_s'] * 1e3:.1f} ms" for one in (with_it, without)]
    assert f"steps of {steps_ms[0]} in place of {steps_ms[1]}" in found[0][1]


def test_a_flag_that_gives_no_second_holder_after_a_loss_is_not_suggested(capsys):
    found = answer(capsys, f"{LOST} --num-microbatches 1 --gpu-memory-gib 90")["flags"]
    assert found[-1][0] == ""
    assert found[-1][1].endswith("--odyssey-redundancy state finds no room for one")
