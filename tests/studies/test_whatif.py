import json
import re
import subprocess
import sys

import pytest

from odyssey_megatron.codec import from_json
from odyssey_megatron.errors import EXIT_LAYERS_LOST, ConfigError
from odyssey_megatron.inputs import output_file
from odyssey_megatron.plan.checking.verify import verify
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.studies import whatif
from odyssey_megatron.studies.presets import MODELS
from odyssey_megatron.studies.whatif import main_plan
from tests.plan.samples import preset_profile


def test_shows_candidates_and_grids(capsys):
    assert main_plan(["--cluster", "4x8", "--model", "llama2-7b", "--kill", "2:3", "--width", "80"]) == 0
    text = capsys.readouterr().out
    assert "32 workers, 64 microbatches a step" in text
    assert "\n* " in text
    assert len(re.findall(r"^ ?\d+ [.FIW].{79}$", text, re.MULTILINE)) == 32 + 31
    assert "no layout over the living workers can have a step below" in text
    assert "throughput after / before:" in text


def test_orders_that_are_worse_in_both_are_not_offered_as_memory_for_speed(capsys):
    """Of this layout an order that was looked for longer is faster than the first one, and needs less."""
    flags = "--cluster 4x8 --model llama2-13b --pipeline-model-parallel-size 8 --kill 0:5 --json".split()
    assert main_plan(flags) == 0
    shares, steps_s, sizes = zip(*json.loads(capsys.readouterr().out)["leaner"], strict=True)
    assert len(shares) > 2
    assert shares[0] == 0
    assert [*steps_s] == sorted(steps_s)
    assert [*sizes] == sorted(sizes, reverse=True)


def test_json_is_whole(capsys):
    assert main_plan(["--kill", "0:1", "--kill", "3:7", "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    after = from_json(Plan, json.dumps(got["after"]))
    verify(after.layout, after.schedule)
    assert got["cluster_bound_s"] <= after.bound_s <= after.step_s * (1 + 1e-6)
    assert [row["chosen"] for row in got["candidates"]].count(True) == 1
    assert not set(after.layout.workers) & {1, 31}


def test_tensor_parallel_cells_die_together(capsys):
    flags = [
        "--model",
        "llama2-70b",
        "--tensor-model-parallel-size",
        "8",
        "--cluster",
        "16x8",
        "--width",
        "0",
    ]
    assert main_plan([*flags, "--kill", "5:3"]) == 0
    assert "16 workers" in capsys.readouterr().out


def test_context_parallel_ranks_die_together(capsys):
    flags = ["--tensor-model-parallel-size", "2", "--context-parallel-size", "2", "--width", "0"]
    assert main_plan([*flags, "--kill", "1:3"]) == 0
    assert "8 workers" in capsys.readouterr().out


def test_ranks_that_share_out_experts_die_together(capsys, tmp_path):
    preset_profile("llama2-7b", "h100").save(tmp_path / "profile.json")
    flags = ["--expert-model-parallel-size", "4", "--profile", str(tmp_path / "profile.json"), "--width", "0"]
    assert main_plan([*flags, "--pipeline-model-parallel-size", "2", "--kill", "1:3"]) == 0
    assert "8 workers" in capsys.readouterr().out


def test_what_is_left_of_cells_goes_on(capsys, tmp_path):
    """Of a gang of eight that loses a GPU, seven; its experts come from the other gang of its stage."""
    flags = ["--model", "qwen3-30b-a3b", "--expert-model-parallel-size", "8"]
    flags += ["--pipeline-model-parallel-size", "2", "--num-microbatches", "16", "--kill", "0:3"]
    assert main_plan([*flags, "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["smaller"]["sizes"] == {"0": 7}
    after, with_it = (from_json(Plan, json.dumps(one)) for one in (got["after"], got["smaller"]["plan"]))
    verify(with_it.layout, with_it.schedule)
    assert 0 in set(with_it.layout.workers) - set(after.layout.workers)
    # The next loss hits the job with the smaller cell, and not the one that trains until it is there.
    assert sorted(worker for one in got["next_losses"] for worker in one["workers"]) == [0, 1, 2, 3]
    assert main_plan([*flags, "--width", "0"]) == 0
    text, gain = capsys.readouterr().out, after.step_s / with_it.step_s - 1
    assert f"goes on (worker 0 with 7 of 8 GPUs), {gain:+.1%} throughput" in text
    assert (
        "without a second holder after this loss: all layers; --odyssey-redundancy state would cost more"
        in text
    )
    assert re.search(rf"^then: replan, step {with_it.step_s * 1e3:.1f} ms", text, re.MULTILINE)
    page = tmp_path / "plan.html"
    assert main_plan([*flags, "--width", "0", "--html", str(page)]) == 0
    text = page.read_text()
    before, _, then = text.partition("Layout with what is left of cells")
    healthy = from_json(Plan, json.dumps(got["before"]))
    assert (
        f"<b>{healthy.step_s / with_it.step_s:.1%}</b><span>of the throughput stays, with what is left"
        in text
    )
    # A microbatch of the plan is one for each rank of a gang.
    rows = re.findall(
        r"<th>(\d+) microbatches</th>", before.partition("Layout before")[2].partition("Layout after")[0]
    )
    assert sum(map(int, rows)) == int(re.search(r"(\d+) microbatches a step, 8 at a time", text)[1])
    assert "<br>7 GPUs</td>" in then
    assert "<br>7 GPUs</td>" not in before


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "what is left of broken cells goes on (worker 5 with 4 of 8 GPUs)"),
        (["--odyssey-shrink", "off"], "what is left of broken cells stands by: --odyssey-shrink off"),
    ],
)
def test_what_is_left_of_tensor_parallel_cells(capsys, flags, said):
    job = "--model llama2-70b --tensor-model-parallel-size 8 --cluster 16x8 --width 0 --kill 5:3"
    assert main_plan([*job.split(), *flags]) == 0
    assert said in capsys.readouterr().out


def test_with_shrinking_off_nothing_rests_on_smaller_cells(capsys):
    """The page and the JSON drew a plan with one, and a flag was recommended for what it would gain."""
    job = "--model qwen3-30b-a3b --expert-model-parallel-size 8 --pipeline-model-parallel-size 2 --kill 0:3"
    assert main_plan([*job.split(), "--odyssey-shrink", "off", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["smaller"]
    assert found == {"sizes": {}, "stands_by": "--odyssey-shrink off", "plan": None}


def test_a_profile_is_of_the_very_model(capsys, tmp_path):
    """It alone does not say how long sequences are."""
    profile = str(tmp_path / "profile.json")
    preset_profile("llama2-7b", "h100").save(profile)
    flags = ["--width", "0", "--profile", profile]
    assert main_plan(flags) == 0
    assert "each counts as one token" in capsys.readouterr().out
    assert main_plan([*flags, "--model", "llama2-7b"]) == 0
    named = capsys.readouterr().out
    assert "each counts as one token" not in named
    assert main_plan(["--width", "0"]) == 0
    rate = re.compile(r"[\d,]+ tokens/s")
    assert rate.search(named)[0] == rate.search(capsys.readouterr().out)[0]
    with pytest.raises(ConfigError, match="has 32 transformer layers, and llama2-13b has 40"):
        main_plan([*flags, "--model", "llama2-13b"])


def test_a_slow_gpu_is_planned_around(capsys):
    assert main_plan(["--cluster", "1x8", "--slow", "0:3=0.4", "--width", "60"]) == 0
    text = capsys.readouterr().out
    assert "slow: 0:3=0.4" in text
    assert "keep" in text
    assert "* replan" in text or "* rebalance" in text


LAUNCH = """
GPUS=8
MODEL="--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
 --num-query-groups 8 --seq-length 8192 --swiglu --untie-embeddings-and-output-weights"
torchrun --nproc-per-node $GPUS pretrain_gpt.py $MODEL --bf16 --micro-batch-size 1 --global-batch-size 64 \\
  --tokenizer-model meta-llama/Meta-Llama-3-8B --use-distributed-optimizer --sequence-parallel \\
  --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --odyssey --odyssey-redundancy state
"""


def test_a_launch_script_is_planned_for(capsys, tmp_path):
    """With its own sizes, batch and settings: as the preset of the same model with those given by hand."""
    script = tmp_path / "train.sh"
    script.write_text(LAUNCH)
    asked = ["--cluster", "2x8", "--job", str(script), "--kill", "1:3", "--width", "0"]
    # The script says nothing of dropout, which is 0.1 then, and a named model has none.
    none = "--attention-dropout 0 --hidden-dropout 0".split()
    assert main_plan([*asked, "--vocab-size", "128256", *none]) == 0
    text = capsys.readouterr().out
    by_hand = (
        "--cluster 2x8 --model llama3-8b --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 "
        "--num-microbatches 32 --use-distributed-optimizer --odyssey --odyssey-redundancy state --kill 1:3 --width 0"
    )
    assert main_plan(by_hand.split()) == 0
    told = capsys.readouterr().out
    assert "8 workers of 2 GPUs, 64 microbatches a step" in text
    of_both = [re.sub(r"decided in .*", "", one).splitlines()[1:] for one in (text, told)]
    assert of_both[0] == of_both[1]
    # Without a script all of it can be given.
    flags = re.search(r"MODEL=\"(.*?)\"(.*pretrain_gpt.py)", LAUNCH, re.DOTALL).group(1).split()
    assert (
        main_plan([*by_hand.split()[:2], *by_hand.split()[4:], *flags, "--vocab-size", "128256", "--bf16"])
        == 0
    )
    assert "this launch line on h100" in capsys.readouterr().out
    # Without --cluster the GPUs are those of the script, where it says them.
    assert main_plan(["--job", str(script), "--vocab-size", "128256", "--width", "0"]) == 0
    assert "cluster 1x8" in capsys.readouterr().out
    # Its tokenizer has as many words as is presumed, and its script does not say so.
    assert main_plan([*asked, *none]) == 0
    presumed = capsys.readouterr().out
    assert "128,256 are presumed: --vocab-size says it" in presumed
    presumed = [
        one for one in re.sub(r"decided in .*", "", presumed).splitlines()[1:] if "presumed" not in one
    ]
    assert presumed == of_both[0]
    # What is given behind the script counts, and what a job would refuse is said.
    assert main_plan([*asked, "--vocab-size", "128256", "--num-layers", "16", "--use-torch-fsdp2"]) == 0
    assert "a job would refuse --use-torch-fsdp2" in capsys.readouterr().out


def test_the_next_loss_is_said(capsys):
    """One replica: what is survived with a standby replica ends the job without."""
    flags = "--cluster 1x4 --model llama3-8b --accelerator b200 --width 0".split()
    assert main_plan(flags) == 0
    text = capsys.readouterr().out
    assert re.search(r"any of 4 workers +all layers +the job ends", text)
    assert "--odyssey-redundancy state   without a second holder: all layers" in text
    assert main_plan([*flags, "--odyssey-redundancy", "state"]) == 0
    text = capsys.readouterr().out
    assert "the job ends" not in text
    assert "--odyssey-redundancy" not in text


def test_of_two_flags_that_do_the_same_the_dear_one_is_said_not_to_be_needed(capsys):
    sizes = "--tensor-model-parallel-size 16 --pipeline-model-parallel-size 2"
    flags = f"--cluster 4x8 --model llama2-7b {sizes} --width 0".split()
    assert main_plan(flags) == 0
    single = "--odyssey-redundancy state   without a second holder: all layers"
    assert f"{single}; not needed with --odyssey-layout auto" in capsys.readouterr().out
    assert main_plan([*flags, "--odyssey-layout", "auto"]) == 0
    assert "--odyssey-redundancy" not in capsys.readouterr().out


OWN = (
    "--num-layers 10 --hidden-size 1024 --num-attention-heads 16 --vocab-size 32000 --seq-length 2048 --bf16 --swiglu "
    "--untie-embeddings-and-output-weights --global-batch-size 16 --micro-batch-size 1"
)
"""Megatron-LM's flags of a model."""


@pytest.mark.parametrize(
    "stages",
    [
        "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1",
        "--pipeline-model-parallel-layout Ett|ttt|ttt|ttL",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1 "
        "--decoder-first-pipeline-num-layers 1",
    ],
)
def test_what_depends_on_the_number_of_stages_is_read_alike_from_a_script_and_a_command(
    capsys, tmp_path, stages
):
    flags, script = f"{OWN} {stages} --pipeline-model-parallel-size 4", tmp_path / "train.sh"
    script.write_text(f"torchrun --nproc-per-node 8 pretrain_gpt.py {flags}".replace("|", "\\|"))
    assert main_plan(["--job", str(script), "--width", "0"]) == 0
    of_script = capsys.readouterr().out.splitlines()[1:]
    assert main_plan(["--cluster", "1x8", "--width", "0", *flags.split()]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == of_script
    if "layout" in stages:
        with pytest.raises(ConfigError, match="10 layers in 4 chunks, and there are 10 layers and 8 stages"):
            main_plan(["--job", str(script), "--pipeline-model-parallel-size", "8"])


def test_the_best_layout_is_the_one_that_auto_starts_with(capsys):
    """Where memory is short, it may be one without kept messages."""
    flags = (
        "--cluster 1x8 --model llama2-7b --pipeline-model-parallel-size 4 --num-microbatches 16 --gpu-memory-gib 39 "
        "--width 0"
    )
    assert main_plan([*flags.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main_plan([*flags.split(), "--json", "--odyssey-layout", "auto"]) == 0
    auto = json.loads(capsys.readouterr().out)
    assert found["best"]["step_s"] == auto["before"]["step_s"] < found["before"]["step_s"]
    assert [flag for flag, _ in found["flags"]] == ["--odyssey", "--odyssey-layout auto"]
    assert auto["flags"] == [["--odyssey", "to survive at all"]]
    assert main_plan([*flags.split(), "--odyssey"]) == 0
    text = capsys.readouterr().out
    assert re.search(
        r"for want of memory a step of this layout is \d+% longer at least; .*distributed-opt", text
    )
    assert "to survive at all" not in text


def test_a_flag_is_tried_before_it_is_suggested(capsys):
    flags = "--cluster 1x2 --model llama2-7b --pipeline-model-parallel-size 2 --width 0 --gpu-memory-gib"
    assert main_plan([*flags.split(), "110"]) == 0
    text = capsys.readouterr().out
    assert not re.search(r"^  --odyssey-redundancy", text, re.MULTILINE)
    assert "--odyssey-redundancy state would not fit: worker 0 needs " in text
    both = "--odyssey-layout auto --odyssey-redundancy state"
    answers = []
    for more in ("", both):
        assert main_plan([*flags.split(), "250", "--json", *more.split()]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    without, with_them = answers
    longer = with_them["before"]["step_s"] / without["best"]["step_s"] - 1
    assert [
        "--odyssey-redundancy state",
        f"without a second holder: all layers; a healthy step takes {longer:.1%} longer",
    ] in (without["flags"])
    with pytest.raises(
        ConfigError, match="Of state, --use-distributed-optimizer or no --odyssey-redundancy state"
    ):
        main_plan([*flags.split(), "110", "--odyssey-redundancy", "state"])


@pytest.mark.parametrize("slices", ["", " --use-distributed-optimizer"])
def test_nodes_that_hold_all_of_a_layer_are_named(capsys, slices):
    assert main_plan(f"--cluster 4x8 --pipeline-model-parallel-size 4 --width 0{slices}".split()) == 0
    text = capsys.readouterr().out
    assert "4 of them cannot be lost" in text
    assert re.search(r"--odyssey-layout auto .*; the loss of any one node is survived, too", text)
    assert (
        main_plan("--cluster 4x8 --pipeline-model-parallel-size 4 --width 0 --odyssey-layout spread".split())
        == 0
    )
    text = capsys.readouterr().out
    assert "no layer has all its holders on one" in text
    assert "of any one node is survived" not in text
    assert main_plan("--cluster 8x2 --pipeline-model-parallel-size 4 --width 0".split()) == 0
    assert "no layer has all its holders on one" in capsys.readouterr().out


def test_a_page_that_cannot_be_written_is_refused_before_anything_is_planned(tmp_path, monkeypatch):
    flags = ["--cluster", "1x8", "--model", "llama3-8b", "--html"]
    kept = tmp_path / "kept.html"
    kept.write_text("kept")
    planned = []
    monkeypatch.setattr(whatif, "answered", lambda *_: planned.append(1) or pytest.skip("planned"))
    with pytest.raises(ConfigError, match="missing/plan.html cannot be written: No such file"):
        main_plan([*flags, str(tmp_path / "missing" / "plan.html")])
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        main_plan([*flags, str(tmp_path)])
    assert output_file(str(kept)).read_text() == "kept"
    assert not output_file(str(tmp_path / "new.html")).exists()
    assert not planned


def test_lost_layers_are_said(capsys, tmp_path):
    """In the format that was asked for."""
    flags = ["--cluster", "1x4", "--pipeline-model-parallel-size", "4", "--model", "llama2-7b"]
    assert main_plan([*flags, "--kill", "0:1"]) == EXIT_LAYERS_LOST
    assert "the job ends, exit code 93: no holder is left of " in capsys.readouterr().out
    page = tmp_path / "plan.html"
    assert main_plan([*flags, "--kill", "0:1", "--json", "--html", str(page)]) == EXIT_LAYERS_LOST
    got = json.loads(capsys.readouterr().out)
    assert got["ends"].startswith("no holder is left of ")
    assert got["after"] is None
    assert "The job ends, exit code 93: no holder is left of" in page.read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cluster", "four"], "write NODESxGPUS"),
        (["--model", "llama9"], "use one of llama2-7b"),
        (["--cluster", "1x6"], "not divisible"),
        (["--context-parallel-size", "16"], "not divisible by .* 4 times --context-parallel-size 16"),
        (["--expert-model-parallel-size", "2"], "llama2-7b has no experts. Name a model that has"),
        (["--num-layers", "2"], "the launch line has no --hidden-size. Give it to this command"),
        (
            ["--num-layers", "2", "--nonsense", "3"],
            "--nonsense: neither of this command's flags nor of Megatron-LM's",
        ),
        (
            ["--num-layers", "2", "--model", "llama2-7b"],
            "llama2-7b is instead of a launch line, and --num-la",
        ),
        (["nonsense"], "nonsense is no flag"),
        (["--odyssey-redundancy", "much"], "redundancy"),
        (["--job", "missing.sh"], "missing.sh"),
        (["--job", "missing.sh", "--model", "llama2-7b"], "--job is of one: leave one of them out"),
        (["--model", "llama2-7b", "--tp", "8"], "--tp: neither of this command's flags nor of"),
        (["--kill", "9:0"], "no such GPU"),
        (["--kill", "0:8"], "no such GPU"),
        (["--slow", "0:8=0.5"], "no such GPU"),
        (["--slow", "0:1=2"], "a number from 0.001 to 1 is expected, found 2"),
        (["--model", "llama3-70b", "--cluster", "1x4"], "does not fit"),
        (["--odyssey-memory-headroom-percent", "90"], "needs .* GiB .* and 8.0 GiB may be used"),
        (["--profile", "missing.json"], "missing.json"),
        (
            ["--gpu-memory-gib", "0"],
            "--gpu-memory-gib: a number from 0.001 to 1,000,000 is expected, found 0",
        ),
        (["--gpu-memory-gib", "80GB"], "a number from 0.001 to 1,000,000 is expected, found '80GB'"),
        (["--cluster", "1x4", "--gpu-memory-gib", "20"], "needs .* GiB .* and 18.0 GiB may be used"),
    ],
)
def test_bad_input_is_explained(flags, message):
    with pytest.raises(ConfigError, match=message):
        main_plan(flags)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ("--cluster 8x8 --model mixtral-8x7b --tensor-model-parallel-size 2 --expert-model-parallel-size 8",
         "4 workers of 16 GPUs, 64 microbatches a step, 8 at a time in a worker"),
        ("--cluster 8x8 --model llama3-70b --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 "
         "--num-microbatches 4", "8 workers of 8 GPUs, 8 microbatches a step"),
    ],
)  # fmt: skip
def test_pipelines_are_of_cells_and_not_of_ranks(capsys, sizes, said):
    """They have microbatches enough, though there are fewer of these than ranks in a stage."""
    assert main_plan([*sizes.split(), "--use-distributed-optimizer", "--width", "0"]) == 0
    assert said in capsys.readouterr().out


def test_a_distributed_optimizer_makes_room(capsys):
    flags = "--cluster 2x8 --model llama3-8b --pipeline-model-parallel-size 2 --width 0 --kill 1:3".split()
    with pytest.raises(ConfigError, match="does not fit"):
        main_plan(flags)
    assert main_plan([*flags, "--use-distributed-optimizer"]) == 0
    assert "\n* " in capsys.readouterr().out


def test_the_memory_of_a_gpu_may_be_given(capsys, tmp_path):
    """It stands for the accelerator's and a run's alike, and the job's headroom of it stays free."""
    flags = "--cluster 1x8 --model llama2-7b --pipeline-model-parallel-size 8 --width 0 --json".split()

    def fullest(*more):
        assert main_plan([*flags, *more]) == 0
        found = json.loads(capsys.readouterr().out)
        return max(size for _, size in found["before"]["peak_bytes"]), found["notes"]

    usual, _ = fullest()
    assert fullest("--gpu-memory-gib", "80")[0] == usual, "as much as an H100 has"
    less, notes = fullest("--gpu-memory-gib", "26", "--odyssey-memory-headroom-percent", "20")
    assert less <= 26 * 0.8 * 2**30 < usual
    assert "plans may use 20.8 of the 26 GiB of a GPU (--odyssey-memory-headroom-percent)" in notes
    preset_profile("llama2-7b", "h100").save(tmp_path / "profile.json")
    profile = "--profile", str(tmp_path)
    assert fullest(*profile)[0] == usual
    assert fullest(*profile, "--gpu-memory-gib", "26", "--odyssey-memory-headroom-percent", "20")[0] == less


PUBLISHED = {"mixtral-8x7b": 46.7, "qwen3-30b-a3b": 30.5, "deepseek-v3": 671}
"""Billions, where the name does not say it, or says that of one expert."""


@pytest.mark.parametrize("model", MODELS)
def test_presets_have_the_published_number_of_parameters(model):
    costs = preset_profile(model, "h100").costs
    parameters = sum(layer.weight_bytes for layer in costs.layers) / 2
    billions = PUBLISHED.get(model) or float(model.split("-")[1].removesuffix("b"))
    assert parameters / 1e9 == pytest.approx(billions, rel=0.005 if model in PUBLISHED else 0.05)


def test_runs_without_torch():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['megatron'] = None\n"
        "from odyssey_megatron.studies.whatif import main_plan\n"
        "raise SystemExit(main_plan(['--kill', '2:3', '--width', '0']))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL).returncode == 0
    )
