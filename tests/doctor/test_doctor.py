"""``odyssey doctor``: rows for made-up machines and jobs, and for small trees in Megatron's place."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from odyssey_megatron.cli import main
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.doctor import command, communicators, environment, flags, megatron, packages
from odyssey_megatron.doctor.rows import CheckRow, Host, Job, Package
from odyssey_megatron.upstream import compat
from odyssey_megatron.upstream.seam_table import SEAMS
from odyssey_megatron.upstream.source import Source

HOST = Host(
    environ={
        "NCCL_NVLS_ENABLE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    },
    python=(3, 12),
    typing_names=frozenset(("Any", "override")),
    packages={"torch": Package(version="2.13.0+cu130", compiled=True)},
    can_import=lambda name: True,
    extension_suffix=".cpython-312.so",
    built_suffix=".cpython-312.so",
    interfaces=("lo", "eth0"),
    has_gpu=True,
)  # fmt: skip
JOB = Job(config=OdysseyConfig(), flags=())
CPU_JOB = Job(config=OdysseyConfig(device="cpu"), flags=())


def with_(**changes):
    """The healthy host with variables changed; None takes one out."""
    environ = {**HOST.environ, **{name: value for name, value in changes.items() if value is not None}}
    return replace(
        HOST, environ={name: environ[name] for name in environ if changes.get(name, "") is not None}
    )


def having(**versions):
    """The healthy host with more packages."""
    more = {
        name.replace("_", "-"): Package(version=version, compiled=False) for name, version in versions.items()
    }
    return replace(HOST, packages={**HOST.packages, **more})


def not_ok(rows):
    return {row.name: row.state for row in rows if row.state != "ok"}


def checked(rows):
    """Every row that is not ok says what to do."""
    rows = list(rows)
    assert all(row.remedy for row in rows if row.state != "ok")
    return not_ok(rows)


def test_how_many_communicators_there_will_be():
    """Of a middle stage: two neighbours, both ways, and one sum; with tensor parallelism one more. At the start there
    is one besides, in which a link is timed.
    """

    def said(*words, host=HOST, **settings):
        job = Job(config=OdysseyConfig(**settings), flags=words)
        return [f"{row.name}: {row.found}" for row in communicators.rows(host, job)]

    stages = ("--pipeline-model-parallel-size", "4")
    (found,) = said(*stages)
    assert found.startswith("pipelines of 4: 5 communicators a rank at most")
    assert "at the start 6 communicators of a rank to connect" in found
    (found,) = said(*stages, "--tensor-model-parallel-size", "2")
    assert ": 6 communicators" in found
    (found,) = said(*stages, host=with_(WORLD_SIZE="1024"))
    assert found.startswith("256 pipelines of 4: 5 communicators")
    assert "in 2.5 s" in found, "512 sum the tied weight"
    slurm = {"SLURM_JOB_NUM_NODES": "8", "SLURM_GPUS_ON_NODE": "8"}
    for tasks in ("8", "64"):  # odyssey run on each node, or a task for each GPU
        (found,) = said(*stages, host=with_(SLURM_NTASKS=tasks, **slurm))
        assert found.startswith("16 pipelines of 4:"), tasks
    (alone,) = said(*stages, "--untie-embeddings-and-output-weights", host=with_(WORLD_SIZE="4"))
    (shadowed,) = said(
        *stages, "--untie-embeddings-and-output-weights", host=with_(WORLD_SIZE="4"), redundancy="state"
    )
    assert (": 4 communicators" in alone, ": 6 communicators" in shadowed) == (True, True)
    assert said(*stages, device="cpu") == said("--pipeline-model-parallel-size", "many") == []


MONITORED = {"TORCH_NCCL_ENABLE_MONITORING": "1"}


def test_nothing_is_wrong_with_a_healthy_machine():
    assert checked(environment.rows(HOST, JOB, patched=False)) == {}
    assert checked(packages.rows(HOST, JOB, {"six": "megatron.training", "torch": "megatron"})) == {}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "problem"}),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "problem"}),
        ({"NCCL_ASYNC_ERROR_HANDLING": "1"}, {"NCCL_ASYNC_ERROR_HANDLING": "problem"}),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "NCCL_ASYNC_ERROR_HANDLING": "1"}, {}),
        (
            MONITORED | {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "60"},
            {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "problem"},
        ),
        (
            MONITORED | {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "ten"},
            {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "problem"},
        ),
        (MONITORED, {}),
        ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "60"}, {}),
        ({"NCCL_NVLS_ENABLE": None}, {}),
        ({"NCCL_NVLS_ENABLE": "1"}, {"NCCL_NVLS_ENABLE": "warning"}),
        ({"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}, {"NCCL_LAUNCH_ORDER_IMPLICIT": "warning"}),
        ({"NCCL_IB_TIMEOUT": "22"}, {"NCCL_IB_TIMEOUT": "warning"}),  # 4.096 us * 2^22 * 7 = 120 s
        ({"NCCL_IB_TIMEOUT": "22", "NCCL_IB_RETRY_CNT": "3"}, {}),
        ({"NCCL_IB_TIMEOUT": "32"}, {"NCCL_IB_TIMEOUT": "problem"}),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": None}, {"CUDA_DEVICE_MAX_CONNECTIONS": "warning"}),
        ({"GLOO_SOCKET_IFNAME": "ib0"}, {"GLOO_SOCKET_IFNAME": "problem"}),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, {}),
        ({"TORCHELASTIC_RUN_ID": "x"}, {"launcher": "problem"}),
        ({"SLURM_JOB_ID": "1", "SLURM_KILL_BAD_EXIT": "0"}, {}),
        ({"SLURM_JOB_ID": "1", "SLURM_KILL_BAD_EXIT": "1"}, {"srun --kill-on-bad-exit": "problem"}),
        (
            {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2"},
            {"srun --kill-on-bad-exit": "warning", "GLOO_SOCKET_IFNAME": "warning"},
        ),
        (
            {"SLURM_JOB_NUM_NODES": "2", "GLOO_SOCKET_IFNAME": "lo"},
            {"GLOO_SOCKET_IFNAME": "problem"},
        ),
    ],
)
def test_variables(variables, expected):
    assert checked(environment.rows(with_(**variables), JOB, patched=False)) == expected


def test_torchrun_will_do_for_a_patched_checkout():
    assert checked(environment.rows(with_(TORCHELASTIC_RUN_ID="x"), JOB, patched=True)) == {}


def test_limits_of_the_job_count():
    patient = Job(config=OdysseyConfig(op_timeout_s=500.0), flags=())
    assert checked(environment.rows(with_(**MONITORED), patient, patched=False)) == {
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "problem"
    }


@pytest.mark.parametrize("flags", [("--tensor-model-parallel-size", "2"), ("--context-parallel-size=2",)])
def test_megatron_refuses_parallelism_without_its_variable(flags):
    host = with_(CUDA_DEVICE_MAX_CONNECTIONS="8")
    assert checked(environment.rows(host, replace(JOB, flags=flags), patched=False)) == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "problem"
    }


@pytest.mark.parametrize(
    ("models", "state"),
    [
        (["NVIDIA B200"] * 2, None),
        (["NVIDIA GB300"], None),
        (["NVIDIA RTX PRO 6000 Blackwell Server Edition"], None),
        (["NVIDIA H100 80GB HBM3"], "problem"),
        (["NVIDIA B200", "NVIDIA GH200 480GB"], "problem"),
    ],
)
def test_since_blackwell_it_does_without(models, state, tmp_path):
    for number, model in enumerate(models):
        (tmp_path / f"0000:{number:02}:00.0").mkdir()
        told = f"Model: \t\t {model}\nIRQ:   \t\t 18\n"
        (tmp_path / f"0000:{number:02}:00.0" / "information").write_text(told)
    host = replace(with_(CUDA_DEVICE_MAX_CONNECTIONS=None), gpus=tuple(command._gpus(tmp_path)))
    assert host.gpus == tuple(models)
    job = replace(JOB, flags=("--tensor-model-parallel-size", "2"))
    assert checked(environment.rows(host, job, patched=False)).get("CUDA_DEVICE_MAX_CONNECTIONS") == state


def test_a_job_on_the_cpu_needs_neither_gpu_nor_nccl():
    host = replace(with_(TORCH_NCCL_ASYNC_ERROR_HANDLING="1", NCCL_NVLS_ENABLE="1"), has_gpu=False)
    assert checked(environment.rows(host, CPU_JOB, patched=False)) == {}
    assert set(checked(environment.rows(host, JOB, patched=False)).values()) == {"problem", "warning"}


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (replace(HOST, packages={}), {"torch": "problem"}),
        (having(torch="2.9.1"), {"torch": "problem"}),
        (having(torch="2.11.0+cu130"), {}),
        (having(torch="2.14.1"), {}),
        (having(torch="2.15.0a0+1234567.nv26.10"), {"torch": "warning"}),
        (replace(HOST, python=(3, 10)), {"Python": "problem"}),
        (replace(HOST, python=(3, 11)), {}),
        (replace(HOST, python=(3, 13)), {"Python": "warning"}),
        (having(transformer_engine="2.9.0"), {"transformer-engine": "problem"}),
        (having(transformer_engine="2.9.0", transformer_engine_cu12="2.9.0"), {}),
        (having(transformer_engine="2.9.0+70f53666"), {}),
        (having(transformer_engine="2.5.0+f05f12c"), {"transformer-engine": "warning"}),
        (having(apex="0.9.10.dev0"), {"apex": "warning"}),
        (having(apex="0.1"), {}),
    ],
)
def test_packages(host, expected):
    assert checked(packages.rows(host, JOB, {})) == expected


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        ("", []),
        (
            "--num-layers 4 --untie-embeddings-and-output-weights --optimizer sgd --context-parallel-size 1",
            [],
        ),
        ("--num-layers 4", []),
        ("--inprocess-restart --enable-ft-package", ["--inprocess-restart", "--enable-ft-package"]),
        ("--context-parallel-size=2 --qk-clip", ["--qk-clip"]),
        (
            "--tensor-model-parallel-size 2 --num-experts 4 --expert-tensor-parallel-size 1",
            ["--expert-tensor-parallel-size"],
        ),
        ("--bf16 --fp8-format hybrid", ["--fp8-recipe"]),
        ("--ckpt-format torch", []),
        ("--no-pad-vocab-size", ["--no-pad-vocab-size"]),
        ("--no-pad-vocab-size --padded-vocab-size 512", []),
        ("--no-pad-vocab-size --load there --use-checkpoint-args", []),
        ("--save here --ckpt-format torch --optimizer soap", ["--optimizer"]),
        ("--micro-batch-size 2 --eval-micro-batch-size 2", []),
        ("--micro-batch-size 2 --eval-micro-batch-size 4", []),
        (
            "--micro-batch-size 2 --eval-micro-batch-size 4 --num-experts 4 --moe-expert-capacity-factor 1.0",
            ["--eval-micro-batch-size"],
        ),
    ],
)
def test_flags_that_a_job_would_be_refused_for(line, refused):
    job = replace(JOB, flags=tuple(line.split()))
    assert checked(flags.rows(job, None)) == dict.fromkeys(refused, "problem")
    observing = replace(job, config=OdysseyConfig(mode="observe"))
    assert checked(flags.rows(observing, None)) == dict.fromkeys(refused, "warning")


def test_missing_packages_are_named_as_pip_knows_them():
    host = replace(HOST, can_import=lambda name: name not in ("yaml", "triton"))
    needed = {"yaml": "megatron.training.yaml_arguments", "triton": "megatron.core.x", "six": "megatron.y"}
    rows = list(packages.rows(host, JOB, needed))
    assert checked(rows) == {"yaml": "problem", "triton": "problem"}
    assert "pip install PyYAML" in [row.remedy for row in rows]
    assert checked(packages.rows(host, CPU_JOB, needed)) == {"yaml": "problem"}


@pytest.fixture
def tree(tmp_path):
    """Megatron as the table of seams describes 0.16.1, function by function."""
    texts = {"megatron.core.package_info": "MAJOR, MINOR = 0, 16\nMAJOR = 0\nMINOR = 16\nPATCH = 1\n"}
    for seam in SEAMS:
        module, _, path = seam.target.partition(":")
        *classes, name = path.split(".")
        if (parameters := seam.expected("0.16.1")) is None:
            continue
        text = f"def {name}({', '.join(parameters)}): ...\n"
        texts[module] = texts.get(module, "") + "".join(f"class {one}:\n    " for one in classes) + text
    texts["megatron.training.__init__"] = "import six\n"
    for module, text in texts.items():
        path = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "megatron/core/datasets/helpers_cpp.cpython-312.so").touch()
    (tmp_path / "pyproject.toml").write_text('[project]\nrequires-python = ">=3.12"\n')
    return tmp_path


def test_every_seam_is_listed(tree):
    rows = list(megatron.rows(Source((tree,)), tree, HOST))
    assert {row.name for row in rows} >= {seam.target for seam in SEAMS}
    assert checked(row for row in rows if row.name != "odyssey patch") == {}


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("from typing import Any\n", "warning"),
        ("try:\n    from typing import override\nexcept ImportError:\n    pass\n", "warning"),
        ("from typing import Any, override\n", "problem"),
        ("from typing import (\n    Any as A,  # (what else\n    override,\n)\n", "problem"),
    ],
)
def test_an_old_python_is_a_problem_if_a_name_is_missing_from_it(tree, text, state):
    """Jobs run with an older one than the checkout asks for, as long as its sources can be imported."""
    (tree / "megatron/training/models.py").write_text(text)
    host = replace(HOST, python=(3, 11), typing_names=frozenset({"Any"}))
    rows = {row.name: row for row in megatron.rows(Source((tree,)), tree, host)}
    assert rows["Python"].state == state
    named = "megatron/training/models.py imports override from typing" in rows["Python"].found
    assert named == (state == "problem")
    assert rows["Python"].remedy


def test_files_that_cannot_be_read_are_no_obstacle(tree):
    """Emacs marks a file that is being edited by a link to nowhere."""
    (tree / "megatron/training/.#models.py").symlink_to("somebody@somewhere.1")
    host = replace(HOST, python=(3, 11))
    (tree / "megatron/core/__init__.py").unlink(missing_ok=True)
    (tree / "megatron/core/__init__.py").symlink_to("/proc/self/mem")  # no read of its beginning succeeds
    rows = {row.name: row for row in megatron.rows(Source((tree,)), tree, host)}
    assert rows["Python"].state == "warning"
    assert "cannot be read" in rows["odyssey patch"].found


def test_changed_and_missing_seams(tree):
    schedules = tree / "megatron/core/pipeline_parallel/schedules.py"
    text = (
        schedules.read_text()
        .replace("out, deallocate", "output, deallocate")
        .replace("def backward_step", "def b")
    )
    schedules.write_text(text)
    rows = list(megatron.rows(Source((tree,)), tree, HOST))
    found = {row.name.rpartition(":")[2]: row.found for row in rows if row.state == "problem"}
    assert set(found) == {"backward_step", "deallocate_output_tensor"}
    assert found["backward_step"].startswith("missing: expected (input_tensor, ")
    assert found["deallocate_output_tensor"].startswith(
        "changed: expected (out, deallocate_pipeline_outputs), found (output, deallocate_pipeline_outputs)"
    )


def test_a_version_without_a_job_is_said(tree, monkeypatch):
    monkeypatch.setattr(compat, "TESTED", ("0.16.1",))
    info = tree / "megatron/core/package_info.py"
    for minor, said in ((17, "seams were read (core_v0.17.1)"), (99, "nobody")):
        info.write_text(f"MAJOR = 0\nMINOR = {minor}\nPATCH = 1\n")
        row = next(megatron.rows(Source((tree,)), tree, HOST))
        assert row.state == "warning"
        assert said in row.found


def test_a_version_that_cannot_be_read_is_said(tree, monkeypatch, capsys):
    """A job may run all the same."""
    monkeypatch.setattr(command, "_host", lambda checkout: HOST)
    (tree / "megatron/core/package_info.py").write_text("MAJOR = 0\nMINOR = 16\nPATCH = int('1')\n")
    assert main(["doctor", str(tree)]) == 0
    told = capsys.readouterr().out
    assert "warning  megatron-core: no version can be read from " in told
    assert "neither there" not in told


@pytest.mark.parametrize(
    ("minor", "number", "said"),
    [(16, 0, "0.16.1 (core_v0.16.1)"), (18, 0, "0.18.2 (core_v0.18.2)"), (20, 0, "0.19.1 (core_v0.19.0)")],
)
def test_the_nearest_tested_version_is_recommended(tree, minor, number, said):
    info = f"MAJOR = 0\nMINOR = {minor}\nPATCH = {number}\nPRE_RELEASE = 'rc1'\n"
    (tree / "megatron/core/package_info.py").write_text(info)
    row = next(megatron.rows(Source((tree,)), tree, HOST))
    assert row.remedy == f"Use {said}, or try a short job first."


@pytest.mark.parametrize("minor", [17, 99])
def test_lines_of_a_patch_are_named_whatever_the_version_has_become(tree, minor):
    """There is a patch for 0.17.1, which cannot be installed over lines that were edited, and none for 0.99."""
    (tree / "megatron/core/package_info.py").write_text(f"MAJOR = 0\nMINOR = {minor}\nPATCH = 1\n")
    name = "megatron/core/__init__.py"
    (tree / name).write_text("# >>> odyssey-megatron 1: 'odyssey patch uninstall'\n# <<< odyssey-megatron\n")
    rows = {row.name: row for row in megatron.rows(Source((tree,)), tree, HOST)}
    found = rows["odyssey patch"]
    assert found.state == "warning"
    assert f"its lines are in {name}: " in found.found
    assert found.remedy == f"odyssey patch uninstall {tree}"


@pytest.mark.parametrize(
    ("files", "host", "state"),
    [
        ({"helpers_cpp.cpython-312.so"}, replace(HOST, built_suffix=""), None),
        ({"Makefile"}, HOST, "ok"),
        ({"Makefile"}, replace(HOST, built_suffix=".cpython-310.so"), "problem"),
        ({"Makefile", "helpers_cpp.cpython-310.so"}, replace(HOST, built_suffix=""), "problem"),
        ({"Makefile"}, replace(HOST, can_import=lambda name: name != "pybind11"), "problem"),
        ({"helpers_cpp.cpython-310.so"}, HOST, "problem"),
    ],
)
def test_dataset_helpers_are_for_this_python_or_can_be_compiled(tree, files, host, state):
    folder = tree / "megatron/core/datasets"
    (folder / "helpers_cpp.cpython-312.so").unlink()
    for name in files:
        (folder / name).touch()
    rows = [row for row in megatron.rows(Source((tree,)), tree, host) if row.name == "dataset helpers"]
    assert [row.state for row in rows] == ([state] if state else [])
    assert all(row.remedy for row in rows if row.state != "ok")


def test_the_wheel_alone_has_no_training(tree):
    for path in (tree / "megatron/training").iterdir():
        path.unlink()
    rows = {row.name: row.state for row in megatron.rows(Source((tree,)), None, HOST)}
    assert rows["megatron.training"] == "warning"
    assert not [name for name in rows if name.startswith("megatron.training.")]
    assert "problem" not in rows.values()


def test_the_command(tree, capsys, monkeypatch):
    monkeypatch.setattr(command, "_host", lambda checkout: HOST)
    assert main(["doctor", str(tree)]) == 0
    assert "0 problem(s), 1 warning(s): a job can run." in capsys.readouterr().out  # it cannot be patched
    assert main(["doctor", "--json", str(tree), "--inprocess-restart"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert not printed["can_run"]
    assert [row["name"] for row in printed["rows"] if row["state"] == "problem"] == ["--inprocess-restart"]


def test_the_checkout_may_stand_behind_the_flags(tree, capsys, monkeypatch):
    """As it does for whoever adds it to the line that has just been tried without."""
    monkeypatch.setattr(command, "_host", lambda checkout: HOST)
    outputs = []
    for argv in ([str(tree), "--odyssey-device", "cpu"], ["--odyssey-device", "cpu", str(tree)]):
        assert main(["doctor", "--json", *argv]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["/nowhere"], "no Megatron-LM checkout"),
        (["--odyssey-polisy", "auto"], "unknown flag --odyssey-polisy"),
    ],
)
def test_bad_input_is_refused(argv, said, capsys):
    assert main(["doctor", *argv]) == 2
    assert said in capsys.readouterr().err


def test_a_checkout_on_this_machine_is_looked_at_without_importing_it(any_megatron_lm):
    script = (
        "import sys; from odyssey_megatron.cli import main; code = main(sys.argv[1:]);"
        "assert not {'torch', 'megatron'} & set(sys.modules); sys.exit(code)"
    )
    argv = [sys.executable, "-c", script, "doctor", "--json", str(any_megatron_lm), "--odyssey-device", "cpu"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    printed = json.loads(done.stdout)
    assert done.returncode == (not printed["can_run"])
    rows = {row["name"]: row for row in printed["rows"]}
    assert {rows[seam.target]["state"] for seam in SEAMS} == {"ok"}
    assert "torch" in rows


def test_problems_stand_before_what_is_fine():
    rows = [
        CheckRow(area="Megatron", name="a seam", state="ok", found="there"),
        CheckRow(area="packages", name="six", state="problem", found="missing", remedy="pip install six"),
    ]
    assert command.render(rows).splitlines() == [
        "packages:",
        "  problem  six: missing",
        "           -> pip install six",
        "fine: 1 of 2 things that were looked at (--verbose names them)",
    ]
    assert "a seam" in command.render(rows, everything=True)


@pytest.mark.parametrize(
    ("given", "state"),
    [
        ((), "ok"),
        (("--num-layers", "4"), "problem"),  # Megatron's default is Transformer Engine
        (("--num-layers", "4", "--transformer-impl", "local"), "ok"),
        (("--transformer-impl", "transformer_engine"), "problem"),
    ],
)
def test_a_job_whose_layers_nobody_can_build(given, state):
    rows = packages.rows(HOST, replace(JOB, flags=given), {})
    assert {row.name: row.state for row in rows}["transformer-engine"] == state


def test_a_word_longer_than_any_file_name_is_no_checkout(capsys):
    assert main(["doctor", "--data-path", "x" * 300]) in (0, 1)
    assert "problem(s)" in capsys.readouterr().out
