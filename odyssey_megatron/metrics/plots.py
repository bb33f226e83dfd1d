"""The report's pictures. Each is drawn twice, for light and for dark pages; the PNG files are the light ones."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Affine2D

from odyssey_megatron.metrics.recoveries import RecoveryRecord
from odyssey_megatron.metrics.run import Run, lost, milliseconds
from odyssey_megatron.metrics.traces import Box, ExecutedStep, before_and_after, whole_steps
from odyssey_megatron.names import step_name

_DPI = 160
_SCHEDULES = 12
"""The most schedules that are drawn, those of the first recoveries that have traces; each takes seconds."""
_ROWS = 256
"""Rows of a schedule. A picture of more workers would be longer than a PNG can be, and nobody could read it."""
_LABEL_WIDTH = 0.14
"""Share of the plot's width for a mark's text. Where failures are closer, marks carry their number only."""
_STEPS = "step (iteration - 1)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """Colours for one background."""

    surface: str
    ink: str
    muted: str
    grid: str
    run: str
    reference: str
    failure: str


LIGHT = Theme(
    surface="#ffffff",
    ink="#1b2330",
    muted="#667085",
    grid="#e4e7ec",
    run="#1f5fbf",
    reference="#f2a33a",
    failure="#c8322b",
)
DARK = Theme(
    surface="#161b22",
    ink="#e6e9ee",
    muted="#98a2b3",
    grid="#2b323d",
    run="#6aa5ff",
    reference="#d98a1f",
    failure="#ff6b61",
)

KIND_COLOURS = {
    "F": "#3f78c6",
    "E": "#8fb4e3",
    "B": "#d9703a",
    "I": "#e09a3e",
    "W": "#4a9f86",
    "REDUCE_GRAD": "#8a63b8",
    "STEP": "#c2457a",
    "COMM": "#9aa4b2",
    "OTHER": "#6b7280",
}
_HEIGHTS = {"COMM": 0.22, "OTHER": 0.22, "REDUCE_GRAD": 0.45}
"""Heights as a share of a row; what is mostly waiting is drawn thin."""
KIND_NAMES = {
    "F": "F forward",
    "E": "E forward run ahead",
    "B": "B backward",
    "I": "I input gradient",
    "W": "W weight gradient",
    "REDUCE_GRAD": "gradient reduction (with its wait)",
    "STEP": "agreement + optimizer",
    "COMM": "send / receive (with its wait)",
    "OTHER": "other",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A named figure as PNG bytes in both themes."""

    name: str
    title: str
    caption: str
    light: bytes
    dark: bytes


def all_figures(run: Run, reference: Run | None) -> tuple[Picture, ...]:
    """Return pictures of the loss, the step time, and the schedule of the first recoveries that have traces."""
    pictures = [
        _picture(
            "loss",
            "Loss",
            "Training loss of every committed step; numbered marks are failures."
            + (" Below: the distance to the failure-free run." if reference else ""),
            lambda theme: loss_figure(run, reference, theme),
        ),
        _picture(
            "step_time",
            "Step time",
            "From commit to commit, so that an interrupted step carries its aborted attempt and its recovery.",
            lambda theme: step_time_figure(run, reference, theme),
        ),
    ]
    whole = whole_steps(run.traced, run.steps)
    for number, recovery in enumerate(run.recoveries, 1):
        before, after = before_and_after(recovery, whole)
        if before and after and len(pictures) < 2 + _SCHEDULES:
            since = [row for row in run.recoveries[:number] if row.generation > before.generation]
            dead = frozenset(rank for row in since for rank in row.dead) - run.members.get(
                recovery.generation, frozenset()
            )
            pictures.append(_schedule_picture(number, recovery, before, after, dead))
    return tuple(pictures)


def _schedule_picture(
    number: int, recovery: RecoveryRecord, before: ExecutedStep, after: ExecutedStep, dead: frozenset[int]
) -> Picture:
    titled = [
        (f"{when}: {step_name(one.step)}", one, dead) for when, one in (("before", before), ("after", after))
    ]
    return _picture(
        f"schedule_{number}",
        f"Schedule before and after failure {number} ({lost(recovery)}, {recovery.policy})",
        f"As executed, {step_name(before.step)} above and {step_name(after.step)} below, on one time scale. One row a "
        "worker, numbers are microbatches.",
        lambda theme: schedule_figure(titled, theme),
    )


def _picture(name: str, title: str, caption: str, draw: Callable[[Theme], Figure]) -> Picture:
    light, dark = (_png(draw, theme) for theme in (LIGHT, DARK))
    return Picture(name=name, title=title, caption=caption, light=light, dark=dark)


def _png(draw: Callable[[Theme], Figure], theme: Theme) -> bytes:
    style: dict[str, Any] = {
        "font.family": "sans-serif",
        "font.size": 9.5,
        "text.parse_math": False,  # what a journal holds is no formula
        "figure.facecolor": theme.surface,
        "axes.facecolor": theme.surface,
        "axes.edgecolor": theme.grid,
        "axes.labelcolor": theme.muted,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": theme.grid,
        "grid.linewidth": 0.8,
        "text.color": theme.ink,
        "xtick.color": theme.muted,
        "ytick.color": theme.muted,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "legend.frameon": False,
    }
    with mpl.rc_context(style):
        figure = draw(theme)
        buffer = io.BytesIO()
        FigureCanvasAgg(figure)
        figure.savefig(buffer, format="png", dpi=_DPI, bbox_inches="tight", pad_inches=0.15)
    return buffer.getvalue()


def loss_figure(run: Run, reference: Run | None, theme: Theme) -> Figure:
    """Plot the losses of both runs; with a reference, their difference below, on a logarithmic scale."""
    figure = Figure(figsize=(9, 5.2 if reference else 3.9), layout="constrained")
    if reference:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        _series(
            top,
            [(row.step, row.loss) for row in reference.steps],
            theme.reference,
            "no failures",
            linewidth=5,
            alpha=0.55,
        )
        _difference_panel(bottom, run, reference, theme)
    else:
        top = bottom = figure.subplots()
    _series(top, [(row.step, row.loss) for row in run.steps], theme.run, "with failures", linewidth=1.6)
    top.set_ylabel("loss")
    bottom.set_xlabel(_STEPS)
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    _mark_failures(top, run.recoveries, theme)
    top.legend(loc="lower left")
    return figure


def _difference_panel(axes: Any, run: Run, reference: Run, theme: Theme) -> None:
    theirs = {row.step: row.loss for row in reference.steps}
    gaps = [(row.step, abs(row.loss - theirs[row.step])) for row in run.steps if row.step in theirs]
    visible = [(step, gap) for step, gap in gaps if 0 < gap < math.inf]
    axes.set_ylabel("|difference|")
    if not visible:
        axes.text(0.5, 0.5, "none in any step", ha="center", va="center", transform=axes.transAxes)
        axes.set_yticks([])
        return
    axes.set_yscale("log")
    axes.plot(*zip(*visible, strict=True), ".", color=theme.run, markersize=5)
    low, high = min(gap for _, gap in visible), max(gap for _, gap in visible)
    axes.set_ylim(low / 5, high * 5)
    if len(visible) < len(gaps):
        axes.set_title(
            f"none in the other {len(gaps) - len(visible)} steps",
            loc="right",
            fontsize=8,
            color=theme.muted,
        )


def step_time_figure(run: Run, reference: Run | None, theme: Theme) -> Figure:
    """Plot the milliseconds from commit to commit."""
    figure = Figure(figsize=(9, 3.9), layout="constrained")
    axes = figure.subplots()
    shown: list[float] = []
    for one, colour, label, width in (
        (reference, theme.reference, "no failures", 3.5),
        (run, theme.run, "with failures", 1.6),
    ):
        if one is not None:
            points = [(row.step, row.interval_s * 1e3) for row in one.steps if row.interval_s is not None]
            _series(axes, points, colour, label, linewidth=width)
            shown += [value for _, value in points]
    axes.set_ylim(0, 1.3 * max(shown, default=1.0))
    axes.set_xlabel(_STEPS)
    axes.set_ylabel("step time (ms)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    notes = [f"stall {milliseconds(row.stall_s)} ms" if row.stall_s else "" for row in run.recoveries]
    _mark_failures(axes, run.recoveries, theme, notes)
    axes.legend(loc="lower right", ncols=2)
    return figure


def _series(axes: Any, points: Sequence[tuple[int, float]], colour: str, label: str, **style: Any) -> None:
    xs, ys = [step for step, _ in points], [value for _, value in points]
    axes.plot(xs, ys, color=colour, label=label, solid_capstyle="round", solid_joinstyle="round", **style)


def _mark_failures(
    axes: Any, recoveries: Sequence[RecoveryRecord], theme: Theme, notes: Sequence[str] = ()
) -> None:
    """Draw a dashed line at each failure's step, with its number (and, where there is room, what was lost)."""
    by_step: dict[int, list[int]] = {}
    for i, row in enumerate(recoveries):
        by_step.setdefault(row.step, []).append(i)
    by_step.pop(-1, None)
    above = axes.get_xaxis_transform()
    left, right = axes.get_xlim()
    width = _LABEL_WIDTH * (right - left)
    room = all(b - a > width for a, b in pairwise(sorted(by_step)))
    for step, struck in by_step.items():
        axes.axvline(step, color=theme.failure, linewidth=1, linestyle=(0, (4, 3)), alpha=0.8)
        box = {"boxstyle": "circle,pad=0.28" if len(struck) == 1 else "round,pad=0.3,rounding_size=0.8"}
        axes.text(
            step,
            1.045,
            ", ".join(str(i + 1) for i in struck),
            transform=above,
            ha="center",
            va="center",
            fontsize=8,
            fontweight="bold",
            color=theme.surface,
            bbox=box | {"facecolor": theme.failure, "edgecolor": "none"},
        )
        if not room:
            continue
        side = 1 if step + width < right else -1
        lines = [f"{lost(recoveries[i])} lost" for i in struck] + [recoveries[struck[-1]].policy]
        axes.annotate(
            "\n".join(lines + [notes[i] for i in struck if notes and notes[i]]),
            (step, 0.985),
            xycoords=above,
            xytext=(5 * side, 0),
            textcoords="offset points",
            ha="left" if side > 0 else "right",
            va="top",
            fontsize=8,
            linespacing=1.25,
            color=theme.failure,
        )


Titled = tuple[str, ExecutedStep, frozenset[int]]
"""(title, step, those that are dead by then)"""


def schedule_picture(title: str, caption: str, titled: Sequence[Titled]) -> Picture:
    """Return a picture of steps that are not those of a run."""
    return _picture("schedule", title, caption, lambda theme: schedule_figure(titled, theme, of="worker"))


def schedule_figure(titled: Sequence[Titled], theme: Theme, *, of: str = "rank") -> Figure:
    """Plot Gantt charts on one time scale, each with its title. What is gone since the first keeps a row: it is lost
    if it is dead, or else idle.

    ``of`` says what a row is.
    """
    named = [one.ranks for _, one, _ in titled]
    struck = tuple(rank for rank in named[0] if any(rank not in ranks for ranks in named[1:]))
    rows = []
    for ranks in named:
        gone = tuple(rank for rank in named[0] if rank not in ranks)[:_ROWS]
        rows.append((_shown(ranks, struck[:_ROWS])[: _ROWS - len(gone)], gone))
    heights = [len(shown) + len(gone) for shown, gone in rows]
    figure = Figure(figsize=(13, 0.8 + 0.4 * len(titled) + 0.34 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(titled), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    end_ms = 1e3 * max(executed.end_s for _, executed, _ in titled)
    for axes, (title, executed, dead), ranks, (shown, gone) in zip(panels, titled, named, rows, strict=True):
        states = {rank: "lost" if rank in dead else "idle" for rank in gone}
        _gantt(axes, executed, (*shown, *gone), states, end_ms, theme, of)
        workers = f"{len(ranks)} workers" + (f", {len(shown)} shown" if len(shown) < len(ranks) else "")
        title = f"{title}, {workers}, {milliseconds(executed.end_s)} ms"
        # y says that nothing is above the plot; otherwise each pass would measure all ticks to find that out.
        axes.set_title(title, loc="left", y=1.0, fontsize=10, fontweight="bold", color=theme.ink)
    panels[-1].set_xlabel("time in the step (ms)")
    present = {box.kind for _, executed, _ in titled for box in executed.boxes}
    handles = [
        Patch(color=KIND_COLOURS[kind], label=KIND_NAMES[kind]) for kind in KIND_NAMES if kind in present
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8.5)
    return figure


def _shown(ranks: tuple[int, ...], struck: tuple[int, ...]) -> tuple[int, ...]:
    """Return ``ranks`` in their order; if they are too many, ``struck`` and the first of the others."""
    others = [rank for rank in ranks if rank not in struck][: _ROWS - len(struck)]
    chosen = {*struck, *others}
    return tuple(rank for rank in ranks if rank in chosen)


def _gantt(
    axes: Any,
    executed: ExecutedStep,
    rows: tuple[int, ...],
    gone: Mapping[int, str],
    end_ms: float,
    theme: Theme,
    of: str,
) -> None:
    """Draw one row for each worker, the first on top; one that is ``gone`` keeps a row that says why."""
    for y, rank in enumerate(rows):
        if rank in gone:
            colour = theme.failure if gone[rank] == "lost" else theme.muted
            axes.axhspan(y - 0.4, y + 0.4, color=colour, alpha=0.13, linewidth=0)
            axes.text(end_ms / 2, y, gone[rank], ha="center", va="center", color=colour, fontsize=8.5)
    place = {rank: y for y, rank in enumerate(rows) if rank not in gone}
    _draw_boxes(axes, [(place[box.rank], box) for box in executed.boxes if box.rank in place], end_ms, theme)
    axes.set_yticks(range(len(rows)), [_row_label(executed, rank, of) for rank in rows], fontsize=8.5)
    # There is no label; its place would be sought among hundreds of ticks.
    axes.yaxis.set_label_coords(0, 0.5)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_xlim(-0.004 * end_ms, 1.004 * end_ms)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)


def _draw_boxes(axes: Any, placed: Sequence[tuple[int, Box]], end_ms: float, theme: Theme) -> None:
    """Draw boxes, each with the number of its row. There are up to tens of thousands, and an artist takes a millisecond
    or more: those of a kind are one, and so are all of their numbers.
    """
    numbers: list[tuple[str, float, int]] = []
    for kind, colour in KIND_COLOURS.items():
        mine = [(y, box) for y, box in placed if box.kind == kind]
        half, corners = _HEIGHTS.get(kind, 0.8) / 2, []
        for y, box in mine:
            start, width = box.start_s * 1e3, max((box.end_s - box.start_s) * 1e3, end_ms / 4000)
            corners.append(
                [(start, y - half), (start, y + half), (start + width, y + half), (start + width, y - half)]
            )
            # A digit at this size is about 1/160 of the plot's width.
            if box.microbatch >= 0 and half > 0.25 and width > end_ms * len(str(box.microbatch)) / 160:
                numbers.append((str(box.microbatch), start + width / 2, y))
        style: dict[str, Any] = {"facecolor": colour, "edgecolor": theme.surface, "linewidth": 0.5}
        axes.add_collection(PolyCollection(corners, **style, zorder=2 if half < 0.25 else 3), autolim=False)
    if numbers:
        _write_numbers(axes, numbers)


def _write_numbers(axes: Any, numbers: Sequence[tuple[str, float, int]]) -> None:
    """Write each number with its middle at (x, y)."""
    written = PathCollection(
        [_number_shape(text) for text, _, _ in numbers],
        offsets=[(x, y) for _, x, y in numbers],
        offset_transform=axes.transData,
        facecolor="white",
        linewidth=0,
        zorder=4,
    )
    written.set_transform(axes.figure.dpi_scale_trans)
    axes.add_collection(written, autolim=False)


@lru_cache(maxsize=1024)
def _number_shape(text: str) -> Path:
    """Return the outline of a number, in inches, with its middle at (0, 0)."""
    shape = TextPath((0, 0), text, size=7.5 / 72)
    box = shape.get_extents()
    return shape.transformed(Affine2D().translate(-(box.x0 + box.x1) / 2, -(box.y0 + box.y1) / 2))


def _row_label(executed: ExecutedStep, rank: int, of: str) -> str:
    spans = executed.layers_of(rank)
    if not spans:
        return f"{of} {rank}"
    layers = ", ".join(f"{a}" if b == a + 1 else f"{a}–{b - 1}" for a, b in _merged(spans))
    return f"{of} {rank}  L{layers}"


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for first, last in spans:
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged
