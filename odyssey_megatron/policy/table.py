"""The table of candidates: a decision as people read it."""

from __future__ import annotations

from collections.abc import Sequence

from odyssey_megatron.plan.sending.generation import CandidateRow


def candidates_table(rows: Sequence[CandidateRow]) -> str:
    """Return an aligned text table, in which the chosen row is marked with ``*``."""
    cells = [("", "candidate", "step", "transition", "score (tokens)", "next loss", "reason")]
    for row in rows:
        cells.append(
            (
                "*" if row.chosen else "",
                row.name,
                _seconds(row.step_s),
                _seconds(row.transition_s),
                "-" if row.score is None else f"{row.score:,.0f}",
                f"-{row.next_loss:,.0f}" if row.next_loss else "",
                row.reason,
            )
        )
    widths = [max(len(line[i]) for line in cells) for i in range(6)]
    lines = []
    for mark, name, step, transition, score, next_loss, reason in cells:
        lines.append(
            f"{mark:<{widths[0]}} {name:<{widths[1]}}  {step:>{widths[2]}}  "
            f"{transition:>{widths[3]}}  {score:>{widths[4]}}  {next_loss:>{widths[5]}}  {reason}".rstrip()
        )
    return "\n".join(lines)


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.2f} ms" if value < 1 else f"{value:.3f} s"
