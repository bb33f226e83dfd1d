"""How well slow workers are found, named and told apart from dear stages and long sequences.

    python tests/benchmarks/detector.py --traces FOLDER --json

``FOLDER`` has ByteDance's published traces (``trace-{AR,SE,ST}.parquet``, ``data/`` of
github.com/ByteDance-Seed/StragglerAnalysis; reading them takes pandas and pyarrow): AR is a job with one slow worker,
SE one with uneven sequences, ST one with an uneven last stage. A factor's truth there is the time that the worker's
instructions took in sum, beside the mean of its stage's other workers.

The simulated jobs (``tests/diagnosis/simulated.py``) have 2 to 4 replicas of 1 to 4 stages, documents packed into
microbatches of 8K, 16K or 32K tokens, and the jitter of the healthy workers in AR. In each somebody becomes slower by
10 % to three times. It is looked at as a job would, with what has been measured by then: before (any verdict is a false
alarm), and after three steps of it (the verdict must be there, and name the worker). ``predicted`` is the mean absolute
error of a microbatch's time in a stage, and of a step's by 1F1B, on healthy workers, by costs and speeds fitted to half
of the steps, for the other half. The jitter alone is 1.17 % of a microbatch: ResiHP's 1.2 % leaves little to the model.

``links`` are jobs of 2 to 4 replicas of 5 to 8 stages on nodes of four workers, whose messages jitter by 6 %, one of
twenty by up to three times; of three the fastest counts. A link, all links of a worker, or those of a node with others
become slower by twice to ten times, and are looked at in the same way: alone these links must be called slow, and the
one cause named.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from odyssey_megatron.diagnosis.fit import fit
from odyssey_megatron.diagnosis.links import LinkVerdict, diagnose_links
from odyssey_megatron.diagnosis.timings import TimedWork, Timing, Timings
from odyssey_megatron.diagnosis.verdicts import diagnose
from tests.benchmarks.bars import Bar, at_least, at_most, exactly, finish
from tests.diagnosis.simulated import Simulated, SimulatedLinks, until

_SIZES = (8192, 16384, 32768)
_STEPS = 24
_CAUSES = {"AR": "slow worker", "SE": "uneven sequences", "ST": "uneven stage"}


def published(path: Path) -> tuple[Timings, dict[int, float]]:
    """The timings of a trace, and of each worker how many times what its stage's others take it took."""
    import pandas

    found = pandas.read_parquet(path)
    found = found[found.optype.isin(["forward-compute", "backward-compute"])]
    stages = found.stage.nunique()
    columns = (found.step, found.dp_rank, found.stage, found.optype.astype(str), found.duration, found.seq_id)
    rows = [
        Timing(
            step=int(step),
            worker=int(replica) * stages + int(stage),
            piece=TimedWork(int(stage), int(stage) + 1, kind),
            seconds=float(seconds),
            microbatch=int(microbatch),
        )
        for step, replica, stage, kind, seconds, microbatch in zip(*columns, strict=True)
    ]
    sums = found.groupby(["dp_rank", "stage"]).duration.sum()
    factors = {}
    for (replica, stage), seconds in sums.items():
        others = [sums[other, stage] for other in sums.index.levels[0] if other != replica]
        factors[int(replica) * stages + int(stage)] = float(seconds) / float(np.mean(others))
    return Timings.of(rows), factors


def of_traces(folder: Path) -> tuple[dict[str, Any], list[Bar]]:
    said, bars = {}, []
    for name, cause in _CAUSES.items():
        timings, factors = published(folder / f"trace-{name}.parquet")
        found = diagnose(timings)
        said[name] = [
            f"{one.kind} {one.worker if one.worker >= 0 else ''}: {one.evidence}" for one in found.verdicts
        ]
        bars.append(exactly(f"{name}: {cause} is found", cause in {one.kind for one in found.verdicts}, 1))
        if name == "AR":
            guilty = max(factors, key=lambda worker: factors[worker])
            bars.append(exactly("AR: exactly the slow worker", list(found.slow) == [guilty], 1))
            off = abs(found.slow.get(guilty, 1.0) * factors[guilty] - 1)
            bars.append(at_most("AR: error of its factor", off, 0.05))
        else:
            bars.append(exactly(f"{name}: workers called slow", len(found.slow), 0))
    return said, bars


def of_jobs(count: int, seed: int) -> tuple[dict[str, Any], list[Bar]]:
    """Of each size ``count`` jobs."""
    rng = random.Random(seed)
    said, bars = {}, []
    for tokens in _SIZES:
        alarms = healthy_steps = found = named = 0
        factors_off, predictions_off = [], []
        for _ in range(count):
            replicas, stages = rng.randint(2, 4), rng.randint(1, 4)
            begins = rng.randint(10, _STEPS - 3)
            factor = rng.choice((1.1, 1.2, 1.5, 2.0, 3.0))
            who = rng.randrange(replicas * stages)
            job = Simulated(
                replicas=replicas,
                stages=stages,
                steps=begins + 3,
                tokens=tokens,
                slow={who: (factor, begins, _STEPS)},
                seed=rng.randrange(2**32),
            )
            timings = job.timings()
            before = diagnose(until(timings, begins - 1))
            alarms += len(before.verdicts)
            healthy_steps += begins
            slow = diagnose(timings).slow
            found += bool(slow)
            named += list(slow) == [who]
            if who in slow:
                factors_off.append(abs(slow[who] * factor - 1))
            predictions_off.append(_prediction_errors(timings, begins))
        of_microbatch, of_step = (float(one) for one in np.mean(predictions_off, axis=0))
        said[f"{tokens // 1024}K"] = {
            "jobs": count,
            "healthy steps": healthy_steps,
            "false alarms": alarms,
            "found within 3 steps": found / count,
            "named": named / count,
            "error of the factor, mean": float(np.mean(factors_off)),
            "predicted microbatch, mean absolute error": of_microbatch,
            "predicted step, mean absolute error": of_step,
        }
        size = f"{tokens // 1024}K"
        bars += [
            exactly(f"{size}: false alarms in {healthy_steps} steps", alarms, 0),
            at_least(f"{size}: slowdowns found within 3 steps", found / count, 0.99),
            at_least(f"{size}: the right worker named", named / count, 0.99),
            at_most(f"{size}: predicted microbatch, mean absolute error", of_microbatch, 0.012),
            at_most(f"{size}: predicted step, mean absolute error", of_step, 0.028),
        ]
    return said, bars


def of_links(count: int, seed: int) -> tuple[dict[str, Any], list[Bar]]:
    """Jobs in which a link, or the network of a worker or of a node, becomes slow."""
    rng, bars = random.Random(seed), []
    alarms = healthy_steps = 0
    found, named, factors_off = dict[str, int](), dict[str, int](), list[float]()
    causes = ("link", "worker", "node")
    for number in range(count):
        cause, begins = causes[number % 3], rng.randint(10, _STEPS - 3)
        factor = rng.choice((2.0, 3.0, 5.0, 10.0))
        size = {"replicas": rng.randint(2, 4), "stages": rng.randint(5, 8), "per_node": 4}
        job = SimulatedLinks(**size)
        inner = [worker for worker in job.nodes if len(job.of(worker=worker)) > 2]
        whose = {"link": {}, "worker": {"worker": rng.choice(inner)}, "node": {"node": 1}}[cause]
        links = job.of(**whose) if whose else [rng.choice(job.links)]
        slow, seeded = dict.fromkeys(links, factor), rng.randrange(2**32)
        job = SimulatedLinks(**size, slow=slow, first=begins, steps=begins + 3, seed=seeded)
        timings = job.timings()
        before = diagnose_links([one for one in timings if one.step < begins], job.nodes)
        alarms += len(before.verdicts)
        healthy_steps += begins
        after = diagnose_links(timings, job.nodes)
        found[cause] = found.get(cause, 0) + (after.slow.keys() >= set(links))
        named[cause] = named.get(cause, 0) + _is_right(after.verdicts, cause, links, whose)
        factors_off += [abs(after.slow[link] / factor - 1) for link in links if link in after.slow]
    said = {
        "jobs": count,
        "healthy steps": healthy_steps,
        "false alarms": alarms,
        "found within 3 steps": {cause: 3 * found[cause] / count for cause in causes},
        "named": {cause: 3 * named[cause] / count for cause in causes},
        "error of the factor, median": float(np.median(factors_off)),
    }
    bars.append(exactly(f"links: false alarms in {healthy_steps} steps", alarms, 0))
    for cause in causes:
        bars += [
            at_least(
                f"links: all slow ones of a {cause} found within 3 steps", 3 * found[cause] / count, 0.99
            ),
            at_least(f"links: the right {cause} named", 3 * named[cause] / count, 0.99),
        ]
    return said, bars


def _is_right(
    verdicts: Sequence[LinkVerdict], cause: str, links: Sequence[tuple[int, int]], whose: Mapping[str, int]
) -> bool:
    """That one cause, and no other."""
    if len(verdicts) != 1 or set(verdicts[0].links) != set(links):
        return False
    if cause == "node":
        return verdicts[0].nodes == (whose["node"],)
    return set(verdicts[0].workers) == ({whose["worker"]} if cause == "worker" else set(links[0]))


def _prediction_errors(timings: Timings, begins: int) -> tuple[float, float]:
    """Mean errors of microbatches through a stage, forward and backward, and of steps, in the second half of the
    healthy steps, by what has been fitted to the first one.
    """
    half = begins // 2
    known = fit(until(timings, half))
    alpha, beta = (np.array([known.costs[piece][at] for piece in timings.pieces]) for at in (0, 1))
    speed = np.array([known.speeds[worker] for worker in timings.workers])
    later = (timings.step > half) & (timings.step < begins)
    piece, worker = timings.piece[later], timings.worker[later]
    costs_s = alpha[piece] * timings.tokens[later] + beta[piece] * timings.squares[later]
    # As ``Simulated`` has them: step, replica, microbatch, stage, forward and backward.
    stages = len(timings.pieces) // 2
    shape = (begins - 1 - half, len(timings.workers) // stages, -1, stages, 2)
    predicted, happened = (one.reshape(shape) for one in (costs_s / speed[worker], timings.seconds[later]))
    of_microbatch = predicted.sum(-1) / happened.sum(-1)
    of_step = _steps_s(predicted) / _steps_s(happened)
    return tuple(float(np.mean(np.abs(one - 1))) for one in (of_microbatch, of_step))


def _steps_s(seconds: np.ndarray) -> np.ndarray:
    """How long steps take whose instructions take ``seconds`` (steps, replicas, microbatches, stages, 2): each pipeline
    runs 1F1B without communication, and the slowest one ends the step.
    """
    steps, replicas, microbatches, stages, _ = seconds.shape
    orders = [_one_f_one_b(stage, stages, microbatches) for stage in range(stages)]
    clock = np.zeros((stages, steps, replicas))
    ends = np.full((microbatches, stages, 2, steps, replicas), np.nan)
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                microbatch, kind = order[0]
                if kind:
                    needs = (microbatch, stage, 0) if stage == stages - 1 else (microbatch, stage + 1, 1)
                else:
                    needs = (microbatch, stage - 1, 0) if stage else None
                ready = clock[stage] if needs is None else np.maximum(clock[stage], ends[needs])
                if np.isnan(ready).any():
                    break
                clock[stage] = ready + seconds[:, :, microbatch, stage, kind]
                ends[microbatch, stage, kind] = clock[stage]
                order.pop(0)
    return clock.max(axis=(0, 2))


def _one_f_one_b(stage: int, stages: int, microbatches: int) -> list[tuple[int, int]]:
    """(microbatch, 0 for forward or 1 for backward) in Megatron's order."""
    ahead = min(stages - stage - 1, microbatches)
    order = [(one, 0) for one in range(ahead)]
    for one in range(ahead, microbatches):
        order += [(one, 0), (one - ahead, 1)]
    return order + [(one, 1) for one in range(microbatches - ahead, microbatches)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--traces", type=Path, help="folder of the published traces; without it, they are left out"
    )
    parser.add_argument("--jobs", type=int, default=700, help="simulated ones of each size")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    traces, bars = of_traces(args.traces) if args.traces else ({}, [])
    jobs, more = of_jobs(args.jobs, args.seed) if args.jobs else ({}, [])
    links, of_them = of_links(3 * args.jobs, args.seed) if args.jobs else ({}, [])
    measured = {"seed": args.seed, "traces": traces, "jobs": jobs, "links": links}
    return finish(measured, [*bars, *more, *of_them], as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
