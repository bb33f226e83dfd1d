"""How long the interrupted step takes from the recovery on: gone on with, and done again.

Emulated accelerators (``tests/execute/emulated.py``): the real runtime, groups and messages, compute as sleeps, so two
cores will do. What sleeps and messages take the planner does not see (``emulated_jobs.uneven``): it plans the rest of
the step by what the ranks have measured until then. In each run one rank is killed when about 25, 50 or 75 % of a
step's microbatches have come back to it; then its microbatches go through the other holders of its layers. Timed is the
interrupted step on the slowest survivor, from the first instruction after the recovery to its commit. Both ways
alternate. ``runtime_s`` is what steps before the kill take beyond compute and links.

    python tests/benchmarks/resume.py [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from odyssey_megatron.config import INTERRUPTED_STEPS
from odyssey_megatron.metrics.recoveries import RecoveryRecord
from tests.benchmarks import emulated_jobs
from tests.benchmarks.bars import at_least, at_most, finish, summarize, taken
from tests.launch.jobserver import JobServer

MICROBATCHES, STEP, LAYER_S = 32, emulated_jobs.KNOWN_AT, 0.006
SHAPES = {
    # name: ranks, stages, the rank that is killed
    "PP4 x DP2": (8, 4, 4),
    "PP2 x DP4": (8, 2, 1),
}
SHARES = (0.25, 0.5, 0.75)


def shoot(
    server: JobServer, folder: Path, shape: str, share: float, way: str
) -> tuple[RecoveryRecord, list[float]]:
    """One job, one kill: its recovery, and the runtime's share of each step before, but the first."""
    ranks, stages, victim = SHAPES[shape]
    replicas = ranks // stages
    # The victim's microbatches are those of its pipeline, which take turns.
    microbatch = victim % replicas + replicas * int(share * MICROBATCHES / replicas)
    emulation, truth = emulated_jobs.emulation(
        emulated_jobs.layer(LAYER_S),
        emulated_jobs.layer(0.0),
        stages=stages,
        microbatches=MICROBATCHES,
        steps=STEP + 2,
        among=("reroute",),
    )
    inject = f"rank={victim},step={STEP},at=backward,microbatch={microbatch}"
    done = emulated_jobs.run(
        server, folder, emulation, truth, ranks, "--odyssey-interrupted-step", way, "--odyssey-inject", inject
    )
    emulated_jobs.measured_costs(folder)  # the recovery went by it
    (recovery,) = done.recoveries
    return recovery, emulated_jobs.runtimes_s(done.steps[1:STEP])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    found: dict[tuple[str, float, str], list[RecoveryRecord]] = {}
    runtimes_s: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        server = emulated_jobs.start_server()
        for number in range(args.rounds):
            for shape in SHAPES:
                for share in SHARES:
                    for way in INTERRUPTED_STEPS if number % 2 == 0 else reversed(INTERRUPTED_STEPS):
                        folder = Path(name) / f"{number}-{list(SHAPES).index(shape)}-{share}-{way}"
                        one, more_s = shoot(server, folder, shape, share, way)
                        found.setdefault((shape, share, way), []).append(one)
                        runtimes_s += more_s
                        print(f"{shape} {share} {way}: {one}", file=sys.stderr, flush=True)
        server.close()
    result: dict[str, object] = {"runtime_s": summarize(runtimes_s)}
    ratios = []
    for shape in SHAPES:
        for share in SHARES:
            times = {
                way: [taken(one.redo_s, "the interrupted step") for one in found[shape, share, way]]
                for way in INTERRUPTED_STEPS
            }
            ratio = statistics.median(times["resume"]) / statistics.median(times["redo"])
            ratios.append(ratio)
            result[f"{shape}, killed at {share:.0%}"] = {
                "ratio": ratio,
                **{f"{way}_s": summarize(seconds) for way, seconds in times.items()},
            }
    outcomes = [one.outcome == way for (_, _, way), rows in found.items() for one in rows]
    bars = [
        at_most("interrupted step, resume / redo (mean)", statistics.mean(ratios), 0.8),
        at_least("share of recoveries that went the way asked for", statistics.mean(outcomes), 1.0),
    ]
    return finish(result, bars, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
