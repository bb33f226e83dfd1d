"""A second simulator, written from the text form of schedules alone: to check the first one by.

It shares no code with ``odyssey_megatron/plan``: text is split by its own rules, and time is not run forward worker by
worker; instead each instruction is a node of a graph, its end the longest way to it.
"""

import math
import re
from collections import defaultdict
from fractions import Fraction
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import NamedTuple

WORD = re.compile(r"([A-Z_]+?)(\d*)(?:\[(\d+)(?::(\d+))?\])?(?:([<>])(\d+))?")


class Word(NamedTuple):
    kind: str
    microbatch: int
    first: int
    last: int
    peer: int


def words_of(text):
    """Worker -> what it does."""
    found = {}
    for line in text.splitlines():
        worker, rest = line.split(":", 1)
        parts = [WORD.fullmatch(one).groups() for one in rest.split()]
        found[int(worker)] = [
            Word(kind, *(int(one) if one else -1 for one in (microbatch, first, last, peer)))
            for kind, microbatch, first, last, _, peer in parts
        ]
    return found


class Second:
    """One step. ``copies``: of optimizer state, where it is cut over more holders than that; 0: it is not."""

    def __init__(self, text, costs, speeds=None, copies=0):
        self.words, self.costs, self.speeds, self.copies = words_of(text), costs, speeds or {}, copies
        self.late = {(a, b): longer for a, b, longer in costs.slow_links}
        self.holders = {}
        for worker, words in self.words.items():
            for one in words:
                if one.kind == "REDUCE_GRAD":
                    self.holders.setdefault((one.first, one.last), []).append(worker)
        self._run()

    def _total(self, kind, first, last):
        return sum(getattr(layer, kind) for layer in (*self.costs.layers, self.costs.tied)[first:last])

    def _compute_s(self, worker, one):
        kinds = {
            "F": ("forward_s",), "E": ("forward_s",), "I": ("input_grad_s",), "W": ("weight_grad_s",),
            "B": ("input_grad_s", "weight_grad_s"),
        }.get(one.kind, ())  # fmt: skip
        return sum(self._total(kind, one.first, one.last) for kind in kinds) / self.speeds.get(worker, 1.0)

    def _sum_s(self, bucket):
        """Ring all-reduce, or where state is cut reduce-scatter and the other owners' parts."""
        k = len(self.holders[bucket])
        if k == 1:
            return 0.0
        second = min(self.copies, k) if self.copies else k
        size = self._total("gradient_bytes", *bucket)
        rounds = (k - 1) + (second - 1)
        return rounds * (self.costs.link_latency_s + size / k / self.costs.link_bytes_per_s)

    def _run(self):
        """Nodes: (worker, place) is when what a worker does there is over; ("sum", bucket) when that is."""
        sent, needs = {}, {}
        for worker, words in self.words.items():
            for at, one in enumerate(words):
                if one.kind.startswith("SEND"):
                    sent[one.kind[-1], one.microbatch, one.first, worker, one.peer] = worker, at
        lag = self.costs.link_latency_s + self.costs.message_bytes / self.costs.link_bytes_per_s
        after = {}
        for worker, words in self.words.items():
            inbox, previous_sum = {}, None
            for at, one in enumerate(words):
                before = [(worker, at - 1)] if at else []
                wait = []
                if one.kind.startswith("RECV"):
                    sender = sent[one.kind[-1], one.microbatch, one.first, one.peer, worker]
                    key = one.kind[-1], one.microbatch, one.first
                    inbox[key] = sender, lag + self.late.get((one.peer, worker), 0.0)
                elif one.kind == "F":
                    wait = [inbox[key] for key in [("F", one.microbatch, one.first)] if key in inbox]
                elif one.kind in "IB":
                    wait = [inbox[key] for key in [("B", one.microbatch, one.last)] if key in inbox]
                elif one.kind == "REDUCE_GRAD":
                    node = "sum", (one.first, one.last)
                    after.setdefault(node, []).append((worker, at))
                    after[node] += [previous_sum] if previous_sum else []
                    previous_sum = node
                needs[worker, at] = before, wait
                after[worker, at] = [*before, *(sender for sender, _ in wait)]
        self.end = end = {}
        early = {worker: self._early(words, worker) for worker, words in self.words.items()}
        for node in TopologicalSorter(after).static_order():
            if node[0] == "sum":
                came = max(
                    end[one] - early[one[0]].get(one[1], 0.0) for one in after[node] if one[0] != "sum"
                )
                free = max((end[one] for one in after[node] if one[0] == "sum"), default=0.0)
                end[node] = max(came, free) + self._sum_s(node[1])
                continue
            worker, at = node
            before, wait = needs[node]
            ready = [end[one] for one in before] + [end[one] + longer for one, longer in wait]
            end[node] = max(ready, default=0.0) + self._compute_s(worker, self.words[worker][at])
        self.computed_s = max(end.values())
        self.step_s = self.computed_s + self.costs.agreement_s + self._gathered_late_s()

    def _early(self, words, worker):
        """Place of a sum -> how much earlier it may begin than what stands before it ends: the input gradient of a
        first stage that nobody waits for runs on beside what comes behind it.
        """
        kinds = [one.kind for one in words]
        at = max((i for i, kind in enumerate(kinds) if kind not in ("W", "REDUCE_GRAD", "STEP")), default=-1)
        if at < 0 or kinds[at] != "I" or words[at].first != 0:
            return {}
        lead, found, least = words[at], {}, math.inf
        for i in range(at + 1, len(words)):
            if kinds[i] == "REDUCE_GRAD":
                least = min(least, self._left_s(lead, words[i].first, worker))
                found[i] = least
        return found

    def _left_s(self, lead, first, worker):
        if first >= len(self.costs.layers):
            return 0.0
        down_to = lead.last if first >= lead.last else max(lead.first, first - 1)
        return self._total("input_grad_s", lead.first, down_to) / self.speeds.get(worker, 1.0)

    def _stepped_s(self):
        """Worker -> the time of its optimizer, for the state that it keeps of what it sums."""
        found = defaultdict(float)
        for bucket, holders in self.holders.items():
            share = min(self.copies, len(holders)) / len(holders) if self.copies else 1
            for worker in holders:
                size = self._total("optimizer_bytes", *bucket) * share
                found[worker] += self.costs.optimizer_s_per_byte * size
        for worker, factor in self.costs.long_optimizers:
            found[worker] *= factor
        return found

    def _gathered_late_s(self):
        """A worker's first forward waits for its own optimizer. Weights of buckets with more holders than copies of
        state are gathered behind it, one after the other, the tied one first, while the next step's forwards go through
        their routes.
        """
        layers, free, there = len(self.costs.layers), self._stepped_s(), {}
        stepped = dict(free)
        for bucket in sorted(self.holders, key=lambda one: (one[0] < layers, one)) if self.copies else ():
            holders = self.holders[bucket]
            if len(holders) > self.copies:
                k, size = len(holders), self._total("weight_bytes", *bucket)
                took = (k - 1) * (self.costs.link_latency_s + size / k / self.costs.link_bytes_per_s)
                there[bucket] = max(free[one] for one in holders) + took
                free |= dict.fromkeys(holders, there[bucket])
        late = max((one for bucket, one in there.items() if bucket[0] >= layers), default=0.0)
        lag = self.costs.link_latency_s + self.costs.message_bytes / self.costs.link_bytes_per_s
        routes = {}
        for worker, words in self.words.items():
            for one in words:
                if one.kind == "F":
                    routes.setdefault(one.microbatch, []).append((one.first, one.last, worker))
        for hops in routes.values():
            reached = 0.0
            for first, last, worker in sorted(hops):
                late = max(late, stepped[worker] - reached)
                for (a, b), end in there.items():
                    if a < last and first < b:
                        late = max(late, end - reached - self._total("forward_s", first, max(first, a)))
                reached += self._total("forward_s", first, last) + lag
        return late

    def sent_bytes(self):
        """Worker -> the messages that it keeps until the step's end."""
        each = self.costs.message_bytes if self.costs.keeps_messages else 0
        return {
            worker: each * sum(one.kind.startswith("SEND") for one in words)
            for worker, words in self.words.items()
        }

    def peak_bytes(self, held_bytes):
        """Worker -> the most that it has at once. ``held_bytes``: worker -> weights, gradients and optimizer state."""
        sent_bytes = self.sent_bytes()
        found = {}
        for worker, words in self.words.items():
            live = most = 0
            base = held_bytes[worker] + sent_bytes[worker]
            for one in words:
                whole = self._total("activation_bytes", one.first, one.last) if one.kind in "FEIWB" else 0
                early = self._total("early_bytes", one.first, one.last) if one.kind in "FEIWB" else 0
                live += {"F": whole, "E": whole, "I": -early, "W": early - whole, "B": -whole}.get(
                    one.kind, 0
                )
                most = max(most, live)
            found[worker] = base + most
        return found


def held_bytes(layout, costs):
    """Worker -> weights, gradients and optimizer state of what it holds."""
    found = dict.fromkeys(layout.workers, 0)
    for layer, (holders, one) in enumerate(zip(layout.all_holders, costs.all_layers, strict=True)):
        for worker in holders:
            found[worker] += one.weight_bytes + one.gradient_bytes
        ring = layout.keepers[layer] if layout.keepers else holders
        for worker, part in kept_parts(ring, layout.copies or len(ring)).items():
            found[worker] += math.ceil(one.optimizer_bytes * part)
    return found


def kept_parts(ring, copies):
    """Worker -> the part of a layer's optimizer state that it keeps, in the place that it has of ``ring``; -1 stands in
    the place of a lost worker. Each slice is kept in ``copies`` places in a row. Slices end at one of 720,720 marks.
    """
    if len(ring) <= copies:
        return {worker: Fraction(1) for worker in ring if worker != -1}
    marks = [720_720 * place // len(ring) for place in range(len(ring) + 1)]
    found = defaultdict(Fraction)
    for first, (a, b) in enumerate(pairwise(marks)):
        for place in range(first, first + copies):
            found[ring[place % len(ring)]] += Fraction(b - a, 720_720)
    return {worker: part for worker, part in found.items() if worker != -1}
