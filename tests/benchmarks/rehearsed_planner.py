"""The planner of ``planner.py``: it says when it knows, and finds slow what the benchmark tells it to."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from odyssey_megatron.cluster.state import ClusterState
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.diagnosis.links import SLOW_LINK, Links, LinkVerdict
from odyssey_megatron.diagnosis.verdicts import SLOW_WORKER, Diagnosis, Verdict
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.policy.planner import PolicyPlanner

SLOWED = 1.25
"""Times as long as before."""
LONGER_S = 0.02
"""A message by a slow link takes so much longer."""


class RehearsedPlanner(PolicyPlanner):
    """Says when it has worked out what decisions by measured costs look up."""

    def __init__(self, config: OdysseyConfig):
        super().__init__(config)
        self.known_s = math.inf
        self.rehearsed_s = math.inf
        self.slow: int | None = None
        """A worker that turns out to be slow: ``SLOWED``."""
        self.link: tuple[int, int] | None = None
        """A link that does: ``LONGER_S``."""
        self._looks = 0

    def learn(
        self, state: ClusterState, current: Plan, observations: Sequence[str], now_s: float
    ) -> Diagnosis:
        found, self._looks = super().learn(state, current, observations, now_s), self._looks + 1
        if self.link is not None:
            links = slow_link(self.link, self._looks)
            return replace(found, links=links, newest=self._looks)
        if self.slow is None:
            return found
        verdict = Verdict(
            kind=SLOW_WORKER, worker=self.slow, factor=SLOWED, found=0, evidence="by the benchmark"
        )
        return replace(found, verdicts=(verdict,), latest={self.slow: SLOWED}, newest=self._looks)

    def adopt(self, observations: Sequence[str]) -> None:
        super().adopt(observations)
        self.known_s = min(self.known_s, time.monotonic())

    def rehearse(self, state: ClusterState, current: Plan, now_s: float) -> None:
        is_measured = time.monotonic() > self.known_s
        super().rehearse(state, current, now_s)
        if is_measured:
            self.rehearsed_s = min(self.rehearsed_s, time.monotonic())


def slow_link(link: tuple[int, int], newest: int) -> Links:
    """A diagnosis of links of which one is slow."""
    times = {link: 1 + 1e3 * LONGER_S}
    verdict = LinkVerdict(
        kind=SLOW_LINK, links=(link,), workers=link, factor=times[link], since=0, evidence="by the benchmark"
    )
    return Links(
        verdicts=(verdict,), factors=times, slow=times, longer_s={link: LONGER_S}, found={link: 0}, latest=times,
        newest=newest,
    )  # fmt: skip
