import json

import pytest

from odyssey_megatron.studies.whatif import main_plan

FLAGS = "--model llama2-7b --pipeline-model-parallel-size 2 --width 0 --gpu-memory-gib 120"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return tmp_path_factory.mktemp("pages") / "plan.html"


def answer(capsys, *more):
    assert main_plan([*FLAGS.split(), *more]) == 0
    return capsys.readouterr().out


def test_what_has_no_second_holder_after_the_next_loss_is_said(capsys, page):
    """One pipeline of all who are left is faster than what it follows, and the loss after that ends the job."""
    text = answer(capsys, "--cluster", "1x4", "--num-microbatches", "2", "--html", str(page))
    _, row = text.partition("without a second holder then")[2].strip().splitlines()[:2]
    assert row.startswith("any of 4 workers")
    assert row.endswith("all layers")
    assert "more than 100%: what follows a loss is planned anew, and may give up second holders" in text
    assert "of layouts that survive the loss of any one worker, no layout that was found is faster" in text
    drawn = page.read_text()
    assert "that of any of 4 workers leaves layers without a second holder" in drawn
    assert "More than 100%: what follows a loss" in drawn
    assert '<div class="good"><b>survived' not in drawn


def test_nothing_is_said_where_second_holders_stay(capsys, page):
    more = ["--cluster", "1x8", "--num-microbatches", "4", "--html", str(page), "--json"]
    assert not any(one["alone"] for one in json.loads(answer(capsys, *more))["next_losses"])
    drawn = page.read_text()
    assert '<div class="good"><b>survived</b><span>the next loss</span>' in drawn
    assert "More than 100%: what follows a loss is planned anew." in drawn, "and gives up nothing"


def test_all_layers_are_said_to_be_all_with_a_tied_weight(capsys):
    small = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --vocab-size 32000 --seq-length 2048 --bf16"
    flags = "--cluster 1x4 --global-batch-size 4 --pipeline-model-parallel-size 2 --width 0"
    assert main_plan([*small.split(), *flags.split()]) == 0
    assert "  all layers\n" in capsys.readouterr().out
