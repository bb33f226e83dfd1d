"""What ``tests/gpu.sh`` runs: jobs of the example's model on real GPUs, each beside the same without a failure."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from odyssey_megatron.config import config_from_argv
from odyssey_megatron.doctor.launch_line import judged
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.metrics.journal import read_journal
from odyssey_megatron.metrics.run import read_run, summary
from tests import gpu_megatron_lm
from tests.gpu_megatron_lm import BESIDE, Beside, commands

CHECKOUT = Path(__file__).resolve().parents[1]
SCRIPT = CHECKOUT / "examples" / "llama" / "pretrain_llama.py"
LIMIT_S, OF_ONE_S = 600.0, 150.0
"""Of all together, and of one command."""
MODEL = (
    "--num-layers 8 --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 4 --num-query-groups 2 "
    "--seq-length 64 --micro-batch-size 1 --global-batch-size 16 --lr-warmup-iters 1 --odyssey-hang-s 2 "
    "--check-weight-hash-across-dp-replicas-interval 1"
).split()
TE_TESTS = "tests/mcore/test_te_gpu.py"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job, and what happens to it."""

    name: str
    gpus: int
    flags: str
    inject: str
    steps: int = 20


CASES = (
    Case(
        name="a kill, rerouted",
        gpus=2,
        flags="--bf16 --odyssey-policy reroute",
        inject="rank=1,step=6,at=backward",
    ),
    Case(
        name="a kill, taken over by a shadow",
        gpus=2,
        flags="--bf16 --pipeline-model-parallel-size 2 --odyssey-redundancy state",
        inject="rank=1,step=6,at=forward",
    ),
    Case(
        name="a hang in a reduction",
        gpus=4,
        flags="--bf16 --pipeline-model-parallel-size 2",
        inject="rank=3,step=6,at=reduce,signal=STOP",
    ),
    Case(
        name="a kill, planned anew",
        gpus=4,
        flags="--bf16 --pipeline-model-parallel-size 2 --odyssey-policy replan",
        inject="rank=2,step=6,at=backward",
    ),
    Case(
        name="a kill, and the rank comes back",
        gpus=4,
        flags="--bf16 --pipeline-model-parallel-size 2 --odyssey-respawn 1",
        inject="rank=3,step=6,at=agreement",
        steps=200,
    ),
    Case(
        name="a kill in float64",
        gpus=4,
        flags="--pipeline-model-parallel-size 2 --odyssey-float64 on",
        inject="rank=1,step=6,at=backward",
    ),
    Case(
        name="a cell of TP 2 x PP 2 x DP 2",
        gpus=8,
        flags="--bf16 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2",
        inject="rank=5,step=6,at=backward",
    ),
)


def flags_of(case: Case, run_dir: Path, cache: Path, *, device: str, inject: str) -> list[str]:
    folders = ["--odyssey-run-dir", str(run_dir), "--data-cache-path", str(cache)]
    given = [
        *MODEL,
        "--train-iters",
        str(case.steps),
        *case.flags.split(),
        "--odyssey-device",
        device,
        *folders,
    ]
    return [*given, "--odyssey-inject", inject] if inject else given


class Machine:
    """What there is here, and the time that is left."""

    def __init__(self, out: Path, *, dry: bool):
        self.out, self.dry, self._began_s = out, dry, time.monotonic()
        self.gpus, self.why = _gpus()
        self.rows: list[tuple[str, int, str]] = []
        self.left_out: list[str] = []
        self.wrong: list[str] = []

    @property
    def left_s(self) -> float:
        return LIMIT_S - (time.monotonic() - self._began_s)

    def run(self, argv: Sequence[str], log: str, path: str = "") -> int:
        """The exit code; 124 where it took too long. What it says goes to a file. ``path``: where else Python finds
        modules.
        """
        search = os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH", "")]))
        limit_s = max(1.0, min(OF_ONE_S, self.left_s))
        with (self.out / log).open("w") as file:
            try:
                return subprocess.run(
                    argv,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=limit_s,
                    cwd=CHECKOUT,
                    check=False,
                    env=os.environ | {"PYTHONPATH": search},
                ).returncode
            except subprocess.TimeoutExpired:
                return 124

    def job(self, case: Case, name: str, inject: str) -> Path:
        """Its run folder. Raises ConfigError if it fails."""
        device = "cpu" if self.dry else "cuda"
        run_dir = self.out / name
        launcher = ["--nproc-per-node", str(case.gpus)]
        launcher += ["--preload", "odyssey_megatron.mcore.cpu_preload"] if self.dry else []
        flags = flags_of(case, run_dir, self.out / "cache", device=device, inject=inject)
        argv = [sys.executable, "-m", "odyssey_megatron", "run", *launcher, str(SCRIPT), *flags]
        code = self.run(argv, f"{name}.log")
        if code:
            raise ConfigError(f"exit code {code}: {self.out / name}.log")
        return run_dir

    def measure(self, case: Case) -> None:
        name = case.name.replace(" ", "-").replace(",", "")
        try:
            shot = self.job(case, name, case.inject)
            reference = self.job(case, f"{name}.undisturbed", "")
            self.rows.append((case.name, case.gpus, figures(shot, reference)))
        except ConfigError as error:
            self.wrong.append(f"{case.name}: {error}")

    def measure_beside(self, case: Beside, checkout: Path) -> None:
        """A job of Megatron-LM's, beside it without Odyssey."""
        logs = {}
        try:
            for name, arguments in commands(case, checkout, self.out, dry=self.dry).items():
                logs[name] = self.out / f"{name}.log"
                if code := self.run([sys.executable, *arguments], f"{name}.log", str(checkout)):
                    raise ConfigError(f"exit code {code}: {logs[name]}")
            self.rows.append((case.name, case.gpus, gpu_megatron_lm.figures(case, logs)))
        except ConfigError as error:
            self.wrong.append(f"{case.name}: {error}")


def _gpus() -> tuple[int, str]:
    """How many, and why none."""
    if importlib.util.find_spec("torch") is None:
        return 0, "no torch"
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count and not torch.distributed.is_nccl_available():
        return 0, f"{count} GPU(s), but a torch without NCCL"
    return count, "" if count else "no CUDA device"


def figures(shot: Path, reference: Path) -> str:
    """What a job that was shot at has shown, beside the same undisturbed. Raises ConfigError if it shows nothing."""
    run, undisturbed = read_run(shot), read_run(reference)
    found = summary(run, undisturbed)
    events = list(read_journal(shot))
    if not any(event["event"] == "injected" for event in events):
        raise ConfigError(f"{shot}: the fault did not happen")
    if any(event["event"] == "left_out" for event in events):
        raise ConfigError(f"{shot}: holders differed behind a step")
    difference, stall_s = found["loss_difference"], found["median_stall_s"]
    if stall_s is None or difference["only_here"] or difference["only_in_reference"]:
        raise ConfigError(f"{shot}: no recovery, or steps are missing: {difference}")
    return (
        f"stall {1000 * stall_s:.0f} ms; losses within {difference['max_relative']:.2g} relative of {found['steps']} "
        f"steps; step {1000 * summary(undisturbed, None)['median_step_s']:.0f} ms; same bytes on all holders"
    )


def check(case: Case, out: Path) -> None:
    """What of a job needs no GPU: its flags are ours and the example's. Raises ConfigError, SystemExit."""
    flags = flags_of(case, out / "none", out / "cache", device="cuda", inject=case.inject)
    config = config_from_argv(flags)
    if [one.rank for one in config.injections if one.rank >= case.gpus]:
        raise ConfigError(f"{case.name}: rank of {case.inject} is not one of {case.gpus}")
    spec = importlib.util.spec_from_file_location("pretrain_llama", SCRIPT)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    before, sys.argv = sys.argv, [str(SCRIPT), *flags]
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.check_model(module.parse_arguments())
    finally:
        sys.argv = before
        sys.path.remove(str(SCRIPT.parent))


def dry_run(machine: Machine) -> None:
    """The flags of all jobs; the tests that want a GPU can be collected; the first job, on this machine's CPU."""
    for case in CASES:
        check(case, machine.out)
        machine.left_out.append(f"{case.name}: {case.gpus} GPUs")
    argv = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--collect-only", TE_TESTS]
    if machine.run(argv, "te.log"):
        machine.wrong.append(f"{TE_TESTS} cannot be collected: {machine.out / 'te.log'}")
    for one in BESIDE:
        machine.left_out.append(f"{one.name}: {one.gpus} GPUs")
        verdict = judged([*gpu_megatron_lm.MODEL.split(), *one.flags.split(), "--odyssey-inject", one.inject])
        if verdict.refused or verdict.ignored or verdict.unknown:
            machine.wrong.append(verdict.told(one.name))
    if path := os.environ.get("MEGATRON_LM_PATH"):
        machine.measure_beside(BESIDE[1], Path(path))
    smallest = CASES[0]
    machine.measure(replace(smallest, steps=8, flags=f"{smallest.flags} --global-batch-size 4"))


def wet_run(machine: Machine) -> None:
    if importlib.util.find_spec("transformer_engine") is None:
        machine.left_out.append(f"{TE_TESTS}: no transformer_engine")
    elif machine.gpus:
        code = machine.run([sys.executable, "-m", "pytest", "-q", "-m", "gpu", TE_TESTS], "te.log")
        lines = (machine.out / "te.log").read_text().splitlines()
        machine.rows.append(("Transformer Engine's layers", 1, lines[-1] if lines else "nothing said"))
        if code:
            machine.wrong.append(f"{TE_TESTS}: exit code {code}: {machine.out / 'te.log'}")
    for case in (*CASES, *BESIDE):
        if case.gpus > machine.gpus:
            machine.left_out.append(
                f"{case.name}: {case.gpus} GPUs, here {machine.gpus} ({machine.why or 'too few'})"
            )
        elif machine.left_s < 30.0:
            machine.left_out.append(f"{case.name}: no time left of {LIMIT_S:.0f} s")
        elif isinstance(case, Case):
            machine.measure(case)
        elif not (path := os.environ.get("MEGATRON_LM_PATH")):
            machine.left_out.append(f"{case.name}: MEGATRON_LM_PATH names no checkout")
        elif case.needs_te and importlib.util.find_spec("transformer_engine") is None:
            machine.left_out.append(f"{case.name}: no transformer_engine")
        else:
            machine.measure_beside(case, Path(path))


NOT_YET = ("several ranks on one GPU (a rank's groups are NCCL's, which wants a GPU each)",)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: what needs none")
    parser.add_argument("--out", default="", help="folder for journals and logs; default: a new one")
    options = parser.parse_args()
    out = Path(options.out or tempfile.mkdtemp(prefix="odyssey-gpu-")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    machine = Machine(out, dry=options.dry_run)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    (dry_run if options.dry_run else wet_run)(machine)
    where = "CPU, for the script alone" if options.dry_run else f"{machine.gpus} GPU(s)"
    print(f"| on {where} | ranks | measured |\n|---|---|---|")
    for name, ranks, figure in machine.rows:
        print(f"| {name} | {ranks} | {figure} |")
    for text in (*machine.left_out, *NOT_YET):
        print(f"not run: {text}")
    for text in machine.wrong:
        print(f"FAILED: {text}")
    return bool(machine.wrong) or not machine.rows


if __name__ == "__main__":
    sys.exit(main())
