"""``tests/gpu.sh`` where there is no GPU: its dry run, and what it says of what it cannot run."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("megatron.core")

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.metrics.steps import CommittedStep
from tests import gpu, gpu_processes
from tests.plan.samples import preset_profile


def script(*argv, **more):
    environ = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", **more}
    return subprocess.run(
        ["bash", str(gpu.CHECKOUT / "tests" / "gpu.sh"), *argv],
        capture_output=True, text=True, env=environ, timeout=240, check=False,
    )  # fmt: skip


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_dry_run_measures_one_job_and_says_what_is_left(tmp_path):
    done = script("--dry-run", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| a kill, rerouted; over gloo on 1 GPU(s) | 2 | stall " in done.stdout
    assert "FAILED" not in done.stdout
    assert all(f"not run: {case.name}: {case.gpus} GPUs" in done.stdout for case in (*gpu.CASES, *gpu.BESIDE))
    beside = "| Megatron-LM, a kill; over gloo on 1 GPU(s) | 2 | losses within" in done.stdout
    assert beside == bool(os.environ.get("MEGATRON_LM_PATH"))

    listed = re.findall(r"^(tests/.*)::", (tmp_path / "tests.log").read_text(), re.M)
    assert {
        "tests/mcore/test_te_gpu.py",
        "tests/mcore/test_hybrid_gpu.py",
        "tests/mcore/test_parking.py",
    } <= {*listed}
    assert {*listed} == {*gpu.gpu_tests()}, "all that has the marker"

    case = gpu.CASES[0]
    shot, reference = tmp_path / case.folder, tmp_path / f"{case.folder}.undisturbed"
    assert gpu.figures(case, shot, reference)
    with pytest.raises(ConfigError, match="no event rank_joined"):
        gpu.figures(replace(case, shows=("rank_joined",)), shot, reference)
    with pytest.raises(ConfigError, match="no event injected, recovered"):
        gpu.figures(case, reference, reference)


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_a_number_of_another_job_is_seen(monkeypatch, name):
    """One that is NaN is another."""

    def run(value):
        numbers = {"loss": 5.0, "grad_norm": 1.0} | ({name: value} if value else {})
        step = CommittedStep(
            step=0, generation=1, losses={"lm loss": numbers["loss"]}, grad_norm=numbers["grad_norm"], step_s=1.0,
            interval_s=1.0, committed_wall_s=0.0,
        )  # fmt: skip
        return SimpleNamespace(steps=(step,))

    case = gpu.CASES[0]
    monkeypatch.setattr(gpu, "read_run", run)
    monkeypatch.setattr(gpu, "read_journal", lambda _: [{"event": one} for one in case.shows])
    monkeypatch.setattr(gpu, "summary", lambda *_: {"median_stall_s": 0.1, "median_step_s": 1.0, "steps": 1})
    known = SimpleNamespace(source="measured", costs=preset_profile("llama2-7b", "h100").costs)
    monkeypatch.setattr(gpu, "load_profile", lambda _: known)
    assert "gradient norms within 0 relative" in gpu.figures(case, None, None)
    for wrong in (1.03, math.nan):
        with pytest.raises(ConfigError, match="off those of"):
            gpu.figures(case, wrong, None)


def test_without_a_gpu_nothing_is_claimed(tmp_path):
    done = script("--out", str(tmp_path))
    assert done.returncode == 1
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(rows) == 2, "the head alone"
    assert done.stdout.count("here 0 (no CUDA device)") == len([*gpu.chosen(0)])
    assert "not run: tests marked gpu: no CUDA device" in done.stdout


@pytest.mark.matrix
@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", [one for one in gpu.CASES if one.gpus < 8], ids=lambda one: one.folder)
def test_a_case_shows_what_it_is_for(tmp_path, case, monkeypatch):
    """On CPUs and gloo: on GPUs only what connects its ranks is another. Steps take longer than there, so that a
    process that comes back needs fewer of them.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    machine = gpu.Machine(tmp_path, dry=True)
    machine.measure(replace(case, steps=min(case.steps, 60)))
    assert not machine.wrong
    assert len(machine.rows) == 1


@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 8])
def test_as_many_jobs_as_there_is_time_for(gpus):
    """29 or 30 of 20 s, as the script says; and what can run on NCCL does, before what shares GPUs."""
    cases = [*gpu.chosen(gpus)]
    assert (
        len({case.name for case in cases})
        == len(cases)
        == len({one.name for one in (*gpu.CASES, *gpu.BESIDE)})
    )
    own = [case for case in cases if isinstance(case, gpu.Case)]
    references = {(case.gpus, case.flags, case.steps) for case in own}
    beside = [3 if case.inject else 2 for case in cases if isinstance(case, gpu.Beside)]
    assert len(own) + len(references) + sum(beside) in (29, 30)
    share = [case.gpus > gpus for case in cases]
    assert share == sorted(share)
    on_nccl = {case.name for case in own if case.gpus <= gpus}
    assert len(on_nccl) == {1: 0, 2: 6, 3: 7, 4: 7, 8: 8}[gpus], on_nccl


STUBBORN = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()  # as torchrun's workers, and Odyssey's ranks
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(os.getpid(), flush=True)
elif sys.argv[1] == "dies":
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(300)
"""


@pytest.mark.parametrize("parent", ["waits", "dies"])
def test_a_command_leaves_no_process_behind(tmp_path, monkeypatch, parent):
    monkeypatch.setattr(gpu_processes, "GRACE_S", 0.5)
    monkeypatch.setattr(gpu, "OF_ONE_S", 3.0)
    code = gpu.Machine(tmp_path, dry=True).run([sys.executable, "-c", STUBBORN, parent], "log")
    assert code == {"waits": 124, "dies": -signal.SIGKILL}[parent]
    status = Path(f"/proc/{int((tmp_path / 'log').read_text())}/status")
    assert not status.exists() or "State:\tZ" in status.read_text(), "it may wait for who takes its exit code"


def test_what_is_missing_is_said_with_its_remedy(tmp_path, monkeypatch):
    assert not gpu.missing("megatron.core")
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    machine = gpu.Machine(tmp_path, dry=True)
    machine.measure(gpu.CASES[0])
    assert not machine.wrong
    (said,) = machine.left_out
    assert "no megatron.core: pip install" in said


def test_a_line_that_is_wrong_is_found(tmp_path):
    good = gpu.CASES[0]
    gpu.check(good, tmp_path)
    gpu.check(good, tmp_path, shares=True)
    with pytest.raises(ConfigError, match="unknown flag --odyssey-polcy"):
        gpu.check(replace(good, flags="--odyssey-polcy reroute"), tmp_path)
    with pytest.raises(ConfigError, match="is not one of 2"):
        gpu.check(replace(good, inject="rank=2,step=6,at=backward"), tmp_path)
    with pytest.raises(SystemExit):
        gpu.check(replace(good, flags="--pipeline-parallel 2"), tmp_path)


def printed(path, losses, ms=100.0, norm=1.0):
    """A line of each iteration; ``norm``: of the last one's gradient."""
    path.write_text(
        "".join(
            f" iteration {at:8}/      20 | elapsed time per iteration (ms): {ms} | lm loss: {loss:.6E} | "
            f"grad norm: {norm if at == 20 else 1.0:.3f} |\n"
            for at, loss in enumerate(losses, start=1)
        )
    )
    return path


def test_what_megatron_lm_prints_is_compared(tmp_path):
    case, losses = gpu.BESIDE[1], [6.0 - 0.1 * at for at in range(20)]
    logs = {"plain": printed(tmp_path / "plain", losses)}
    ours = logs | {"undisturbed": printed(tmp_path / "undisturbed", losses, ms=102.0)}
    assert gpu.gpu_megatron_lm.figures(case, ours).endswith("102 ms undisturbed, 1.02 of its")
    off = printed(tmp_path / "shot", [*losses[:-1], 1.01 * losses[-1]])
    with pytest.raises(ConfigError, match="off plain Megatron-LM's"):
        gpu.gpu_megatron_lm.figures(case, ours | {"shot": off})
    off = printed(tmp_path / "shot", losses, norm=1.03)
    with pytest.raises(ConfigError, match=r"gradient norms 0.03 off plain Megatron-LM's"):
        gpu.gpu_megatron_lm.figures(case, ours | {"shot": off})
    off = printed(tmp_path / "shot", losses, norm=math.nan)
    with pytest.raises(ConfigError, match="printed 19 of 20"):
        gpu.gpu_megatron_lm.figures(case, ours | {"shot": off})
    cut_off = printed(tmp_path / "shot", losses[:-1])
    with pytest.raises(ConfigError, match="printed 19 of 20"):
        gpu.gpu_megatron_lm.figures(case, ours | {"shot": cut_off})
