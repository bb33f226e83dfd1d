"""What a checkpoint costs training, waiting for it and with --async-save, in jobs of an unmodified Megatron-LM.

Three sides, which alternate: the same job without saves, with saves that all ranks wait for, and with saves beside
training; 4 CPU ranks as PP2 x DP2. The stall of a save is what Megatron-LM itself prints of it (its timer
``save-checkpoint``); what it costs in all, with what its writing takes from the steps and its completion, is the time
from the first iteration's line to the last one's, over that of the job without saves, for each save in between.

A disk is emulated that takes --file-s longer for each file than the one of --folder (by default the system's for
temporary files): 40 MB of a rank go to a page cache in no time, 40 GB to a shared file system do not. What is left of
a stall then is planning and copying. With 0 it is the disk at hand, and there may be nothing to win.

    MEGATRON_LM_PATH=... python tests/benchmarks/saves.py [--json] [--rounds 3] [--folder FOLDER] [--file-s 1]
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
from datetime import datetime
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(CHECKOUT), str(Path(__file__).parent)]

import own_job
from bars import at_most, finish, summarize
from overhead_megatron_lm import FLAGS

RANKS, STEPS, INTERVAL = 4, 16, 5
SAVES = (STEPS - 1) // INTERVAL
"""Between the first line and the last one: what is saved at the end is not among them."""
MODEL = (
    "--pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 512 --ffn-hidden-size 1536 --seq-length 64 "
    f"--max-position-embeddings 64 --global-batch-size 8 --train-iters {STEPS}"
)
SIDES = {
    "without": "",
    "waiting": f"--save-interval {INTERVAL}",
    "beside": f"--save-interval {INTERVAL} --async-save",
}
_LINE = re.compile(r"\[(\S+ [\d:.]+)\] iteration +\d+/")
_STALL = re.compile(r"save-checkpoint \.+: \([\d.]+, ([\d.]+)\)")


def train(checkout: Path, folder: Path, side: str, file_s: float) -> tuple[float, list[float], int]:
    """(seconds from the first line to the last, stalls in seconds, bytes of a checkpoint). Raises if the job fails."""
    saved = folder / "saved"
    command = [
        str(CHECKOUT / "tests" / "megatron_lm" / "slow.py"),
        str(file_s),
        str(checkout / "pretrain_gpt.py"),
    ]
    command += [*FLAGS.split(), *MODEL.split(), "--odyssey", "--odyssey-run-dir", str(folder / "run")]
    command += [*SIDES[side].split(), *(["--save", str(saved)] if SIDES[side] else [])]
    code, text = own_job.run(command, folder, ranks=RANKS)
    times = [datetime.fromisoformat(one).timestamp() for one in _LINE.findall(text)]
    stalls_s = [float(one) / 1e3 for one in _STALL.findall(text)][:SAVES]
    if code or len(times) != STEPS or len(stalls_s) != (SAVES if SIDES[side] else 0):
        raise RuntimeError(f"{command} ended with exit code {code}:\n{text[-3000:]}")
    files = saved.glob(f"iter_{INTERVAL:07d}/*")
    return times[-1] - times[0], stalls_s, sum(one.stat().st_size for one in files)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--file-s", type=float, default=1.0)
    args = parser.parse_args()
    if "MEGATRON_LM_PATH" not in os.environ:
        parser.error("set MEGATRON_LM_PATH to a checkout of Megatron-LM at core_v0.16.1")
    checkout, sides = Path(os.environ["MEGATRON_LM_PATH"]), list(SIDES)
    taken_s: dict[str, list[float]] = {side: [] for side in sides}
    stalls_s: dict[str, list[float]] = {side: [] for side in sides}
    size = 0
    for number in range(args.rounds):
        for side in sides if number % 2 == 0 else sides[::-1]:
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                one_s, stalled_s, wrote = train(checkout, Path(folder), side, args.file_s)
            taken_s[side].append(one_s)
            stalls_s[side] += stalled_s
            size = max(size, wrote)
        print(
            f"round {number + 1}: " + ", ".join(f"{side} {taken_s[side][-1]:.2f} s" for side in sides),
            file=sys.stderr,
            flush=True,
        )
    least_s = statistics.median(taken_s["without"])
    costs_s = {side: (statistics.median(taken_s[side]) - least_s) / SAVES for side in ("waiting", "beside")}
    stall_s = {side: statistics.median(stalls_s[side]) for side in ("waiting", "beside")}
    result = {
        "ranks": RANKS,
        "checkpoint_bytes": size,
        "file_s": args.file_s,
        "step_s": least_s / (STEPS - 1),
        **{f"stall_{side}_s": summarize(stalls_s[side]) for side in ("waiting", "beside")},
        **{f"cost_{side}_s": costs_s[side] for side in ("waiting", "beside")},
    }
    ratio = stall_s["beside"] / stall_s["waiting"]
    bars = [at_most("stall of a save beside training over that of one that is waited for", ratio, 0.5)]
    return finish(result, bars, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
