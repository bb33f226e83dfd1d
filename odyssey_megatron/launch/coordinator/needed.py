"""What a job cannot do without: it is told which loss would end it, and whether a node that is to leave may do so."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from odyssey_megatron.cluster.events import NodeLost, RankJoined, agents_before
from odyssey_megatron.cluster.state import without_fresh
from odyssey_megatron.errors import EXIT_LAYERS_LOST, LayersLost
from odyssey_megatron.launch.coordinator.reactions import JobState, bury
from odyssey_megatron.names import layer_names
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.placing.spread import on_one_node, spread
from odyssey_megatron.plan.placing.transfer import check_living


def fatal_loss(layout: Layout, nodes: Mapping[int, int], copies: int) -> str:
    """Return which single loss would end a job with the first ``layout``, and what helps; empty if none would."""
    ends = f"ends the job, exit code {EXIT_LAYERS_LOST}."
    if alone := sorted({layer for layers in layout.alone().values() for layer in layers}):
        return (
            f"{layer_names(alone, layout.num_layers)}, each on one rank or cell only: losing it {ends} "
            "--odyssey-redundancy state or more data parallelism survives."
        )
    if fatal := on_one_node(layout, nodes):
        helps = spread(layout, nodes, copies) is not layout
        return (
            f"node(s) {', '.join(map(str, fatal))}: all replicas of some layers are on one. Losing it {ends}"
            + " --odyssey-layout spread puts replicas on different nodes." * helps
        )
    return ""


class Departures:
    """Which nodes may leave as they are asked to, one after the other: those without which the others can go on."""

    def __init__(self) -> None:
        self._leaving: dict[int, int] = {}
        """Node that may leave -> :func:`agents_before` of its processes. Such nodes count as gone, although their ranks
        still finish a step.
        """
        self.ends = ""
        """Why the job ends instead; "" if nobody was asked to leave who is needed."""

    def ask(self, node: int, job: JobState) -> str | None:
        """Return why ``node`` cannot leave the ``job``, which then is to end; "" if it may leave, and None if that is
        not known before a plan that is on offer has begun.
        """
        why = _needed({*self._leaving, node}, job)
        if why:
            self.ends = f"node {node} was asked to leave, but {why}"
        elif not job.may_offer:
            return None
        else:
            known = [agents_before(job.cluster.incarnation_of(rank)) for rank in job.ranks_on(node)]
            self._leaving[node] = max(known, default=0)
        return why

    def came_back(self, joined: RankJoined) -> None:
        """Note that a rank has ``joined``: its node does not leave any more if a later agent has started it."""
        node = joined.node
        if node in self._leaving and agents_before(joined.incarnation) > self._leaving[node]:
            del self._leaving[node]


def _needed(nodes: Collection[int], job: JobState) -> str:
    """Return why the others cannot go on without ``nodes``; "" if they can, as they have all layers and their state.

    It is not known whether these fit into their memory: only a decision tells that, which may take long, and changes
    what the planner goes by. So a node may leave and end the job for that.
    """
    left, lost = bury(job, [NodeLost(node=one) for one in nodes])
    if not lost:
        return ""
    alive = without_fresh(left.cluster).alive
    if not alive:
        return "no rank would be left"
    assert job.known_plan is not None
    try:
        check_living(job.known_plan.layout, alive)
    except LayersLost as error:
        what = "the optimizer state of " * bool(error.copies)
        return f"no other node has {what}{layer_names(error.layers, error.num_layers)}"
    return ""
