"""What a job would say of a launch line that is one of several cases in a file, or one of Megatron-LM's tests."""

from __future__ import annotations

import json
import sys

import pytest

from odyssey_megatron.cli import main
from odyssey_megatron.doctor.launch_line import read_job
from odyssey_megatron.errors import ConfigError
from tests.benchmarks.launch_lines import counted


def case(name, **args):
    """``a=1`` is ``--a 1``."""
    flags = {"--" + flag.replace("_", "-"): value for flag, value in args.items()}
    return {"family": "gpt", "name": name, "args": {"--untie-embeddings-and-output-weights": True, **flags}}


CASES = [
    case("plain", num_layers=8, use_mcore_models=True),
    case("ignored", num_layers=8, overlap_grad_reduce=True, bf16=True),
    case("refused", num_layers=8, use_megatron_fsdp=True),
    case("twice", num_layers=8, use_megatron_fsdp=True, use_torch_fsdp2=True),
    case("strange", num_layers=8, of_nobody=3),
    case("several", num_layers="8", rampup_batch_size="[384 384 9765]", iterations_to_skip="2 3"),
    case("half", num_layers=8, fp16=True),
    case("half-wide", num_layers=8, fp16=True, accumulate_allreduce_grads_in_fp32=True),
]


def test_a_case_starts_with_a_line_or_is_refused(tmp_path, capsys):
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({"source": "here", "cases": CASES}))
    told = {}
    for one in CASES:
        code = main(["doctor", "--job", f"{path}:{one['name']}"])
        told[one["name"]] = code, capsys.readouterr().out
    assert [code for code, _ in told.values()] == [0, 0, 1, 1, 0, 0, 0, 0]
    assert told["plain"][1].endswith("starts with --odyssey as far as its flags say\n")
    assert "--overlap-grad-reduce changes nothing: " in told["ignored"][1]
    assert "--use-megatron-fsdp does not work with --odyssey yet" in told["refused"][1]
    assert "not Megatron-LM's, so of the script's own: --of-nobody" in told["strange"][1]
    assert "With --accumulate-allreduce-grads-in-fp32 the same steps are skipped" in told["half"][1]
    assert told["half-wide"][1].endswith("starts with --odyssey as far as its flags say\n")
    assert main(["doctor", "--job", f"{path}:ignored", "--odyssey-strict", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["starts"] is False
    assert list(said["refused"]) == ["--overlap-grad-reduce"]


YAML = """
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
MODEL_ARGS:
  --num-layers: 12   # of a small model
  --lr: 4.5e-4
  --bf16: true
  --recompute-granularity: selective
  --spec: "[megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec]"
  --recompute-modules: "[layernorm mlp]"
  --moe-layer-freq: "([0]*1+[1]*3)"
  --data-path: ${DATA_PATH}/some
"""


def test_a_case_of_megatron_lm_is_read(tmp_path, capsys):
    """By the version of the checkout that it is in, with all that takes a job."""
    info = tmp_path / "megatron" / "core" / "package_info.py"
    path = tmp_path / "tests" / "functional_tests" / "test_cases" / "gpt" / "some" / "model_config.yaml"
    info.parent.mkdir(parents=True)
    path.parent.mkdir(parents=True)
    info.write_text("MAJOR = 0\nMINOR = 17\nPATCH = 1\n")
    path.write_text(YAML)
    flags = "--num-layers 12 --lr 0.00045 --bf16 --recompute-granularity selective --spec"
    spec = "megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"
    assert read_job(str(path)).flags == [
        *flags.split(), *spec.split(), "--recompute-modules", "layernorm", "mlp",
        "--moe-layer-freq", "([0]*1+[1]*3)", "--data-path", "${DATA_PATH}/some",
    ]  # fmt: skip
    assert main(["doctor", "--job", str(path)]) == 1
    told = capsys.readouterr().out
    assert "model_config.yaml, by megatron-core 0.17.1: refused" in told
    assert "--recompute-modules ['layernorm', 'mlp'] is refused" in told


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("MODEL_ARGS: [", "it is no YAML file (while parsing"),
        ("--num-layers: 3", "a block MODEL_ARGS"),
        ("MODEL_ARGS:", "a block MODEL_ARGS"),
        ("MODEL_ARGS:\n  trainer.num_nodes: 1", "found trainer.num_nodes"),
    ],
)
def test_a_yaml_file_that_is_no_case_is_one_paragraph(tmp_path, text, said, capsys):
    path = tmp_path / "model_config.yaml"
    path.write_text(text)
    assert main(["doctor", "--job", str(path)]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


def test_without_pyyaml_it_is_asked_for(tmp_path, monkeypatch):
    path = tmp_path / "model_config.yaml"
    path.write_text(YAML)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match="pip install pyyaml"):
        read_job(str(path))


def test_the_benchmark_counts_what_the_doctor_says():
    found = counted(CASES, "0.16.1")
    assert (found["cases"], found["start"], found["with no flag ignored"]) == (8, 5, 4)
    assert found["ignored in those that start"] == {"--overlap-grad-reduce": 1}
    by_whom = found["refused by (cases, of these by it alone)"]
    assert by_whom == {"--use-megatron-fsdp": (2, 1), "--use-torch-fsdp2": (1, 0), "--of-nobody": (1, 1)}
