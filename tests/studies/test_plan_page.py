"""The page of ``odyssey plan``."""

import re

from odyssey_megatron.metrics import plots
from odyssey_megatron.metrics.page import candidates_table
from odyssey_megatron.studies.whatif import main_plan


def test_the_page_has_everything(capsys, tmp_path):
    page = tmp_path / "plan.html"
    flags = f"--cluster 1x8 --model llama3-8b --accelerator b200 --width 0 --kill 0:3 --html {page}"
    assert main_plan(flags.split()) == 0
    text = page.read_text()
    said = ("No layout over the living workers", "Throughput after / before")
    for found in (
        "Layout before",
        "Layout after",
        "What was weighed",
        "The next loss",
        "<picture>",
        "E 1–8",
        *said,
    ):
        assert found in text
    assert "://" not in text, "nothing is loaded from elsewhere"
    assert "What was weighed for the start" not in text, "there was no choice"


def test_the_page_has_what_the_next_loss_costs():
    row = {"name": "replan", "score": 5e6, "next_loss": 1234.4}
    assert '<td class="n">5,000,000</td><td class="n">-1,234</td>' in candidates_table([row])


def test_a_small_model_takes_more_than_no_memory(capsys, tmp_path):
    script, page = tmp_path / "train.sh", tmp_path / "plan.html"
    sizes = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --bf16"
    script.write_text(f"torchrun --nproc-per-node 4 pretrain_gpt.py {sizes} --padded-vocab-size 512")
    assert main_plan(["--job", str(script), "--cluster", "1x4", "--width", "0", "--html", str(page)]) == 0
    for text in (capsys.readouterr().out, page.read_text()):
        assert re.search(r"[1-9][\d.]* MiB", text)
        assert "0.0 GiB" not in text


def test_the_page_has_what_was_weighed_for_the_start(capsys, tmp_path):
    page = tmp_path / "plan.html"
    flags = "--cluster 1x8 --model llama3-8b --accelerator b200 --odyssey-layout auto --width 0 --html"
    assert main_plan([*flags.split(), str(page), "--pipeline-model-parallel-size", "4"]) == 0
    text = page.read_text()
    for row in re.findall("<tr><th>8 microbatches.*?</tr>", text):
        assert row.count("worker ") == row.count(" GiB") == 4, "a box a worker, though routes turn"
        assert "E 1–4, 17–20" in row
    assert "What was weighed for the start" in text
    assert "launch line" in text.partition("What was weighed for the start")[2]


def test_only_the_dead_are_drawn_as_lost(capsys, tmp_path, monkeypatch):
    """A GPU that is so slow that it idles lives."""
    drawn = []
    picture = plots.schedule_picture
    monkeypatch.setattr(plots, "schedule_picture", lambda *asked: drawn.append(asked[-1]) or picture(*asked))
    flags = "--cluster 1x8 --model llama3-8b --accelerator b200 --width 0 --kill 0:3 --slow 0:5=0.01 --html"
    assert main_plan([*flags.split(), str(tmp_path / "plan.html")]) == 0
    ((_, before, nobody), (_, after, dead)) = drawn[0]
    assert set(before.ranks) - set(after.ranks) == {3, 5}
    assert (nobody, dead) == (frozenset(), {3})
