"""A job whose diagnoses are looked at, for ``test_rebalancing.py`` and ``test_slow_ways.py``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from odyssey_megatron.diagnosis.steps import StepTimes
from odyssey_megatron.diagnosis.verdicts import Diagnosis
from odyssey_megatron.launch.coordinator.rebalancing import Rebalancing
from odyssey_megatron.metrics.journal import Journal
from tests.policy.test_history import planner_of


def job_in(folder: Path):
    """A healthy job of the test's planner, and what has been said; called, its ``Rebalancing``."""
    planner, plan, state = planner_of()
    said: list[str] = []

    def made(*, acts: bool) -> Rebalancing:
        return Rebalancing(planner, Journal(folder, source="agent0"), said.append, acts=acts)

    made.plan, made.state, made.said, made.folder, made.planner = plan, state, said, folder, planner
    return made


def timed(diagnosis: Diagnosis, longer: float, since=3, generation=0) -> Diagnosis:
    """Steps take ``longer`` times as long from ``since`` on."""
    seconds = {step: longer if step >= since else 1.0 for step in range(6)}
    found = {
        "verdicts": tuple(replace(one, since=since) for one in diagnosis.verdicts),
        "took": StepTimes(generation=generation, seconds=seconds),
    }
    if diagnosis.links.verdicts:
        links = tuple(replace(one, since=since) for one in diagnosis.links.verdicts)
        found["links"] = replace(diagnosis.links, verdicts=links)
    return replace(diagnosis, **found)
