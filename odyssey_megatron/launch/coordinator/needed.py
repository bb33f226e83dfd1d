"""What a job cannot do without: it is told which loss would end it, and whether a node that is to leave may do so."""

from __future__ import annotations

import time
from collections.abc import Mapping

from odyssey_megatron.cluster.state import without
from odyssey_megatron.errors import EXIT_LAYERS_LOST, LayersLost, OdysseyError
from odyssey_megatron.launch.coordinator.planner import Planner
from odyssey_megatron.launch.coordinator.reactions import JobState
from odyssey_megatron.names import layer_names
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.placing.spread import on_one_node, spread


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

    def __init__(self, planner: Planner):
        self._planner = planner
        self._leaving: set[int] = set()
        """Nodes that may leave. They count as gone, although their ranks still finish a step."""
        self.ends = ""
        """Why the job ends instead; "" if nobody was asked to leave who is needed."""

    def ask(self, node: int, job: JobState) -> str:
        """Return why ``node`` cannot leave the ``job``, which then is to end; "" if it may leave."""
        why = self._needed(self._leaving | {node}, job)
        if why:
            self.ends = f"node {node} was asked to leave, but {why}"
        else:
            self._leaving.add(node)
        return why

    def came_back(self, node: int) -> None:
        """Note that another agent has taken the place of ``node``."""
        self._leaving.discard(node)

    def _needed(self, nodes: set[int], job: JobState) -> str:
        state, known = job.cluster, job.known_plan
        workers = {state.worker_of(rank).worker for node in nodes for rank in job.ranks_on(node)}
        if known is None or workers.isdisjoint(state.alive):
            return ""
        left = without(state, workers | state.fresh)
        if not left.ranks:
            return "no rank would be left"
        try:
            self._planner.decide(left, known, time.monotonic())
        except LayersLost as error:
            what = "the optimizer state of " * bool(error.copies)
            return f"no other node has {what}{layer_names(error.layers, error.num_layers)}"
        except OdysseyError as error:
            return f"the others could not go on: {error}"
        return ""
