"""What Odyssey costs while nothing fails: its iteration time over Megatron-Core's own, on the same model.

Both sides train the example's model from the same weights on the same microbatches, 8 CPU ranks as PP4 x DP2; the
baseline is ``stock_megatron.py`` (Megatron's 1F1B, DDP and optimizer on plain gloo). Timed is from the first commit to
the last, so that all that happens between two steps is in it: the journal, measuring and publishing costs, heartbeats.
No step is left out but the first, which is the start. Runs alternate, so that whatever else the machine does falls on
both. Losses and gradient norms are compared too: a fast wrong step is no step.

It can show what Odyssey's own Python, messages and files add to a step of a few hundred milliseconds. On gloo and
two cores it cannot show kernels and NCCL beside each other, a reduction that overlaps a backward, links that are slower
than memory. Eight processes share the cores, so whoever waits less for others finishes earlier: sends that are not
waited for make a ratio below 1 here, and need not on GPUs.

    python tests/benchmarks/overhead.py [--json] [--rounds 3] [--steps 12]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(CHECKOUT), str(Path(__file__).parent)]

from bars import at_most, finish, largest_difference, summarize

from odyssey_megatron.metrics.run import read_run

RANKS, BAR = 8, 1.03
PRELOAD = "odyssey_megatron.mcore.cpu.preload"


class Trained(NamedTuple):
    """Of each step of a job."""

    committed_s: list[float]
    """When it was committed."""
    losses: list[float]
    grad_norms: list[float | None]


def flags(steps: int, run_dir: Path, more: str) -> list[str]:
    """``more`` counts where it says otherwise."""
    return (
        f"--pipeline-model-parallel-size 4 --num-layers 8 --hidden-size 128 --ffn-hidden-size 384 "
        f"--num-attention-heads 8 --num-query-groups 4 --seq-length 128 --micro-batch-size 1 --global-batch-size 16 "
        f"--train-iters {steps} --odyssey-device cpu --odyssey-run-dir {run_dir} {more}"
    ).split()


def environment() -> dict[str, str]:
    return {
        **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(CHECKOUT),
        "PYTHONWARNINGS": "ignore",
    }  # fmt: skip


def carry_out(command: list[str], folder: Path) -> None:
    """Raises with the end of the log if ``command`` fails."""
    log = folder / "log"
    with log.open("w") as file:
        code = subprocess.run(command, env=environment(), stdout=file, stderr=file, check=False).returncode
    if code:
        raise RuntimeError(f"{command} ended with exit code {code}:\n{log.read_text()[-3000:]}")


def odyssey(steps: int, folder: Path, more: str = "") -> Trained:
    """Under ``odyssey run``, with its defaults."""
    script = CHECKOUT / "examples" / "llama" / "pretrain_llama.py"
    command = [sys.executable, "-m", "odyssey_megatron", "run", "--nproc-per-node", str(RANKS)]
    command += ["--preload", PRELOAD, str(script), *flags(steps, folder / "run", more)]
    carry_out(command, folder)
    committed = read_run(folder / "run").steps
    return Trained(
        [one.committed_wall_s for one in committed],
        [one.loss for one in committed],
        [one.grad_norm for one in committed],
    )


def stock(steps: int, folder: Path, more: str = "") -> Trained:
    """The same under Megatron-Core alone."""
    out = folder / "stock.json"
    command = [sys.executable, str(Path(__file__).parent / "stock_megatron.py")]
    command += ["--world-size", str(RANKS), "--out", str(out), *flags(steps, folder / "stock", more)]
    carry_out(command, folder)
    result = json.loads(out.read_text())
    return Trained(result["committed_s"], result["loss"], result["grad_norm"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    times: dict[str, list[float]] = {"odyssey": [], "megatron": []}
    means: dict[str, list[float]] = {"odyssey": [], "megatron": []}
    losses: dict[str, list[float]] = {"odyssey": [], "megatron": []}
    norms: dict[str, list[float | None]] = {"odyssey": [], "megatron": []}
    for number in range(args.rounds):
        # Each second round the other way round: a slow drift of the machine cancels.
        order = [("odyssey", odyssey), ("megatron", stock)]
        for name, run in order if number % 2 == 0 else reversed(order):
            with tempfile.TemporaryDirectory() as folder:
                trained = run(args.steps, Path(folder))
            committed_s = trained.committed_s
            times[name] += [after - before for before, after in pairwise(committed_s)]
            means[name].append((committed_s[-1] - committed_s[0]) / (len(committed_s) - 1))
            losses[name] += trained.losses
            norms[name] += trained.grad_norms
        print(f"round {number + 1}: mean step " + ", ".join(f"{n} {m[-1]:.4f} s" for n, m in means.items()),
              file=sys.stderr, flush=True)  # fmt: skip
    result = {
        "ranks": RANKS,
        "layout": "PP4 x DP2",
        "odyssey, commit to commit, s": summarize(times["odyssey"]),
        "megatron, commit to commit, s": summarize(times["megatron"]),
        "ratio_of_each_round": [a / b for a, b in zip(means["odyssey"], means["megatron"], strict=True)],
    }
    bars = [
        at_most("overhead, all steps", sum(times["odyssey"]) / sum(times["megatron"]), BAR),
        at_most("largest relative loss difference (float32)", largest_difference(*losses.values()), 1e-5),
        at_most("largest relative difference of gradient norms", largest_difference(*norms.values()), 1e-5),
    ]
    return finish(result, bars, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
