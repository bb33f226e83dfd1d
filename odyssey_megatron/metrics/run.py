"""A finished (or killed) run, read back from its folder, and its summary as JSON and as text."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odyssey_megatron.codec import to_jsonable
from odyssey_megatron.errors import ConfigError, OdysseyError
from odyssey_megatron.inputs import printable
from odyssey_megatron.metrics.journal import read_journal
from odyssey_megatron.metrics.live import Live, live
from odyssey_megatron.metrics.recoveries import (
    DecisionRecord,
    RecoveryRecord,
    decisions,
    median,
    named,
    recoveries,
)
from odyssey_megatron.metrics.steps import (
    CommittedStep,
    LossDifference,
    SampleCheck,
    check_samples,
    committed_steps,
    loss_difference,
)
from odyssey_megatron.metrics.strikes import not_struck, not_struck_line
from odyssey_megatron.metrics.suspects import ended_with_the_job
from odyssey_megatron.metrics.switches import Switch, switches
from odyssey_megatron.metrics.timeline import clocks_of, last_job
from odyssey_megatron.metrics.traces import ExecutedStep, executed_steps
from odyssey_megatron.names import step_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything the report shows of one run."""

    name: str
    world_size: int
    clocks: int
    """The number of hosts' clocks that time its events."""
    verdict: str
    steps: tuple[CommittedStep, ...]
    recoveries: tuple[RecoveryRecord, ...]
    switches: tuple[Switch, ...]
    decisions: tuple[DecisionRecord, ...]
    traced: tuple[ExecutedStep, ...]
    members: dict[int, frozenset[int]]
    """Generation -> the ranks that began it."""
    samples: SampleCheck
    state: Live
    """The last state of the job."""
    ended: frozenset[int]
    """The ranks that were found dead, but had ended as the job does."""
    not_struck: tuple[str, ...]
    """The faults of ``--odyssey-inject`` that have not struck, as they were written."""
    not_struck_line: str
    """What people are told about them."""
    left_out: tuple[str, ...]
    """Sentences on lines of the journal that are no events."""

    @property
    def without_recovery(self) -> str:
        """What the report says where there was no recovery."""
        if not self.world_size:
            return "this part of the journal has none"
        if lost := sorted(set(self.state.standing.dead) - self.ended):
            return f"rank(s) {', '.join(map(str, lost))} were lost, and nobody went on"
        return "no rank was lost; the job ended by itself" if self.ended else "nothing failed"


UNREADABLE = (KeyError, TypeError, ValueError, OverflowError, OdysseyError)
"""Errors that events which contradict one another lead to."""


def unreadable(folder: str | Path, error: Exception) -> ConfigError:
    """Return ``error``, one of ``UNREADABLE``, in words for the user of the journal in ``folder``."""
    return ConfigError(
        f"the journal in {folder} cannot be read: {type(error).__name__} {error}. Read it with the version of odyssey "
        "that wrote it: pip list says which one is here."
    )


def read_run(run_dir: str | Path) -> Run:
    """Read the run of a folder. Raises ConfigError if there is no usable journal in ``run_dir``."""
    folder = Path(run_dir)
    if not (folder / "journal").is_dir():
        raise ConfigError(
            f"{folder} has no journal folder, so it is not a run's folder. Give the folder that the job was "
            "started with (--odyssey-run-dir)."
        )
    left_out: list[str] = []
    found = list(read_journal(folder, left_out.append))
    try:
        events = last_job(found)
        steps = committed_steps(events)
        name = name_of(folder)
        if not (started := named(events, "job_started")):
            left_out.append(
                f"{folder} lacks the journal of the job's host, or its beginning: losses and decisions are not in this "
                "report. All nodes need one --odyssey-run-dir that they share"
            )
        inject = started[-1].get("inject", "") if started else ""
        left = tuple(not_struck(events, inject).values())
        run = Run(
            name=name,
            world_size=max((event["world_size"] for event in started), default=0),
            clocks=clocks_of(events),
            verdict=next((e["verdict"] for e in reversed(named(events, "job_finished"))), "not finished"),
            steps=steps,
            recoveries=recoveries(events),
            switches=switches(events),
            decisions=decisions(events),
            traced=executed_steps(events),
            members={
                event["generation"]: frozenset(event["members"])
                for event in named(events, "generation_started")
            },
            samples=check_samples(events, steps),
            state=live(name, events),
            ended=frozenset(ended_with_the_job(events)),
            not_struck=left,
            not_struck_line=not_struck_line(events, left),
            left_out=tuple(left_out),
        )
    except UNREADABLE as error:
        raise unreadable(folder, error) from error
    if not steps:
        raise ConfigError(
            f"the journal in {folder} holds {len(events)} event(s) and no committed step: {_why_no_step(run.state)}"
            + "".join(f" {one}." for one in left_out[:1])
        )
    return run


def _why_no_step(state: Live) -> str:
    if state.observes:
        return "with --odyssey observe steps are in the job's output alone. 'odyssey top' shows what was decided."
    if state.is_over:
        return "the job ended before its first step, so there is nothing to report. Its output says why."
    return "the job has not come to its first step yet, or was killed before it; its output says which."


def name_of(folder: Path) -> str:
    """Return the name of a run: that of its folder."""
    return os.fsencode(folder.resolve().name).decode(errors="replace")


def summary(run: Run, reference: Run | None) -> dict[str, Any]:
    """Return what ``odyssey report --json`` prints. Infinite and undefined numbers become null."""
    difference = loss_difference(run.steps, reference.steps) if reference else None
    found: dict[str, Any] = finite(
        {
            "run": run.name,
            "reference": reference.name if reference else None,
            "world_size": run.world_size,
            "verdict": run.verdict,
            "clocks": run.clocks,
            "steps": len(run.steps),
            "final_loss": run.steps[-1].loss,
            "median_step_s": median(row.step_s for row in run.steps if row.step_s is not None),
            "recoveries": to_jsonable(run.recoveries),
            "switches": to_jsonable(run.switches),
            "median_stall_s": median(row.stall_s for row in run.recoveries if row.stall_s is not None),
            "loss_difference": to_jsonable(difference),
            "faults_not_struck": run.not_struck,
            "lines_left_out": run.left_out,
            "not_saved": run.state.not_saved,
            "samples": {**to_jsonable(run.samples), "ok": run.samples.ok},
            "losses": [[row.step, row.loss] for row in run.steps],
        }
    )
    return found


RECOVERY_COLUMNS = (
    "#", "iteration", "lost", "cause", "policy", "plan", "outcome", "detect", "decide", "abort", "agree",
    "groups", "transfer", "stall", "redo",
)  # fmt: skip
"""Columns of the table of recoveries. The durations are in milliseconds."""


def recovery_cells(number: int, row: RecoveryRecord) -> tuple[str, ...]:
    """Return one line of the table of recoveries, as text."""
    durations = (row.detect_s, row.decide_s, row.abort_s, row.agree_s, row.groups_s, row.transfer_s)
    return (
        str(number),
        str(row.step + 1) if row.step >= 0 else "–",
        lost(row),
        row.cause or "–",
        row.policy or "–",
        row.plan_hash[:8] or "–",
        row.outcome,
        *(milliseconds(one) for one in durations),
        milliseconds(row.stall_s),
        milliseconds(row.redo_s),
    )


def lost(row: RecoveryRecord) -> str:
    return (
        ("rank " if len(row.dead) == 1 else "ranks ") + ",".join(map(str, row.dead)) if row.dead else "none"
    )


def milliseconds(value_s: float | None) -> str:
    if value_s is None:
        return "–"
    return f"{value_s * 1e3:.1f}" if value_s < 0.1 else f"{value_s * 1e3:.0f}"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose columns are padded to their widest cell, with numbers to the right."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    right = [all(row[i][:1].isdigit() or row[i] == "–" for row in rows) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in (header, tuple("-" * width for width in widths), *rows)
    ]
    return "\n".join(lines)


def text_summary(run: Run, reference: Run | None) -> str:
    """Return the table of recoveries, and one line each on losses and samples."""
    rows = [recovery_cells(i, row) for i, row in enumerate(run.recoveries, 1)]
    table = text_table(RECOVERY_COLUMNS, rows) if rows else f"no recoveries: {run.without_recovery}"
    lines = [
        f"{len(run.steps)} steps on {run.world_size} ranks, final loss {run.steps[-1].loss:.6f}, "
        + printable(run.verdict),
        "",
        f"recoveries ({len(rows)}; durations in ms, of the slowest survivor; stall = failure to next instruction)",
        table,
        "",
        *switch_lines(run.switches),
        samples_line(run.samples),
        *filter(None, map(printable, (run.state.not_saved, run.not_struck_line, clocks_line(run)))),
    ]
    if reference:
        lines.append(difference_line(loss_difference(run.steps, reference.steps)))
    return "\n".join(lines)


SWITCH_COLUMNS = ("iteration", "why", "policy", "plan", "stall")


def switch_cells(row: Switch) -> tuple[str, ...]:
    """Return one line of the table of switches, as text."""
    return (str(row.step + 1), row.why, row.policy, row.plan_hash[:8], milliseconds(row.stall_s))


def switch_lines(rows: Sequence[Switch]) -> list[str]:
    """Return the table of changes between two steps, if there are any."""
    if not rows:
        return []
    title = f"changes between two steps ({len(rows)}; stall in ms, of the slowest rank that trained)"
    return [title, text_table(SWITCH_COLUMNS, [switch_cells(row) for row in rows]), ""]


def samples_line(check: SampleCheck) -> str:
    if check.ok:
        return f"samples: each of {check.first} to {check.last} ({check.samples}) was consumed exactly once, in order"
    return "samples: NOT exactly once: " + ("; ".join(check.problems) or "none in the journal")


def clocks_line(run: Run) -> str:
    """Return what times between hosts rest on; "" where there is one clock."""
    if run.clocks < 2:
        return ""
    return (
        f"times are by the clocks of {run.clocks} hosts, which may differ: they are joined at the moments when all "
        "ranks had agreed on a generation, to within a message between the hosts"
    )


def difference_line(difference: LossDifference) -> str:
    text = (
        f"largest loss difference to the failure-free run over {difference.steps} steps: "
        f"{difference.max_absolute:.3g} absolute, {difference.max_relative:.3g} relative"
    )
    if difference.max_relative:
        text += f" ({step_name(difference.at_step)})"
    for steps, where in ((difference.only_in_reference, "missing here"), (difference.only_here, "only here")):
        if steps:
            text += f"; {len(steps)} step(s) {where}, first {step_name(steps[0])}"
    return text


def finite(value: Any) -> Any:
    """Return ``value`` with null in place of infinity and NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
