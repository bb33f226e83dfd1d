"""``odyssey report``: a run's journal as an HTML page, PNGs, a table on the terminal, or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.inputs import Parser, printable
from odyssey_megatron.metrics.run import Run, read_run, summary, text_summary


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand and return its exit code. Raises ConfigError."""
    parser = Parser(prog="odyssey report", description=__doc__)
    parser.add_argument("run_dir", help="the job's --odyssey-run-dir")
    parser.add_argument("--reference", metavar="RUN_DIR", help="the same job without failures")
    parser.add_argument("--out", metavar="DIR", help="where to write (default: RUN_DIR/report)")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON; write nothing")
    args = parser.parse_args(argv)
    run = read_run(args.run_dir)
    reference = read_run(args.reference) if args.reference else None
    for one in (*run.left_out, *(reference.left_out if reference else ())):
        print(printable(f"odyssey report: {one}."), file=sys.stderr)
    if args.json:
        print(json.dumps(summary(run, reference), allow_nan=False))
        return 0
    page = write(run, reference, Path(args.out or Path(args.run_dir) / "report"))
    print(text_summary(run, reference))
    print(f"report: {page}")
    return 0


def write(run: Run, reference: Run | None, out: Path) -> Path:
    """Write ``index.html``, ``summary.json`` and the PNGs into ``out``; return the page's path.

    Raises:
        ConfigError: matplotlib is missing, or ``out`` cannot be written.
    """
    try:
        from odyssey_megatron.metrics import page, plots
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the report needs {error.name}: pip install 'odyssey-megatron[report]', or use --json."
        ) from None
    try:
        out.mkdir(parents=True, exist_ok=True)
        figures = plots.all_figures(run, reference)
        for figure in figures:
            (out / f"{figure.name}.png").write_bytes(figure.light)
        (out / "summary.json").write_text(json.dumps(summary(run, reference), indent=1, allow_nan=False))
        (out / "index.html").write_text(
            page.html(run, reference, figures), encoding="utf-8", errors="replace"
        )
    except OSError as error:
        raise ConfigError(f"cannot write the report to {out}: {error.strerror}.") from None
    return out / "index.html"
