"""What ``tests/gpu.sh`` runs: jobs of the example's model on real GPUs, each beside the same without a failure.

Where there are fewer GPUs than a job has ranks, several ranks share one: their messages go by way of the host
(``--odyssey-backend gloo``), so that NCCL is not tried, but all that a device computes is, and is timed.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
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
from odyssey_megatron.policy.profile import load_profile
from tests import gpu_megatron_lm
from tests.gpu_megatron_lm import BESIDE, SHARED, Beside, commands

CHECKOUT = Path(__file__).resolve().parents[1]
SCRIPT = CHECKOUT / "examples" / "llama" / "pretrain_llama.py"
LIMIT_S, OF_ONE_S = 600.0, 150.0
"""Of all together, and of one command."""
EXACT = 1e-10
"""Relative, of losses in float64 with and without a failure."""
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


def flags_of(
    case: Case, run_dir: Path, cache: Path, *, device: str, inject: str, shares: bool = False
) -> list[str]:
    folders = ["--odyssey-run-dir", str(run_dir), "--data-cache-path", str(cache)]
    given = [
        *MODEL,
        "--train-iters",
        str(case.steps),
        *case.flags.split(),
        "--odyssey-device",
        device,
        *folders,
        *(SHARED.split() if shares else []),
    ]
    return [*given, "--odyssey-inject", inject] if inject else given


class Machine:
    """What there is here, and the time that is left."""

    def __init__(self, out: Path, *, dry: bool):
        self.out, self.dry, self._began_s = out, dry, time.monotonic()
        self.gpus, self.why = (1, "") if dry else _gpus()
        """A dry run does as if there were one, for the ranks of a job to share."""
        self.rows: list[tuple[str, int, str]] = []
        self.left_out: list[str] = []
        self.wrong: list[str] = []

    def shares(self, case: Case | Beside) -> bool:
        """Whether several ranks of it are on one GPU."""
        return 0 < self.gpus < case.gpus

    def told(self, case: Case | Beside) -> str:
        """Its name, and where it runs."""
        return f"{case.name}; over gloo on {self.gpus} GPU(s)" if self.shares(case) else case.name

    @property
    def left_s(self) -> float:
        return LIMIT_S - (time.monotonic() - self._began_s)

    def run(self, argv: Sequence[str], log: str, path: str = "", **environ: str) -> int:
        """The exit code; 124 where it took too long. What it says goes to a file. ``path``: where else Python finds
        modules; ``environ``: more variables.
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
                    env=os.environ | {"PYTHONPATH": search, **environ},
                ).returncode
            except subprocess.TimeoutExpired:
                return 124

    def job(self, case: Case, name: str, inject: str) -> Path:
        """Its run folder. Raises ConfigError if it fails."""
        device = "cpu" if self.dry else "cuda"
        run_dir = self.out / name
        launcher = ["--nproc-per-node", str(case.gpus)]
        launcher += ["--preload", "odyssey_megatron.mcore.cpu_preload"] if self.dry else []
        cache = self.out / "cache"
        flags = flags_of(case, run_dir, cache, device=device, inject=inject, shares=self.shares(case))
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
            exact = EXACT if "--odyssey-float64" in case.flags else math.inf
            self.rows.append((self.told(case), case.gpus, figures(shot, reference, exact)))
        except ConfigError as error:
            self.wrong.append(f"{case.name}: {error}")

    def measure_beside(self, case: Beside, checkout: Path) -> None:
        """A job of Megatron-LM's, beside it without Odyssey."""
        logs = {}
        try:
            argvs = commands(case, checkout, self.out, dry=self.dry, shares=self.shares(case))
            # Megatron refuses such jobs without it, on GPUs before Blackwell.
            one_queue = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if case.apart else {}
            for name, arguments in argvs.items():
                logs[name] = self.out / f"{name}.log"
                if code := self.run([sys.executable, *arguments], f"{name}.log", str(checkout), **one_queue):
                    raise ConfigError(f"exit code {code}: {logs[name]}")
            found = gpu_megatron_lm.figures(case, logs, shares=self.shares(case))
            self.rows.append((self.told(case), case.gpus, found))
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


def figures(shot: Path, reference: Path, exact: float = math.inf) -> str:
    """What a job that was shot at has shown, beside the same undisturbed. Raises ConfigError if it shows nothing, or if
    a loss is farther off than ``exact``, relative.
    """
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
    if difference["max_relative"] > exact:
        raise ConfigError(f"{shot}: losses {difference['max_relative']:.2g} off those of {reference}")
    profile = load_profile(reference)
    if profile.source != "measured":
        raise ConfigError(f"{reference}: no costs were measured")
    layer = profile.costs.layers[1]
    costs = " + ".join(
        f"{1e3 * one:.2f}" for one in (layer.forward_s, layer.input_grad_s, layer.weight_grad_s)
    )
    return (
        f"stall {1000 * stall_s:.0f} ms; losses within {difference['max_relative']:.2g} relative of {found['steps']} "
        f"steps; step {1000 * summary(undisturbed, None)['median_step_s']:.0f} ms; a layer's forward, input and weight "
        f"gradient {costs} ms; same bytes on all holders"
    )


def check(case: Case, out: Path, *, shares: bool = False) -> None:
    """What of a job needs no GPU: its flags are ours and the example's. Raises ConfigError, SystemExit."""
    cache = out / "cache"
    flags = flags_of(case, out / "none", cache, device="cuda", inject=case.inject, shares=shares)
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
        check(case, machine.out, shares=True)
        machine.left_out.append(f"{case.name}: {case.gpus} GPUs")
    argv = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--collect-only", TE_TESTS]
    if machine.run(argv, "te.log"):
        machine.wrong.append(f"{TE_TESTS} cannot be collected: {machine.out / 'te.log'}")
    for one in BESIDE:
        machine.left_out.append(f"{one.name}: {one.gpus} GPUs")
        argv = commands(one, CHECKOUT, machine.out, dry=False, shares=True)[one.log]
        verdict = judged(argv[argv.index("--num-layers") :])
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
    for case in sorted((*CASES, *BESIDE), key=lambda one: one.gpus):
        if not machine.gpus:
            machine.left_out.append(f"{case.name}: {case.gpus} GPUs, here 0 ({machine.why})")
        elif machine.left_s < 30.0:
            machine.left_out.append(f"{case.name}: no time left of {LIMIT_S:.0f} s")
        elif isinstance(case, Case):
            machine.measure(case)
        elif not (path := os.environ.get("MEGATRON_LM_PATH")):
            machine.left_out.append(f"{case.name}: MEGATRON_LM_PATH names no checkout")
        elif case.needs and importlib.util.find_spec(case.needs) is None:
            machine.left_out.append(f"{case.name}: no {case.needs}")
        else:
            machine.measure_beside(case, Path(path))
    shared = sorted({case.gpus for case in (*CASES, *BESIDE) if machine.shares(case)})
    if shared:
        machine.left_out.append(
            f"NCCL between {', '.join(map(str, shared))} ranks: here {machine.gpus} GPU(s)"
        )


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
    for text in machine.left_out:
        print(f"not run: {text}")
    for text in machine.wrong:
        print(f"FAILED: {text}")
    return bool(machine.wrong) or not machine.rows


if __name__ == "__main__":
    sys.exit(main())
