"""What runs of some sizes have measured predicts runs of others."""

import argparse
import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.policy.costs.profile import Observation, calibrate, load_profile
from odyssey_megatron.policy.costs.sizes import AttentionShape, Precision
from odyssey_megatron.studies.fitting import fitted, line_through
from odyssey_megatron.studies.presets import (
    ACCELERATORS,
    EFFICIENCY,
    MODELS,
    Accelerator,
    Model,
)
from odyssey_megatron.studies.scenario import add_scenario_arguments, scenario_from
from odyssey_megatron.studies.whatif import main_plan
from tests.plan.samples import preset_profile

KINDS = ("forward_s", "input_grad_s", "weight_grad_s")
FIXED_S, LINK_S, LINK_BYTES_PER_S = 3e-4, 7e-5, 1.3e10
RATES = {"forward_s": 2.1e14, "input_grad_s": 1.7e14, "weight_grad_s": 1.4e14}
"""Of a GPU that no preset has: about half of an H100's, each kind of work at its own, and kernels to launch."""


def truth(profile):
    """What it really costs on that GPU."""
    layers = [
        replace(
            layer,
            **{
                kind: (FIXED_S + flops / RATES[kind]) if flops else 0.0
                for kind, flops in zip(KINDS, each, strict=True)
            },
        )
        for layer, each in zip(profile.costs.layers, profile.operations, strict=True)
    ]
    costs = replace(
        profile.costs, layers=tuple(layers), link_latency_s=LINK_S, link_bytes_per_s=LINK_BYTES_PER_S
    )
    return replace(profile, costs=costs)


def measured(profile, stages=4):
    """The profile that a run on that GPU writes: of its stages, as ranks time them."""
    real, count = truth(profile), len(profile.costs.layers)
    ends = [0, *(1 + (count - 2) * (stage + 1) // stages for stage in range(stages - 1)), count]
    spans = [
        Observation(
            first=first, last=last, samples=50,
            **{kind: sum(getattr(one, kind) for one in real.costs.layers[first:last]) for kind in KINDS},
        )
        for first, last in pairwise(ends)
    ]  # fmt: skip
    found = calibrate(profile, spans)
    links = {"link_latency_s": LINK_S, "link_bytes_per_s": LINK_BYTES_PER_S, "memory_bytes": 60 * 2**30}
    return replace(found, costs=replace(found.costs, **links), group_build_s=1.5)


def run_folder(tmp_path, name, profile):
    profile.save(tmp_path / name / "profile.json")
    return str(tmp_path / name)


def errors(predicted, real):
    """Relative, of the transformer layers, each kind of work."""
    pairs = zip(predicted.costs.layers[1:-1], real.costs.layers[1:-1], strict=True)
    return [abs(getattr(one, kind) / getattr(other, kind) - 1) for one, other in pairs for kind in KINDS]


def test_a_run_of_one_model_predicts_another_one_better_than_presets_do(tmp_path):
    run = run_folder(tmp_path, "run", measured(preset_profile("llama2-7b", "h100")))
    estimate = preset_profile("llama2-13b", "h100")
    real, found = truth(estimate), fitted([run]).profile(estimate)
    assert (
        fitted([run]).profile(preset_profile("llama2-13b", "a100")).costs.layers[0] == found.costs.layers[0]
    )
    assert max(errors(found, real)) < 0.03 < 0.5 < min(errors(estimate, real))
    assert found.costs.message_s() == pytest.approx(real.costs.message_s())
    assert (found.costs.memory_bytes, found.group_build_s, found.source) == (60 * 2**30, 1.5, "fitted")
    bytes_of = [replace(one, forward_s=0, input_grad_s=0, weight_grad_s=0) for one in found.costs.layers]
    assert bytes_of == [
        replace(one, forward_s=0, input_grad_s=0, weight_grad_s=0) for one in estimate.costs.layers
    ], "what the model has, the runs do not change"


def test_where_no_run_knows_its_memory_that_of_the_accelerator_counts(tmp_path):
    """A job on CPUs has no limit, and says nothing of a GPU's."""
    on_cpus, on_gpus = (measured(preset_profile("llama2-7b", "h100")) for _ in range(2))
    on_cpus = replace(on_cpus, costs=replace(on_cpus.costs, memory_bytes=None))
    runs = [run_folder(tmp_path, name, one) for name, one in (("cpus", on_cpus), ("gpus", on_gpus))]
    plain = preset_profile("llama2-13b", "h100")
    for estimate in (plain, replace(plain, costs=plain.costs.with_room(2**30))):
        assert fitted(runs[:1]).profile(estimate).costs.memory_bytes == estimate.costs.memory_bytes
    assert fitted(runs).profile(plain).costs.memory_bytes == 60 * 2**30
    for these, said in ((runs[:1], True), (runs, False)):
        fits = [word for run in these for word in ("--fit", str(run))]
        parser = argparse.ArgumentParser()
        add_scenario_arguments(parser)
        given = ["--cluster", "2x8", "--model", "llama2-13b", "--accelerator", "h200", *fits]
        notes = scenario_from(parser.parse_args(given)).notes
        assert ("no run knows its GPUs' memory: that of --accelerator h200 counts" in notes) == said


def test_layers_of_two_sizes_show_what_one_takes_whatever_its_size(tmp_path):
    small = Model(
        num_layers=16, hidden_size=1024, ffn_hidden_size=2816, attention=AttentionShape.grouped(1024, 16, 16, 64),
        vocab_size=32000, seq_length=1024,
    )  # fmt: skip
    of_small = measured(small.profile(ACCELERATORS["h100"]))
    one, other = (
        run_folder(tmp_path, "small", of_small),
        run_folder(tmp_path, "7b", measured(preset_profile("llama2-7b", "h100"))),
    )
    for name in ("llama2-13b", "llama2-70b"):
        estimate = preset_profile(name, "h100")
        real = truth(estimate)
        by_one, by_both = (
            max(errors(fitted(runs).profile(estimate), real)) for runs in ([one], [one, other])
        )
        assert by_both < 0.01 < 0.5 < by_one, "the small one's layers are mostly launched"
    found = fitted([one, other])
    assert [line.fixed_s for line in found.layer] == pytest.approx([FIXED_S] * 3, rel=0.05)
    assert [line.flops_per_s for line in found.layer] == pytest.approx(list(RATES.values()), rel=0.01)
    assert found.error() < 0.01


def test_a_line():
    assert line_through([(2e12, 0.01)]).time_s(4e12) == pytest.approx(0.02), "one point: in proportion"
    line = line_through([(1e12, 0.003), (4e12, 0.009)])
    assert (line.fixed_s, line.flops_per_s) == (pytest.approx(0.001, rel=0.02), pytest.approx(5e14, rel=0.01))
    noise = line_through([(1.00e12, 0.0031), (1.01e12, 0.0030)])
    assert noise.fixed_s < 1e-3, "two of about one size say nothing of it"
    assert line_through([(40400453542.77067, 0.0013301701225112484)] * 2).fixed_s == 0.0, "rounding"
    falling = line_through([(1e12, 0.009), (4e12, 0.003)])
    assert falling.fixed_s >= 0 < falling.flops_per_s
    assert line_through([]).time_s(1e12) == line_through([(0.0, 1.0), (1.0, 0.0)]).time_s(1e12) == 0.0
    assert line_through([(1e12, 0.003)]).time_s(0.0) == 0.0
    assert math.isfinite(line_through([(1e-300, 1e-9), (1e30, 1e6)]).time_s(1.0))


HERE = Path(__file__).parent / "measured"
"""Profiles that ``examples/llama/pretrain_llama.py`` has written on a CPU, each in 30 steps: ``--nproc-per-node 4
--pipeline-model-parallel-size 4 --num-layers 8 --odyssey-profile-steps 2``, h64 and h256 as ``llama(64, 192, 4)`` and
``llama(256, 768, 8)`` here, the others as below."""


def llama(hidden, ffn, heads, seq_length=64):
    return Model(
        num_layers=8, hidden_size=hidden, ffn_hidden_size=ffn,
        attention=AttentionShape.grouped(hidden, heads, heads, hidden // heads), vocab_size=384, seq_length=seq_length,
        precision=Precision(dtype_bytes=4),
    )  # fmt: skip


CPU = Accelerator(
    peak_flops_per_s=1e10 / EFFICIENCY, memory_bytes=2**34, memory_bytes_per_s=5e9,
    link_bytes_per_s=1e9, node_bytes_per_s=1e9,
)  # fmt: skip
"""What a job guesses that one core does, before it has measured."""
HELD_OUT = {
    # Between the runs that are fitted; of twice the FLOPs of the largest of them.
    "h128": (llama(128, 384, 4), 1, 0.05),
    "h192": (llama(192, 512, 4, seq_length=128), 2, 0.15),
}


@pytest.mark.parametrize("name", HELD_OUT)
def test_real_runs_predict_real_runs(name):
    model, micro_batch_size, within = HELD_OUT[name]
    real = load_profile(HERE / f"{name}.json")
    estimate = model.profile(CPU, micro_batch_size=micro_batch_size)
    assert [sum(one) for one in estimate.operations] == pytest.approx([sum(one) for one in real.operations])
    found = fitted([str(HERE / "h64.json"), str(HERE / "h256.json")])
    assert not found.far(estimate)
    planned_s, guess_s, real_s = (
        sum(layer.compute_s for layer in one.costs.layers)
        for one in (found.profile(estimate), estimate, real)
    )
    assert abs(planned_s / real_s - 1) < within < 0.4 < abs(guess_s / real_s - 1)
    planned_s, real_s = found.profile(estimate).costs.message_s(), real.costs.message_s()
    assert planned_s == pytest.approx(real_s, rel=0.35), "loopback"


def test_plans_say_that_they_are_fitted(capsys, tmp_path):
    run = run_folder(tmp_path, "run", measured(preset_profile("llama2-7b", "h100")))
    flags = ["--cluster", "2x8", "--model", "llama2-13b", "--use-distributed-optimizer", "--width", "0"]
    assert main_plan([*flags, "--fit", run]) == 0
    text = capsys.readouterr().out
    assert f"llama2-13b, as {run}" in text
    assert "note: costs are estimates, fitted to 1 run(s) with 200 measured microbatches" in text
    assert "times more FLOPs" not in text
    # What products take is measured, whatever the launch line says of them.
    script = tmp_path / "train.sh"
    sizes = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096"
    sizes += " --pipeline-model-parallel-size 8"
    script.write_text(f"torchrun --nproc-per-node 8 pretrain_gpt.py {sizes} --padded-vocab-size 32000")
    for given in ([], ["--fit", run], ["--profile", run]):
        assert main_plan(["--job", str(script), *given, "--cluster", "1x8", "--width", "0"]) == 0
        assert ("products take what they take in bf16" in capsys.readouterr().out) == (not given)
    step_s = float(re.search(r"before: initial, step ([\d.]+) ms", text)[1])
    assert main_plan(flags) == 0
    assert step_s > 1.5 * float(re.search(r"before: initial, step ([\d.]+) ms", capsys.readouterr().out)[1])
    # Far from what was measured is said; as JSON, too.
    tiny = ["--model", "llama2-7b", "--cluster", "1x8", "--fit"]
    small = replace(MODELS["llama2-7b"], hidden_size=512, ffn_hidden_size=1408, num_layers=8)
    small = replace(small, attention=AttentionShape.grouped(512, 8, 8, 64), seq_length=256)
    other = run_folder(tmp_path, "small", measured(small.profile(ACCELERATORS["h100"])))
    assert main_plan([*tiny, other, "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert any("times more FLOPs than any that was measured" in one for one in notes)
    # A run's folder is its profile.
    assert main_plan(["--cluster", "1x8", "--profile", run, "--width", "0"]) == 0
    assert "costs are measured, of 200 microbatches" in capsys.readouterr().out


def test_what_cannot_be_fitted_is_explained(tmp_path):
    profile = measured(preset_profile("llama2-7b", "h100"))
    cases = {
        "estimated": (preset_profile("llama2-7b", "h100"), "nothing in it was measured"),
        "old": (replace(profile, operations=()), "the FLOPs of its layers are not in it"),
        "short": (
            replace(profile, operations=profile.operations[1:]),
            "counts the FLOPs of 33 layers, and has 34",
        ),
        "idle": (
            replace(
                profile,
                costs=replace(
                    profile.costs,
                    layers=tuple(
                        replace(one, **dict.fromkeys(KINDS, 0.0)) for one in profile.costs.layers[:-1]
                    )
                    + profile.costs.layers[-1:],
                ),
            ),
            "transformer layers take no time",
        ),
    }
    for name, (one, message) in cases.items():
        with pytest.raises(ConfigError, match=message):
            fitted([run_folder(tmp_path, name, one)])
    run = run_folder(tmp_path, "run", profile)
    for flags, message in (
        (["--fit", run, "--profile", run], "leave one of them out"),
        (["--fit", run], f"for which model.*--profile {run}"),
        (["--fit", str(tmp_path / "nowhere"), "--model", "llama2-7b"], "nowhere"),
        (["--fit", str(tmp_path), "--model", "llama2-7b"], "profile.json"),
    ):
        with pytest.raises(ConfigError, match=message):
            main_plan(flags)
