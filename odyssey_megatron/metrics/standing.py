"""Where each worker stands: its place, what it does now, and how many more losses each layer survives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from odyssey_megatron.codec import from_jsonable
from odyssey_megatron.metrics.records import SCHEMA_VERSION
from odyssey_megatron.metrics.recoveries import named, on_one_clock, ranks_of
from odyssey_megatron.metrics.timeline import JournalEvent
from odyssey_megatron.plan.layout import Layout

TRAINS, SHADOW, WAITS, JOINS, DEAD = "trains", "shadow", "waits", "joins", "dead"
Span = tuple[int, int]
_MOST_RANKS = 1 << 20
"""A journal with more ranks is damaged."""
_SIZES_SINCE = 3
"""Schema version since which ``shapes`` of a decision are numbers of ranks; before, of places that each rank fills."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MapPlace:
    """The place of one worker on the map. It is where the job's first plan put it, whatever the worker does later."""

    worker: int
    replica: int
    stage: int
    """The stage; -1: the first plan had no use for the worker."""
    ranks: tuple[int, ...]
    node: str
    status: str
    slowness: float | None
    """The factor by which its work takes longer than the same work elsewhere; None: not measured."""
    spans: tuple[Span, ...]
    """The layers that it computes."""
    microbatches: int
    """Number of a step's microbatches for which it computes some layers."""
    whole: int
    """Number of ranks of a whole cell. This one may have fewer, and train on."""

    @property
    def ranks_text(self) -> str:
        """The ranks, and how many of a whole cell's they are, where some are lost for good."""
        text = f"rank {self.ranks[0]}" + (f"–{self.ranks[-1]}" if len(self.ranks) > 1 else "")
        return text if len(self.ranks) == self.whole else f"{text}, {len(self.ranks)} of {self.whole} ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """Consecutive layers with the same holders."""

    first: int
    last: int
    holders: int
    """Number of living workers that have the state; of its slices, the one with the fewest counts."""
    nodes: int
    """Number of nodes that these workers are on."""

    @property
    def survives(self) -> int:
        """Number of living workers that may be lost at once, whichever they are; -1: the layers are lost."""
        return self.holders - 1

    @property
    def survives_nodes(self) -> int:
        return self.nodes - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStanding:
    """The job's newest plan, and which of its ranks are left."""

    generation: int = 0
    num_layers: int = 0
    cell_size: int = 1
    is_recovering: bool = False
    """Some rank has died, or asked for fresh groups, and the next plan is not in force yet."""
    dead: frozenset[int] = frozenset()
    """The dead ranks."""
    places: tuple[MapPlace, ...] = ()
    margins: tuple[Margin, ...] = ()

    @property
    def replicas(self) -> int:
        return max((one.replica + 1 for one in self.places), default=0)

    @property
    def stages(self) -> int:
        return max((one.stage + 1 for one in self.places), default=0)

    @property
    def survives(self) -> int | None:
        """The smallest :attr:`Margin.survives` of any layer."""
        return min((one.survives for one in self.margins), default=None)

    @property
    def survives_nodes(self) -> int | None:
        return min((one.survives_nodes for one in self.margins), default=None)


def standing(events: Sequence[JournalEvent], world_size: int) -> JobStanding:
    """Return the standing by the newest decision that has begun to be carried out.

    Raises ValueError if its layout is invalid.
    """
    decided = {event["generation"]: event for event in named(events, "decision") if event.get("layout")}
    if not decided:
        return JobStanding()
    members = {event["generation"]: event["members"] for event in named(events, "generation_started")}
    first, current = min(decided), max((one for one in members if one in decided), default=min(decided))
    home, layout = (from_jsonable(Layout, decided[one]["layout"]).check() for one in (first, current))
    if world_size > _MOST_RANKS:
        raise ValueError(f"a job of {world_size} ranks")
    cell = max(1, decided[first].get("cell_size", 1))
    hosts, (dead, joining) = nodes_of(events), _dead(events)
    # As the job itself counts nodes: by their agents, since several may have one name.
    agents = {event["target"]: str(event.get("source", "")) for event in named(events, "rank_started")}
    workers = range(-(-world_size // cell))
    sizes = _sizes(decided[current], cell)
    ranks = {
        worker: tuple(range(worker * cell, min(worker * cell + sizes.get(worker, cell), world_size)))
        for worker in workers
    }
    gone = frozenset(worker for worker in workers if dead & set(ranks[worker]))
    waiting = frozenset(worker for worker in workers if joining & set(ranks[worker]))
    nodes = {worker: hosts.get(ranks[worker][0], "") for worker in workers}
    return JobStanding(
        generation=current,
        num_layers=layout.num_layers,
        cell_size=cell,
        is_recovering=bool(dead & set(members.get(current, ())))
        or any(one > current and not decided[one].get("planned") for one in decided),
        dead=frozenset(dead),
        places=_places(home, layout, ranks, cell, gone, waiting, nodes, _slowness(events)),
        margins=_margins(layout, gone, {worker: agents.get(ranks[worker][0], "") for worker in workers}),
    )


def nodes_of(events: Sequence[JournalEvent]) -> dict[int, str]:
    """Return the name of the host of each rank's newest process, or "node 3" where it is not known."""
    found = {}
    for event in named(events, "rank_started"):
        number = str(event.get("source", "")).removeprefix("agent")
        found[event["target"]] = event.get("host") or f"node {number}"
    return found


def _dead(events: Sequence[JournalEvent]) -> tuple[set[int], set[int]]:
    """Return the ranks that are dead, and those that are back but in no plan yet."""
    died_s, joining = dict[int, float](), set[int]()
    for event in events:
        if event["event"] == "failure_detected":
            died_s |= {rank: event.get("at_s", math.nan) for rank in ranks_of(event["dead"])}
            joining -= died_s.keys()
        elif event["event"] == "rank_joined":
            died_s.pop(event["target"], None)
            joining.add(event["target"])
        elif event["event"] == "switched":
            joining.discard(event["rank"])
    newest = max(named(events, "generation_started"), key=lambda one: int(one["generation"]), default={})
    if newest.get("agreed_s") is None:
        return set(died_s), joining
    # Whoever has agreed on a generation lived then, though the journals of earlier versions may tell of a rank's death
    # behind its return.
    agreed_s, members = on_one_clock(newest, newest["agreed_s"]), set(newest["members"])
    return {rank for rank, at_s in died_s.items() if rank not in members or not at_s < agreed_s}, joining


def _slowness(events: Sequence[JournalEvent]) -> dict[int, float]:
    """Return the slowness of each worker, as measured last."""
    measured = named(events, "measured")
    return {int(worker): float(factor) for worker, factor in measured[-1]["factors"]} if measured else {}


def _places(
    home: Layout,
    layout: Layout,
    ranks: Mapping[int, tuple[int, ...]],
    cell_size: int,
    gone: frozenset[int],
    waiting: frozenset[int],
    nodes: Mapping[int, str],
    slowness: Mapping[int, float],
) -> tuple[MapPlace, ...]:
    at: dict[int, tuple[int, int]] = {}
    for replica, route in enumerate(home.routes):
        for stage, hop in enumerate(route.hops):
            at.setdefault(hop.worker, (replica, stage))
    without = [worker for worker in ranks if worker not in at]
    at |= {worker: (column, -1) for column, worker in enumerate(without)}
    spans: dict[int, set[Span]] = {}
    visits: dict[int, set[int]] = {}
    for route in layout.routes:
        for hop in route.hops:
            spans.setdefault(hop.worker, set()).add((hop.first, hop.last))
            visits.setdefault(hop.worker, set()).update(route.microbatches)
    holds = set(layout.workers)
    found = []
    for worker, own in ranks.items():
        status = (
            DEAD if worker in gone else JOINS if worker in waiting
            else TRAINS if worker in spans else SHADOW if worker in holds else WAITS
        )  # fmt: skip
        replica, stage = at[worker]
        found.append(
            MapPlace(
                worker=worker,
                replica=replica,
                stage=stage,
                ranks=own,
                node=nodes[worker],
                status=status,
                slowness=None if status == DEAD else slowness.get(worker),
                spans=tuple(sorted(spans[worker])) if status == TRAINS else (),
                microbatches=len(visits[worker]) if status == TRAINS else 0,
                whole=cell_size,
            )
        )
    return tuple(found)


def _sizes(decision: JournalEvent, cell: int) -> dict[int, int]:
    """Return worker -> its number of ranks, of smaller cells, also from a journal of an earlier version."""
    has_places = decision.get("schema_version", SCHEMA_VERSION) < _SIZES_SINCE
    shapes = {worker: value for worker, value in decision.get("shapes") or () if value}
    return {worker: cell // value if has_places else value for worker, value in shapes.items()}


def _margins(layout: Layout, gone: frozenset[int], nodes: Mapping[int, str]) -> tuple[Margin, ...]:
    """Return runs of layers whose state the same workers have; of the layers' slices, the one with the fewest
    counts.
    """
    found: list[Margin] = []
    before: frozenset[tuple[int, ...]] | None = None
    for layer, owners in enumerate(layout.owners):
        if owners == before:
            found[-1] = replace(found[-1], last=layer + 1)
        else:
            living = [[worker for worker in one if worker not in gone] for one in owners]
            on = min(len({nodes.get(worker, "") for worker in one}) for one in living)
            found.append(Margin(first=layer, last=layer + 1, holders=min(map(len, living)), nodes=on))
        before = owners
    return tuple(found)
