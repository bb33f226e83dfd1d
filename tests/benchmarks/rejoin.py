"""How long a job stands still when a lost rank comes back.

Emulated accelerators (``tests/execute/emulated.py``): the real runtime, groups and messages, compute as sleeps, layers
with real bytes that are really sent. What sleeps and messages take the planner does not see (``emulated_jobs.uneven``):
it goes by what the ranks measure. A rank is killed, its agent starts it anew (``--odyssey-respawn``), it is filled
while the others train, and gets its work back between two steps. ``excess`` of a step is the wall clock from the commit
before it to its own, over what its plan takes by the simulator at the measured costs; given are the greatest among all
steps from the kill's recovery to the second one of the full layout, and the greatest of the undisturbed ones before the
kill. ``runtime_s`` is what the undisturbed ones take beyond compute and links, and ``error`` how far the simulator is
off what those take.

    python tests/benchmarks/rejoin.py [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from odyssey_megatron.codec import from_jsonable
from odyssey_megatron.plan.checking.simulate import simulate
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.schedule import schedule_from_text
from tests.benchmarks import emulated_jobs
from tests.benchmarks.bars import at_least, at_most, finish, summarize
from tests.benchmarks.emulated_jobs import measured_costs, runtimes_s
from tests.launch.jobserver import JobServer, events

RANKS, STAGES, STEP, STEPS = 8, 4, emulated_jobs.KNOWN_AT, 16
VICTIMS = (5, 0, 7)
LAYER_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Return:
    """One rank that was lost and came back."""

    rank: int
    step_s: float
    """Undisturbed, by the simulator at the measured costs."""
    error: float
    """How far that is off what compute and links took, as a share of it; median of the undisturbed steps."""
    runtime_s: float
    """What the runtime added to those; median."""
    undisturbed: float
    """Greatest excess of a step before the kill, as a share of a step."""
    excess: float
    """... of a step while the rank came back."""
    late_s: float
    """In that step, how far the latest instruction was behind its time: a machine with other work makes it late."""
    stall_s: float
    """Greatest of the switches, as the report gives it."""
    away_s: float
    """From the kill to the first step of the full layout."""


def come_back(server: JobServer, folder: Path, victim: int) -> Return:
    """One job, one kill."""
    emulation, truth = emulated_jobs.emulation(
        emulated_jobs.layer(0.018, state_bytes=LAYER_BYTES),
        emulated_jobs.layer(0.0, state_bytes=LAYER_BYTES),
        stages=STAGES,
        microbatches=16,  # a step takes about two seconds
        steps=STEPS,
        two_speed=True,
        layer_bytes=LAYER_BYTES,
    )
    inject = f"rank={victim},step={STEP},at=backward"
    run = emulated_jobs.run(
        server, folder, emulation, truth, RANKS, "--odyssey-respawn", 1, "--odyssey-inject", inject
    )
    costs, plans = measured_costs(folder), {one["generation"]: one for one in events(folder, "decision")}
    predicted_s = {
        generation: simulate(
            schedule_from_text(one["schedule"]), from_jsonable(Layout, one["layout"]), costs
        ).step_s
        for generation, one in plans.items()
    }
    if not run.switches or plans[run.steps[-1].generation]["plan_hash"] != plans[1]["plan_hash"]:
        raise RuntimeError(
            f"rank {victim} did not come back:\n{folder.with_suffix('.log').read_text()[-3000:]}"
        )
    home = run.switches[-1].step
    at_s: dict[int, float] = {}
    for event in events(folder, "step_committed"):  # once more if the rank that wrote it down has died
        at_s[event["step"]] = min(event["t_s"], at_s.get(event["step"], math.inf))
    excess = {
        after.step: at_s[after.step] - at_s[before.step] - predicted_s[after.generation]
        for before, after in pairwise(run.steps)
    }
    (recovery,) = run.recoveries
    (killed,) = events(folder, "injected")
    # Not the last one before the kill: if rank 0 dies, others write its commit down once more, and later.
    undisturbed = run.steps[1 : STEP - 1]
    worst = max(range(recovery.step + 1, home + 2), key=excess.__getitem__)
    late_s = {one.step: one.losses["late_s"] for one in run.steps}
    modelled_s = statistics.median(one.losses["modelled_s"] for one in undisturbed)
    return Return(
        rank=victim,
        step_s=predicted_s[1],
        error=abs(predicted_s[1] / modelled_s - 1),
        runtime_s=statistics.median(runtimes_s(undisturbed)),
        undisturbed=max(excess[one.step] for one in undisturbed) / predicted_s[1],
        excess=excess[worst] / predicted_s[1],
        late_s=late_s[worst],
        stall_s=max(one.stall_s for one in run.switches),
        away_s=at_s[home - 1] - killed["t_s"],
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    found: list[Return] = []
    server = emulated_jobs.start_server()
    try:
        with tempfile.TemporaryDirectory() as name:
            for number in range(args.rounds):
                for victim in VICTIMS:
                    found.append(come_back(server, Path(name) / f"{number}-{victim}", victim))
                    print(found[-1], file=sys.stderr, flush=True)
    finally:
        server.close()
    result = {
        "step_s": found[0].step_s,
        "error": summarize([one.error for one in found]),
        "runtime_s": summarize([one.runtime_s for one in found]),
        "undisturbed excess, share of a step": summarize([one.undisturbed for one in found]),
        "excess while a rank comes back, share of a step": summarize([one.excess for one in found]),
        "late_s of that step": summarize([one.late_s for one in found]),
        "stall_s": summarize([one.stall_s for one in found]),
        "away_s": summarize([one.away_s for one in found]),
    }
    bars = [
        at_least("ranks that came back", len(found), len(VICTIMS) * args.rounds),
        at_most("longest stop, share of a step", max(one.excess for one in found), 0.1),
    ]
    return finish(result, bars, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
