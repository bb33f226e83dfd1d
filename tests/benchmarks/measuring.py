"""What measuring costs: the CPU time of each rank in steps that are measured, beside their neighbours that are not.

A job of 4 ranks (PP2 x DP2, the example's model) measures every second step, so that each measured step stands between
two that are not; what it takes more than their mean, with the clocks that are read, the product that all compute and
what is published, is a pair's cost. The median of all pairs, spread over as many steps as the default of
``--odyssey-profile-steps``, is held against the median step. All by the CPU time of the rank's process, all of its
threads: on the wall clock of a machine that others use, 0.4 % cannot be seen.

    python tests/benchmarks/measuring.py [--json] [--steps 120]
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(CHECKOUT), str(Path(__file__).parent)]

from bars import at_most, finish, summarize
from overhead import PRELOAD, carry_out

from odyssey_megatron.config import OdysseyConfig

RANKS, BAR = 4, 0.004
OUT = "MEASURING_OUT"
SCRIPT = CHECKOUT / "examples" / "llama" / "pretrain_llama.py"
_WARM = 4
"""Steps until caches are warm and connections are there."""


def as_a_rank() -> None:
    """The example, with a note of the process's CPU time as each step begins."""
    from odyssey_megatron.execute.timing import Measurements

    began_s: list[tuple[int, float]] = []
    original = Measurements.trace

    def trace(self: Measurements, step: int) -> object:
        began_s.append((step, time.process_time()))
        return original(self, step)

    Measurements.trace = trace  # type: ignore[method-assign, assignment]
    path = Path(os.environ[OUT]) / f"{os.environ['RANK']}.json"
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        path.write_text(json.dumps(began_s))


def steps_s(began_s: list[tuple[int, float]]) -> list[float]:
    """CPU time of each step but the last, by its number; the job has none that is done again."""
    assert [step for step, _ in began_s] == list(range(len(began_s)))
    return [after - before for (_, before), (_, after) in pairwise(began_s)]


def extra_s(took_s: list[float]) -> list[float]:
    """Of each measured step, beyond the mean of its neighbours. Even ones are measured."""
    return [
        took_s[step] - (took_s[step - 1] + took_s[step + 1]) / 2
        for step in range(_WARM, len(took_s) - 1)
        if step % 2 == 0
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        os.environ[OUT] = made
        command = [sys.executable, "-m", "odyssey_megatron", "run", "--nproc-per-node", str(RANKS)]
        command += ["--preload", PRELOAD, str(Path(__file__).resolve())]
        command += (
            "--pipeline-model-parallel-size 2 --num-layers 8 --hidden-size 128 --ffn-hidden-size 384 "
            "--num-attention-heads 8 --num-query-groups 4 --seq-length 128 --global-batch-size 16 "
            f"--train-iters {args.steps} --odyssey-device cpu --odyssey-run-dir {folder / 'run'} "
            "--odyssey-profile-steps 2 --odyssey-trace-steps 0"
        ).split()
        carry_out(command, folder)
        took_s = [steps_s(json.loads((folder / f"{rank}.json").read_text())) for rank in range(RANKS)]
    extra = [one for of_rank in took_s for one in extra_s(of_rank)]
    step_s = statistics.median(one for of_rank in took_s for one in of_rank[_WARM:])
    every = OdysseyConfig().profile_steps
    result = {
        "ranks": RANKS,
        "step, CPU s": step_s,
        "measured step, more CPU s": summarize(extra),
        "measured is one step of": every,
    }
    bars = [at_most("measuring, of a step", statistics.median(extra) / every / step_s, BAR)]
    return finish(result, bars, as_json=args.json)


if __name__ == "__main__":
    if OUT in os.environ:
        as_a_rank()
    else:
        sys.exit(main())
