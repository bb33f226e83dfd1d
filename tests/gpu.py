"""What ``tests/gpu.sh`` runs: jobs of the example's model on real GPUs, each beside the same without a failure.

Of the cases of one name, the largest that has a GPU for each rank is run: with two GPUs, NCCL connects the ranks of all
but those that need more. Where there are fewer GPUs than a job has ranks, several ranks share one: their messages go by
way of the host (``--odyssey-backend gloo``), so that NCCL is not tried, but what a device computes is, and is timed.

How long it takes: the tests, and 29 or 30 jobs. Six at a time on one H100 and 16 cores took 15 to 45 s each, mostly
their start, and compiling. On two cores of a CPU, shared with others, one of two or three ranks takes 10 to 30 s. What
there is no time for before ``LIMIT_S`` is left out, and said to be: cases that share GPUs come last.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from odyssey_megatron.config import config_from_argv
from odyssey_megatron.doctor.launch_line import judged
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.metrics.journal import read_journal
from odyssey_megatron.metrics.run import read_run, summary
from odyssey_megatron.metrics.steps import loss_difference
from odyssey_megatron.policy.costs.profile import load_profile
from tests import gpu_megatron_lm
from tests.benchmarks.bars import norm_difference
from tests.gpu_megatron_lm import BESIDE, NORM_ROUNDING, ROUNDING, SHARED, Beside, commands
from tests.gpu_processes import MARK, end, free_port

CHECKOUT = Path(__file__).resolve().parents[1]
SCRIPT = CHECKOUT / "examples" / "llama" / "pretrain_llama.py"
LIMIT_S, OF_ONE_S = 600.0, 150.0
"""Of all together, and of one command."""
EXACT = 1e-10
"""Relative, of losses and gradient norms in float64 with and without a failure."""
MODEL = (
    "--num-layers 8 --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 4 --num-query-groups 2 "
    "--seq-length 64 --micro-batch-size 1 --global-batch-size 16 --lr-warmup-iters 1 --odyssey-hang-s 2 "
    "--check-weight-hash-across-dp-replicas-interval 1"
).split()
NEEDS = {
    "torch": "a build for CUDA, as GPU containers bring it",
    "megatron.core": "pip install --no-deps megatron-core==0.16.1, or PYTHONPATH=(a checkout of Megatron-LM)",
    "pytest": "pip install pytest pytest-timeout",
}
"""Modules that are wanted, and how one comes by them."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job, and what happens to it."""

    name: str
    gpus: int
    flags: str
    inject: str
    more: str = ""
    """Besides ``flags``, where something happens to it: what changes no loss."""
    steps: int = 20
    shows: tuple[str, ...] = ("injected", "recovered")
    """Events of its journal without which it has shown nothing."""

    @property
    def folder(self) -> str:
        return f"{self.name.replace(' ', '-').replace(',', '')}-{self.gpus}"


TWO_STAGES = "--bf16 --pipeline-model-parallel-size 2"
SPARE = f"{TWO_STAGES} --odyssey-redundancy state"
"""Of two ranks, each stands by with what the other one has."""
CASES = (
    Case(
        name="a kill, rerouted",
        gpus=2,
        flags="--bf16",
        more="--odyssey-policy reroute",
        inject="rank=1,step=6,at=backward",
    ),
    Case(
        name="a kill, rerouted",
        gpus=3,
        flags="--bf16 --global-batch-size 12",
        more="--odyssey-policy reroute",
        inject="rank=1,step=6,at=backward",
    ),
    Case(
        name="a kill, taken over by a shadow",
        gpus=2,
        flags=SPARE,
        inject="rank=1,step=6,at=forward",
    ),
    Case(
        name="a hang in a reduction",
        gpus=2,
        flags="--bf16",
        inject="rank=1,step=6,at=reduce,signal=STOP",
    ),
    Case(
        name="a hang in a reduction",
        gpus=4,
        flags=TWO_STAGES,
        inject="rank=3,step=6,at=reduce,signal=STOP",
    ),
    Case(
        name="a kill, planned anew",
        gpus=2,
        flags=SPARE,
        more="--odyssey-policy replan",
        inject="rank=0,step=6,at=backward",
    ),
    Case(
        name="a kill, planned anew",
        gpus=3,
        flags="--bf16 --num-layers 6 --pipeline-model-parallel-size 3 --odyssey-redundancy state",
        more="--odyssey-policy replan",
        inject="rank=1,step=6,at=backward",
    ),
    Case(
        name="a kill, planned anew",
        gpus=4,
        flags=TWO_STAGES,
        more="--odyssey-policy replan",  # and one more as the groups of that plan connect
        inject="rank=2,step=6,at=backward;rank=1,step=-1,at=groups,generation=2",
    ),
    Case(
        name="a kill, and the rank comes back",
        gpus=2,
        flags="--bf16 --global-batch-size 4 --lr 1e-4 --min-lr 1e-5",
        more="--odyssey-respawn 1",
        inject="rank=1,step=6,at=agreement",
        steps=200,
        shows=("injected", "recovered", "rank_joined", "switched"),
    ),
    Case(
        name="a kill, and the rank comes back",
        gpus=4,
        flags=f"{TWO_STAGES} --global-batch-size 4 --lr 1e-4 --min-lr 1e-5",
        more="--odyssey-respawn 1",
        inject="rank=3,step=6,at=agreement",
        steps=200,
        shows=("injected", "recovered", "rank_joined", "switched"),
    ),
    Case(
        name="a kill in float64",
        gpus=2,
        flags="--odyssey-float64 on",
        inject="rank=1,step=6,at=backward",
    ),
    Case(
        name="a kill in float64",
        gpus=4,
        flags="--pipeline-model-parallel-size 2 --odyssey-float64 on",
        inject="rank=1,step=6,at=backward",
    ),
    Case(
        name="a kill, optimizer state in slices",  # each on two holders, so that there must be three
        gpus=3,
        flags="--bf16 --global-batch-size 12",
        more="--use-distributed-optimizer",
        inject="rank=1,step=6,at=param_gather",
    ),
    Case(
        name="a cell of TP 2 x PP 2 x DP 2",
        gpus=8,
        flags=f"{TWO_STAGES} --tensor-model-parallel-size 2",
        inject="rank=5,step=6,at=backward",
    ),
)


def chosen(gpus: int) -> Iterator[Case | Beside]:
    """What to run with so many, of each name one: the largest that has one for each rank; else the largest, and its
    ranks share. Those that share come last.
    """
    every: tuple[Case | Beside, ...] = (*CASES, *BESIDE)
    sizes: dict[str, list[Case | Beside]] = {}
    for case in every:
        sizes.setdefault(case.name, []).append(case)
    found = [
        max([one for one in same if one.gpus <= gpus] or same, key=lambda one: one.gpus)
        for same in sizes.values()
    ]
    yield from sorted(found, key=lambda one: (one.gpus > gpus, one.gpus))


def gpu_tests() -> list[str]:
    """The files with tests that are marked so, from the checkout."""
    files = sorted((CHECKOUT / "tests").rglob("test_*.py"))
    return [str(one.relative_to(CHECKOUT)) for one in files if "pytest.mark.gpu" in one.read_text()]


def missing(name: str) -> str:
    """Of ``NEEDS``: empty if it is there."""
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # what it is part of is missing
        found = None
    return "" if found else f"no {name}: {NEEDS[name]}"


def flags_of(
    case: Case, run_dir: Path, cache: Path, *, device: str, hurt: bool, shares: bool = False
) -> list[str]:
    """``hurt``: with ``more``, and what happens to it."""
    folders = ["--odyssey-run-dir", str(run_dir), "--data-cache-path", str(cache)]
    return [
        *MODEL,
        "--train-iters",
        str(case.steps),
        *case.flags.split(),
        "--odyssey-device",
        device,
        *folders,
        *(SHARED.split() if shares else []),
        *([*case.more.split(), "--odyssey-inject", case.inject] if hurt else []),
    ]


class Machine:
    """What there is here, and the time that is left."""

    def __init__(self, out: Path, *, dry: bool, limit_s: float = LIMIT_S):
        self.out, self.dry, self._ends_s = out, dry, time.monotonic() + limit_s
        self.gpus, self.why = (1, "") if dry else _gpus()
        """A dry run does as if there were one, for the ranks of a job to share."""
        self.rows: list[tuple[str, int, str]] = []
        self.left_out: list[str] = []
        self.wrong: list[str] = []
        self._undisturbed: dict[tuple[int, str, int], Path] = {}
        """Run folders, by what such jobs differ in."""

    def shares(self, case: Case | Beside) -> bool:
        """Whether several ranks of it are on one GPU."""
        return 0 < self.gpus < case.gpus

    def told(self, case: Case | Beside) -> str:
        """Its name, and where it runs."""
        return f"{case.name}; over gloo on {self.gpus} GPU(s)" if self.shares(case) else case.name

    @property
    def left_s(self) -> float:
        return self._ends_s - time.monotonic()

    def run(self, argv: Sequence[str], log: str, path: str = "", **environ: str) -> int:
        """The exit code; 124 where it took too long. What it says goes to a file. ``path``: where else Python finds
        modules; ``environ``: more variables. No process that it has started is left.
        """
        search = os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH", "")]))
        limit_s = max(1.0, min(OF_ONE_S, self.left_s))
        mark = str(self.out / log)
        # torchrun's, and ours: another job of this machine may have the port that is taken by default.
        environ |= {"PYTHONPATH": search, MARK: mark, "PET_MASTER_PORT": str(free_port())}
        with (self.out / log).open("w") as file:
            process = subprocess.Popen(
                argv, stdout=file, stderr=subprocess.STDOUT, cwd=CHECKOUT, env=os.environ | environ
            )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            end(mark)
            process.wait()

    def job(self, case: Case, name: str, *, hurt: bool) -> Path:
        """Its run folder. Raises ConfigError if it fails."""
        device = "cpu" if self.dry else "cuda"
        run_dir = self.out / name
        launcher = ["--nproc-per-node", str(case.gpus)]
        launcher += ["--preload", "odyssey_megatron.mcore.cpu.preload"] if self.dry else []
        cache = self.out / "cache"
        flags = flags_of(case, run_dir, cache, device=device, hurt=hurt, shares=self.shares(case))
        argv = [sys.executable, "-m", "odyssey_megatron", "run", *launcher, str(SCRIPT), *flags]
        code = self.run(argv, f"{name}.log")
        if code:
            raise ConfigError(f"exit code {code}: {self.out / name}.log")
        return run_dir

    def undisturbed(self, case: Case) -> Path:
        """Its run folder, without ``more`` and what happens to it; cases that differ in these alone share it."""
        key = case.gpus, case.flags, case.steps
        if key not in self._undisturbed:
            self._undisturbed[key] = self.job(case, f"{case.folder}.undisturbed", hurt=False)
        return self._undisturbed[key]

    def measure(self, case: Case) -> None:
        if why := missing("megatron.core"):
            self.left_out.append(f"{case.name}: {why}")
            return
        try:
            shot = self.job(case, case.folder, hurt=True)
            found = figures(case, shot, self.undisturbed(case))
            self.rows.append((self.told(case), case.gpus, found))
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
    if why := missing("torch"):
        return 0, why
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count and not torch.distributed.is_nccl_available():
        return 0, f"{count} GPU(s), but a torch without NCCL"
    return count, "" if count else "no CUDA device"


def figures(case: Case, shot: Path, reference: Path) -> str:
    """What a job that was shot at has shown, beside the same undisturbed. Raises ConfigError if that is not what its
    case ``shows``, or if its losses or gradient norms are others.
    """
    run, undisturbed = read_run(shot), read_run(reference)
    found, difference = summary(run, None), loss_difference(run.steps, undisturbed.steps)
    losses, norms = difference.max_relative, norm_difference(run.steps, undisturbed.steps)
    events = {event["event"] for event in read_journal(shot)}
    if absent := [one for one in case.shows if one not in events]:
        raise ConfigError(f"{shot}: no event {', '.join(absent)}")
    if "left_out" in events:
        raise ConfigError(f"{shot}: holders differed behind a step")
    stall_s = found["median_stall_s"]
    if stall_s is None or difference.only_here or difference.only_in_reference:
        raise ConfigError(f"{shot}: no recovery, or steps are missing: {difference}")
    most, norms_most = (EXACT, EXACT) if "--odyssey-float64" in case.flags else (ROUNDING, NORM_ROUNDING)
    if losses > most or norms > norms_most:
        raise ConfigError(f"{shot}: losses {losses:.2g}, gradient norms {norms:.2g} off those of {reference}")
    profile = load_profile(reference)
    if profile.source != "measured":
        raise ConfigError(f"{reference}: no costs were measured")
    layer = profile.costs.layers[1]
    costs = " + ".join(
        f"{1e3 * one:.2f}" for one in (layer.forward_s, layer.input_grad_s, layer.weight_grad_s)
    )
    return (
        f"stall {1000 * stall_s:.0f} ms; losses within {losses:.2g}, gradient norms within {norms:.2g} relative of "
        f"{found['steps']} steps; step {1000 * summary(undisturbed, None)['median_step_s']:.0f} ms; a layer's forward, "
        f"input and weight gradient {costs} ms; same bytes on all holders"
    )


def check(case: Case, out: Path, *, shares: bool = False) -> None:
    """What of a job needs no GPU: its flags are ours and the example's. Raises ConfigError, SystemExit."""
    cache = out / "cache"
    flags = flags_of(case, out / "none", cache, device="cuda", hurt=True, shares=shares)
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
    argv = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--collect-only", *gpu_tests()]
    if machine.run(argv, "tests.log"):
        machine.wrong.append(f"the tests marked gpu cannot be collected: {machine.out / 'tests.log'}")
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


def marked_tests(machine: Machine) -> None:
    """All tests that are marked ``gpu``, in one process; what they lack is said."""
    argv = [sys.executable, "-m", "pytest", "-q", "-rs", "-m", "gpu", *gpu_tests()]
    code = machine.run(argv, "tests.log")
    said = (machine.out / "tests.log").read_text()
    lines = said.splitlines()
    machine.rows.append(("tests marked gpu", 1, lines[-1] if lines else "nothing said"))
    machine.left_out += [f"tests marked gpu: {one}" for one in re.findall(r"^SKIPPED (.*)$", said, re.M)]
    if code:
        machine.wrong.append(f"tests marked gpu: exit code {code}: {machine.out / 'tests.log'}")


def wet_run(machine: Machine) -> None:
    checkout = os.environ.get("MEGATRON_LM_PATH")
    if why := machine.why or missing("pytest"):
        machine.left_out.append(f"tests marked gpu: {why}")
    else:
        marked_tests(machine)
    cases = [*chosen(machine.gpus)]
    for case in cases:
        if not machine.gpus:
            machine.left_out.append(f"{case.name}: {case.gpus} GPUs, here 0 ({machine.why})")
        elif machine.left_s < 30.0:
            machine.left_out.append(f"{case.name}: no time left")
        elif isinstance(case, Case):
            machine.measure(case)
        elif not checkout:
            machine.left_out.append(f"{case.name}: MEGATRON_LM_PATH names no checkout")
        elif case.needs and importlib.util.find_spec(case.needs) is None:
            machine.left_out.append(f"{case.name}: no {case.needs}")
        else:
            machine.measure_beside(case, Path(checkout))
    if shared := [f"{case.name} ({case.gpus})" for case in cases if machine.shares(case)]:
        machine.left_out.append(
            f"NCCL between so many ranks, here {machine.gpus} GPU(s): {'; '.join(shared)}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: what needs none")
    parser.add_argument("--out", default="", help="folder for journals and logs; default: a new one")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds of all together")
    options = parser.parse_args()
    out = Path(options.out or tempfile.mkdtemp(prefix="odyssey-gpu-")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    machine = Machine(out, dry=options.dry_run, limit_s=options.limit_s)
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
