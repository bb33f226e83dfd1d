"""What Odyssey costs an unmodified Megatron-LM job while nothing fails: its iteration time over plain Megatron-LM's.

Both sides are ``pretrain_gpt.py`` of the checkout MEGATRON_LM_PATH with the same flags, 8 CPU ranks as PP4 x DP2; one
has ``--odyssey``, the other nothing of Odyssey but the CPU device. All numbers are those that Megatron-LM itself
prints, from one line to the next: the journal, publishing and whatever else happens between two iterations is in them,
and all iterations but the first count. Runs alternate, so that whatever else the machine does falls on both. What gloo
on two cores can show and what it cannot: ``overhead.py``.

    MEGATRON_LM_PATH=... python tests/benchmarks/overhead_megatron_lm.py [--json] [--rounds 3] [--steps 12]
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(CHECKOUT), str(Path(__file__).parent)]

import own_job
from bars import at_most, finish, largest_difference, summarize

RANKS, BAR = 8, 1.03
PRINTED = 2e-3
"""Relative, of two norms above 0.5, of which three digits behind the point are printed."""
FLAGS = (
    "--pipeline-model-parallel-size 4 --num-layers 8 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 8 "
    "--group-query-attention --num-query-groups 4 --seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 "
    "--global-batch-size 16 --lr 1e-3 --min-lr 1e-4 --lr-warmup-iters 2 --lr-decay-style cosine --weight-decay 0.1 "
    "--clip-grad 1.0 --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --transformer-impl local "
    "--no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion "
    "--no-rope-fusion --mock-data --tokenizer-type NullTokenizer --vocab-size 383 --num-workers 0 --log-interval 1 "
    "--eval-interval 1000 --eval-iters 0 --distributed-backend gloo"
)
_LINE = re.compile(
    r"elapsed time per iteration \(ms\): ([.\d]+) \|.* lm loss: ([-+.E\d]+) \|.* grad norm: ([.\d]+) \|"
)


class Printed(NamedTuple):
    """Of an iteration."""

    taken_s: float
    loss: float
    grad_norm: float


def train(checkout: Path, steps: int, folder: Path, *, odyssey: bool) -> list[Printed]:
    """Raises with the end of the log if the job fails, or if a number of an iteration is none."""
    command = [] if odyssey else [str(CHECKOUT / "tests" / "megatron_lm" / "plain.py")]
    command += [str(checkout / "pretrain_gpt.py"), *FLAGS.split(), "--train-iters", str(steps)]
    command += ["--odyssey", "--odyssey-run-dir", str(folder / "run")] if odyssey else []
    code, text = own_job.run(command, folder, ranks=RANKS)
    lines = _LINE.findall(text)
    if code or len(lines) != steps:
        raise RuntimeError(
            f"{command} ended with exit code {code} after {len(lines)} of {steps} iterations:\n{text[-3000:]}"
        )
    return [Printed(float(time_ms) / 1e3, float(loss), float(norm)) for time_ms, loss, norm in lines]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    if "MEGATRON_LM_PATH" not in os.environ:
        parser.error("set MEGATRON_LM_PATH to a checkout of Megatron-LM at core_v0.16.1")
    checkout = Path(os.environ["MEGATRON_LM_PATH"])
    sides = ("odyssey", "megatron")
    times: dict[str, list[float]] = {side: [] for side in sides}
    means: dict[str, list[float]] = {side: [] for side in sides}
    printed: dict[str, list[Printed]] = {side: [] for side in sides}
    for number in range(args.rounds):
        # Each second round the other way round: a slow drift of the machine cancels.
        for side in sides if number % 2 == 0 else sides[::-1]:
            with tempfile.TemporaryDirectory() as folder:
                lines = train(checkout, args.steps, Path(folder), odyssey=side == "odyssey")
            printed[side] += lines
            times[side] += (step_s := [one.taken_s for one in lines[1:]])
            means[side].append(statistics.mean(step_s))
        print(f"round {number + 1}: mean iteration "
              + ", ".join(f"{n} {m[-1]:.4f} s" for n, m in means.items()), file=sys.stderr, flush=True)  # fmt: skip
    result = {
        "ranks": RANKS,
        "layout": "PP4 x DP2",
        "odyssey_iteration_s": summarize(times["odyssey"]),
        "megatron_lm_iteration_s": summarize(times["megatron"]),
        "ratio_of_each_round": [a / b for a, b in zip(means["odyssey"], means["megatron"], strict=True)],
    }
    ratio = sum(times["odyssey"]) / sum(times["megatron"])
    loss_gap = largest_difference(*([one.loss for one in lines] for lines in printed.values()))
    norm_gap = largest_difference(*([one.grad_norm for one in lines] for lines in printed.values()))
    bars = [
        at_most("overhead, all iterations", ratio, BAR),
        at_most("largest relative loss difference (float32)", loss_gap, 1e-5),
        at_most("largest relative difference of gradient norms, as printed", norm_gap, PRINTED),
    ]
    return finish(result, bars, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
