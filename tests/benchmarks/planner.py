"""How long deciding takes in a running job, up to 16,384 GPUs, and what one rank has to read of it.

    python tests/benchmarks/planner.py --json

The real coordinator with its store, in a process of its own; the ranks are played by this one. Llama-2 on H100s by its
presets, a worker is one tensor-parallel cell, 2 x PP microbatches a pipeline. All ranks publish what they have measured
(layer times with 2 % of noise, other ones each time), go on until the planner has worked out beside the job what
decisions by such costs will look up, and then some die.

``cpu_ms`` is the CPU of the coordinator's thread from the last death in its queue to the generation that is ready to be
sent: measured costs, two-speed, hash, serialisation and seals included. A core is not always as fast: others use its
second hardware thread, and its clock changes, here by up to four times. So a fixed loop is timed before and behind each
decision, and ``decision_ms``, which has the bar, is ``cpu_ms`` on a core on which that loop takes 4 ms, as it does here
when nobody else uses the machine; ``loop_ms`` is what it took, and ``wall_ms`` the time by the clock. Of ``--repeats``
incidents of a kind, each of other workers, the one with the longest ``decision_ms`` counts. Where the loop takes a
quarter longer behind than before, or the reverse (``unsteady``), the incident is measured again, three times at most;
where it still does, the bar ``steady`` is missed. Of whatever else has a bar, the largest of all repeats counts.

``rank_bytes`` and ``rank_ms``: what each rank reads, and its CPU until it has its program and the groups that it is in,
on such a core, too. ``rest_bytes`` and ``rest_ms``: the same of a step that goes on when each has done half of it: what
a rank exchanges with others, and its CPU until it has the rest of its program, without the time on the network.
``rehearsed_s``: so long after costs were known all was worked out; a failure before that takes longer to decide on.
``coordinator_mb`` is that process at its largest, of which torch takes most (``torch_mb``: once it is imported, before
there is a job).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import multiprocessing
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.cluster.cells import Cells
from odyssey_megatron.cluster.events import RankDied
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.launch.coordinator import coordinator as coordinator_module
from odyssey_megatron.launch.coordinator.coordinator import Coordinator
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire import generations
from odyssey_megatron.launch.wire.control import Control, EventReader
from odyssey_megatron.launch.wire.local_rendezvous import LocalRendezvous
from odyssey_megatron.metrics.journal import Journal
from odyssey_megatron.plan.placing.groups import group_members
from odyssey_megatron.plan.scheduling.smaller import StepPlan
from odyssey_megatron.plan.sending.generation import Generation
from tests.benchmarks.bars import Bar, at_most, finish
from tests.benchmarks.going_on import go_on
from tests.benchmarks.played_ranks import GPUS_A_NODE, MOST_S, NUMBERS, Ranks, job_of, lost_workers
from tests.benchmarks.rehearsed_planner import RehearsedPlanner

CLUSTERS = (
    ("llama2-7b", 32, 1, 8, 20.0, 350),
    ("llama2-13b", 32, 8, 2, 20.0, 350),
    ("llama2-13b", 256, 1, 16, 60.0, 350),
    ("llama2-70b", 256, 8, 16, 60.0, 350),
    ("llama2-70b", 16384, 8, 16, 500.0, 600),
)
"""(model, GPUs, tensor parallel, pipeline parallel, bar in milliseconds, bar of the coordinator's memory in MB)."""
LAYOUTS = {256: ("megatron", "auto")}
"""By GPUs, what ``--odyssey-layout`` is: with ``auto`` routes visit these workers twice. Else ``megatron``."""
DEAD = (1, 8, 64, "node")
"""So many workers all over the job, or all of one node, where it has several and the job survives that. Other ones in
each repeat.
"""
MORE_DEAD: dict[int, tuple[int | str, ...]] = {
    32: ("again", "slow", "link"),
    256: (12, 20, 24, 40, "again", "slow", "link", "smaller"),
    16384: ("slow", "link", "smaller"),
}
"""By GPUs, incidents besides. 24 and 40 dead are as many as whole nodes have, for which decisions are rehearsed; 12 and
20 are not. ``again``: a second worker dies as soon as there is a plan without the first one, long before what decisions
look up has been worked out for that plan. ``slow``: a worker dies as soon as a better plan is on offer because another
one is slow, long before what decisions look up has been worked out for that one's speed. ``link``: so beside a slow
link between two workers. ``smaller``: a cell dies as soon as another one has come back with half of its ranks.
"""
TIGHT_DEAD = (1, 8)
"""Where memory binds (``job_of``), so many of up to 256 workers of one GPU each."""
COPIES = (0, 2)
"""Of a layer's optimizer state: one on every holder, or those of a distributed optimizer."""
COALESCE_S = 1.0
"""So long the deaths of one incident may take to be told, by a process that plays all ranks: one decision sees all."""
TAKEN_IN_S = 2.0
"""For what was published a second time: costs are as good as the same."""
LOOP_MS = 4.0
"""What :func:`loop_ms` takes on a core of a server (AMD EPYC, CPython 3.11) that nobody else uses."""
UNSTEADY = 1.25
"""Where the loop takes so many times as long behind a decision as before it, or the reverse, neither says how fast the
core was meanwhile."""
TRIES = 3
TOKEN = "benchmark"


class Clocks:
    """The thread's clocks between a death taken from the queue and the generation that is put."""

    def __init__(self) -> None:
        self.began: tuple[float, float] | None = None
        self.taken: tuple[float, float] | None = None
        self.number = 0
        """Of that generation."""

    def now(self) -> tuple[float, float]:
        return time.thread_time(), time.perf_counter()


class TimedReader(EventReader):
    clocks: Clocks

    def take(self, timeout_s: float) -> list[Any]:
        found = super().take(timeout_s)
        if any(isinstance(one, RankDied) for one in found) and self.clocks.began is None:
            self.clocks.began = self.clocks.now()
        return found


class TimedControl(Control):
    """Ready to send: the value is sealed, and goes to the store next."""

    clocks: Clocks

    def put(self, key: str, text: str) -> None:
        if key.startswith("generation/") and self.clocks.began is not None and self.clocks.taken is None:
            self.seal(key, text)
            self.clocks.taken, self.clocks.number = self.clocks.now(), int(key.split("/")[1])
        super().put(key, text)


def coordinate(pipe: Connection, config: OdysseyConfig, nodes: dict[int, int], folder: str) -> None:
    """The coordinator's process: its thread, and the store that its agent hosts."""
    rendezvous = LocalRendezvous("benchmark")
    address = rendezvous.next_rendezvous().bootstrap_store_info
    clocks, planner, torch_mb = Clocks(), RehearsedPlanner(config), largest_mb()

    def connect(kind: type[Control]) -> Control:
        return kind.connect(address.master_addr, address.master_port, TOKEN)

    coordinator_module._COALESCE_S = COALESCE_S
    control = connect(TimedControl)
    reader = TimedReader(connect(Control))
    control.clocks = reader.clocks = clocks
    for node in set(nodes.values()):
        control.put(keys.lease_key(node), "0")
    coordinator = Coordinator(
        control=control,
        events=reader,
        config=config,
        nodes=nodes,
        planner=planner,
        journal=Journal(Path(folder), source="agent0"),
        say=lambda text: None,
    )
    threading.Thread(target=coordinator.run, daemon=True).start()
    pipe.send((address.master_addr, address.master_port))
    assert pipe.recv() == "rehearsed"
    until(lambda: planner.rehearsed_s < math.inf)
    pipe.send(planner.rehearsed_s - planner.known_s)
    while (asked := pipe.recv()) != "clocks":
        if isinstance(asked, tuple):
            planner.link = asked
            until(lambda: coordinator._job.cluster.slow_links)
        else:
            planner.slow = asked
            until(lambda worker=asked: coordinator._job.cluster.workers[worker].pace < 1.0)
        pipe.send("slow")
    clocks.began = clocks.taken = None
    before_ms = loop_ms()
    pipe.send("ready")
    until(lambda: clocks.taken is not None)
    behind_ms = loop_ms()
    assert clocks.began is not None
    assert clocks.taken is not None
    times_ms = [1e3 * (then - first) for first, then in zip(clocks.began, clocks.taken, strict=True)]
    loops_ms = sorted((before_ms, behind_ms))
    pipe.send((clocks.number, *times_ms, sum(loops_ms) / 2, loops_ms[1] / loops_ms[0]))
    assert pipe.recv() == "end"
    pipe.send((torch_mb, largest_mb()))


def until(found: Callable[[], object]) -> None:
    """Raises TimeoutError, which ends this process, and the benchmark with it."""
    deadline_s = time.monotonic() + MOST_S
    while not found():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the coordinator has not come to that in {MOST_S} s")
        time.sleep(0.005)


def loop_ms() -> float:
    """CPU of a fixed loop of what decisions mostly do: the median of five."""

    def once() -> float:
        began_s, found = time.thread_time(), dict[int, list[int]]()
        for number in range(60_000):
            found.setdefault(number * 7 % 4099, []).append(number)
        return 1e3 * (time.thread_time() - began_s)

    return statistics.median(once() for _ in range(5))


def largest_mb() -> float:
    """Of this process, so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def occurs(dead: int | str, gpus: int, tp: int, pp: int) -> bool:
    """Whether such an incident is measured in this cluster: a quarter of all workers at most, or a node of several
    workers that has not all replicas of a stage.
    """
    if dead == "node":
        return tp == 1 and gpus // pp > GPUS_A_NODE
    if dead == "smaller" and tp == 1:
        return False
    return int(NUMBERS.get(dead, dead)) * 4 <= gpus // tp


class CountingControl(Control):
    """How much a rank reads."""

    read_bytes = 0

    def unseal(self, key: str, value: bytes) -> str:
        self.read_bytes += len(value)
        return super().unseal(key, value)


def read(number: int, rank: int, tp: int, control: CountingControl) -> tuple[Generation, int, float]:
    """The generation as ``rank`` has it, the bytes, and the milliseconds of CPU until it has its program and groups."""
    control.read_bytes = 0
    gc.collect()  # of all ranks that this process plays
    cell, began_s = Cell(rank=rank, size=tp), time.thread_time()
    text = control.get(keys.generation_key(number)).removeprefix(keys.OFFER).removeprefix(keys.AGAIN)
    generation = generations.read(text, rank, control)
    assert isinstance(generation, Generation)
    idle = cell.worker not in generation.plan.layout.workers
    assert idle or generation.plan.program(cell.worker)
    assert group_members(generation.plan, generation.members, Cells(cell), tagged=False)
    return generation, control.read_bytes, 1e3 * (time.thread_time() - began_s)


def read_by_some(
    number: int, workers: Sequence[int], tp: int, control: CountingControl
) -> tuple[list[tuple[Generation, int, float]], list[tuple[int, float]]]:
    """:func:`read` for some of ``workers``, and :func:`go_on` for the same ones."""
    some = workers[:: max(1, len(workers) // 16)]
    several = [read(number, worker * tp, tp, control) for worker in some]
    plans = [
        StepPlan(layout=one.plan.layout, program=one.plan.program(worker))
        for worker, (one, _, _) in zip(some, several, strict=True)
    ]
    cells = [Cell(rank=worker * tp, size=tp) for worker in some]
    return several, list(map(go_on, plans, cells))


class Incident(NamedTuple):
    model: str
    gpus: int
    tp: int
    pp: int
    copies: int
    dead: int | str
    layout: str
    is_tight: bool


def before_it(
    dead: int | str,
    lost: list[int],
    ranks: Ranks,
    pipe: Connection,
    generation: Callable[[int], Generation],
) -> None:
    """Bring about what comes before the incident, and take out of ``lost`` whom that concerns; ``generation`` is what a
    rank reads of the one with a number.
    """
    if dead == "again":
        ranks.lose_one(lost)
    if dead in ("slow", "link"):
        pipe.send(lost.pop() if dead == "slow" else ranks.a_link)
        assert pipe.recv() == "slow"
    if dead == "smaller":
        ranks.come_back_smaller(lost.pop(), generation)


def measure(incident: Incident, repeat: int) -> dict[str, Any]:
    """One job and one incident."""
    model, gpus, tp, pp, copies, dead, layout, is_tight = incident
    job, profile = job_of(model, gpus, tp, pp, copies, is_tight=is_tight)
    folder = tempfile.mkdtemp()
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    nodes = {rank: rank // GPUS_A_NODE for rank in range(gpus)}
    rebalance = "auto" if dead in ("slow", "link") else "off"
    config = OdysseyConfig(node_lease_s=1e5, run_dir=folder, layout=layout, rebalance=rebalance)
    process = context.Process(target=coordinate, args=(theirs, config, nodes, folder), daemon=True)
    process.start()
    try:
        host, port = pipe.recv()
        ranks = Ranks(job, profile, Control.connect(host, port, TOKEN), gpus)
        ranks.start()
        pipe.send("rehearsed")
        rehearsed_s = pipe.recv()
        ranks.publish()
        time.sleep(TAKEN_IN_S)
        reader = CountingControl.connect(host, port, TOKEN)
        lost = lost_workers(read(1, 0, tp, reader)[0].plan.layout, dead, repeat)
        gone = {*lost}
        before_it(dead, lost, ranks, pipe, lambda number: read(number, 0, tp, reader)[0])
        pipe.send("clocks")
        assert pipe.recv() == "ready"
        ranks.die(lost)
        number, cpu_ms, wall_ms, core_ms, unsteady = pipe.recv()
        workers = [one for one in range(gpus // tp) if one not in gone]
        several, rests = read_by_some(number, workers, tp, reader)
        assert {rank // tp for rank in several[0][0].dead} == {*lost}, (
            "another generation than the recovery's"
        )
        reading_ms = loop_ms()
        pipe.send("end")
        torch_mb, most_mb = pipe.recv()
    finally:
        process.kill()
        process.join()
    return {
        "gpus": gpus,
        "tp": tp,
        "pp": pp,
        "layout": layout,
        "memory": "tight" if is_tight else "80 GB",
        "optimizer_copies": copies,
        "of_a_node": dead == "node",
        "decision_ms": round(cpu_ms * LOOP_MS / core_ms, 1),
        "cpu_ms": round(cpu_ms, 1),
        "wall_ms": round(wall_ms - 1e3 * COALESCE_S, 1),
        "loop_ms": round(core_ms, 2),
        "unsteady": round(unsteady, 2),
        "rehearsed_s": round(rehearsed_s, 1),
        "torch_mb": round(torch_mb),
        "coordinator_mb": round(most_mb),
        **what_ranks_read(several, rests, LOOP_MS / reading_ms, tp),
    }


def what_ranks_read(
    several: Sequence[tuple[Generation, int, float]],
    rests: Sequence[tuple[int, float]],
    speed: float,
    tp: int,
) -> dict[str, Any]:
    """The columns of :func:`read_by_some`; ``speed``: that of the core, beside one of a server."""
    generation = several[0][0]
    return {
        "dead": len(generation.dead) // tp,
        "policy": generation.plan.policy,
        "rank_bytes": max(size for _, size, _ in several),
        "rank_ms": round(max(ms for _, _, ms in several) * speed, 1),
        "rest_bytes": max(size for size, _ in rests),
        "rest_ms": round(max(ms for _, ms in rests) * speed, 1),
        "blocks": len(generation.plan.layout.blocks()),
    }


def steady(incident: Incident, repeat: int) -> dict[str, Any]:
    """:func:`measure` of it, again where the core's speed changed meanwhile; at last the steadiest."""
    found: list[dict[str, Any]] = []
    while len(found) < TRIES:
        found.append(measure(incident, repeat))
        if found[-1]["unsteady"] <= UNSTEADY:
            break
    return min(found, key=lambda one: float(one["unsteady"]))


def worst(several: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The repeat with the longest decision; with the largest of all repeats of what else has a bar."""
    slowest = max(several, key=lambda one: float(one["decision_ms"]))
    others = ("rank_bytes", "rank_ms", "rest_bytes", "rest_ms", "coordinator_mb", "unsteady")
    return slowest | {key: max(one[key] for one in several) for key in others}


def judged(name: str, row: dict[str, Any], limit_ms: float, limit_mb: float) -> list[Bar]:
    """Of :func:`worst`."""
    return [
        at_most(f"{name}_decision_ms", float(row["decision_ms"]), limit_ms),
        at_most(f"{name}_rank_bytes", float(row["rank_bytes"]), 65536),
        at_most(f"{name}_rank_ms", float(row["rank_ms"]), 20),
        at_most(f"{name}_rest_bytes", float(row["rest_bytes"]), 65536),
        at_most(f"{name}_rest_ms", float(row["rest_ms"]), 20),
        at_most(f"{name}_coordinator_mb", float(row["coordinator_mb"]), limit_mb),
        at_most(f"{name}_steady", float(row["unsteady"]), UNSTEADY),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--most-gpus", type=int, default=16384)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    bars: list[Bar] = []
    for model, gpus, tp, pp, limit_ms, limit_mb in CLUSTERS:
        layouts = LAYOUTS.get(gpus, ("megatron",))
        deaths = (*DEAD, *MORE_DEAD.get(gpus, ()))
        for layout, copies, dead, is_tight in itertools.product(layouts, COPIES, deaths, (False, True)):
            if gpus > options.most_gpus or not occurs(dead, gpus, tp, pp):
                continue
            if is_tight and (tp > 1 or dead not in TIGHT_DEAD):
                continue
            incident = Incident(model, gpus, tp, pp, copies, dead, layout, is_tight)
            several = [steady(incident, number) for number in range(options.repeats)]
            row = worst(several)
            rows.append(row)
            bars += judged(
                f"{gpus}_gpus_tp{tp}_{layout}_{copies}_copies_{dead}_dead{'_tight' * is_tight}",
                row,
                limit_ms,
                limit_mb,
            )
            print(row, file=sys.stderr if options.json else sys.stdout, flush=True)
    return finish({"decisions": rows} if options.json else {}, bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
