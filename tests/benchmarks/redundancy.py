"""What it costs to have nothing to lose, and what it saves when something is lost.

The example's Llama on 8 CPU ranks, PP2 x DP4: optimizer state on every holder, and on two of four
(``--use-distributed-optimizer``). On 4 ranks, one pipeline: without and with shadows (``--odyssey-redundancy state``).
Runs alternate. Bytes are counted (weights, gradients, optimizer state of the fullest rank), step times and stalls are
measured on gloo and two cores: they show what is sent, not what it would take on a GPU's links.

    python tests/benchmarks/redundancy.py [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(CHECKOUT), str(Path(__file__).parent)]

from bars import at_least, at_most, finish, summarize

from odyssey_megatron.metrics.journal import read_journal
from odyssey_megatron.metrics.run import read_run
from tests.launch.jobserver import JobServer

MODEL = (
    "--num-layers 8 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 --num-query-groups 2 "
    "--seq-length 64 --micro-batch-size 1 --global-batch-size 16 --train-iters 12 --lr-warmup-iters 1 "
    "--odyssey-device cpu --odyssey-policy reroute"
).split()
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
WARM_UP_STEPS, KILLED_AT = 3, 6
MODES = {
    # name: ranks, stages, flags, the rank that is killed at the end, if that can be survived
    "DP4": (8, 2, [], 5),
    "DP4, optimizer state on two": (8, 2, ["--use-distributed-optimizer"], 5),
    "DP1": (4, 4, [], None),
    "DP1, shadows": (4, 4, ["--odyssey-redundancy", "state"], 2),
}


@dataclass
class Measured:
    step_s: list[float] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)
    state_bytes: int = 0


def run(server: JobServer, folder: Path, mode: str, into: Measured, *, kill: bool) -> None:
    """One job; its step times, or its stall, go ``into``."""
    ranks, stages, flags, victim = MODES[mode]
    script = CHECKOUT / "examples" / "llama" / "pretrain_llama.py"
    argv = ["--nproc-per-node", ranks, script, *MODEL, "--pipeline-model-parallel-size", stages, *flags]
    argv += ["--odyssey-run-dir", folder]
    if kill:
        argv += ["--odyssey-inject", f"rank={victim},step={KILLED_AT},at=backward"]
    job = server.run(argv, log=folder.with_suffix(".log"), env=ENVIRONMENT)
    if job.wait(120) != 0:
        raise RuntimeError(job.log()[-3000:])
    done = read_run(folder)
    if kill:
        (recovery,) = done.recoveries
        into.stall_s.append(recovery.stall_s)
        return
    into.step_s += [one.step_s for one in done.steps[WARM_UP_STEPS:] if one.step_s]
    ends = [event for event in read_journal(folder) if event["event"] == "weights"]
    into.state_bytes = max(event["state_bytes"] for event in ends)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    found = {mode: Measured() for mode in MODES}
    with tempfile.TemporaryDirectory() as name:
        server = JobServer.start(["tests.e2e.preload"])
        for number in range(args.rounds):
            for mode in MODES if number % 2 == 0 else reversed(MODES):
                for kill in (False, True) if MODES[mode][3] is not None else (False,):
                    folder = Path(name) / f"{number}-{list(MODES).index(mode)}-{kill}"
                    run(server, folder, mode, found[mode], kill=kill)
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
        server.close()
    result = {
        mode: {
            "state_bytes": one.state_bytes,
            "step_s": summarize(one.step_s),
            "stall_s": summarize(one.stall_s),
        }
        for mode, one in found.items()
    }

    def ratio(mode: str, base: str) -> tuple[float, float]:
        ours, theirs = found[mode], found[base]
        times = statistics.median(ours.step_s) / statistics.median(theirs.step_s)
        return ours.state_bytes / theirs.state_bytes, times

    shared, shadows = ratio("DP4, optimizer state on two", "DP4"), ratio("DP1, shadows", "DP1")
    result["of DP4: bytes, step time"], result["of DP1: bytes, step time"] = shared, shadows
    bars = [
        at_most("bytes with optimizer state on two of four / on all", shared[0], 0.85),
        at_least("kills survived", sum(len(one.stall_s) for one in found.values()), 3 * args.rounds),
        at_most("stall with shadows, s (median)", statistics.median(found["DP1, shadows"].stall_s), 0.5),
    ]
    return finish(result, bars, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
