"""Of real launch lines: how many start under --odyssey, with what ignored, and which flags refuse the others.

    python tests/benchmarks/launch_lines.py --json CASES.json

``CASES.json`` has the flags of Megatron-LM's own functional training cases: ``{"source": ..., "cases": [{"family",
"name", "args": {"--flag": value}}]}``, where ``true`` is a flag without a value. Each line is judged by what a job
looks at its flags with (``odyssey_megatron/upstream/refusals.py``), before Megatron-LM derives anything. A flag that is
not Megatron-LM's counts as refused, since these scripts add none.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from odyssey_megatron import codec
from odyssey_megatron.doctor.launch_line import case_flags, judged
from odyssey_megatron.inputs import read_text
from tests.benchmarks.bars import at_least, finish


def counted(cases: list[Any], version: str | None) -> dict[str, Any]:
    """What becomes of ``cases``; of the flags that refuse, how many by them, and how many by each alone."""
    ignored, refused, alone, by_family = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    start = untouched = 0
    for case in cases:
        verdict = judged(case_flags(case), version)
        against = [*verdict.refused, *verdict.unknown]
        refused.update(against)
        alone.update(against if len(against) == 1 else ())
        if not against:
            start += 1
            by_family[case["family"]] += 1
            ignored.update(list(verdict.ignored))
            untouched += not verdict.ignored
    return {
        "cases": len(cases),
        "start": start,
        "of each family": dict(by_family),
        "with no flag ignored": untouched,
        "ignored in those that start": dict(ignored.most_common()),
        "refused by (cases, of these by it alone)": {
            flag: (count, alone[flag]) for flag, count in refused.most_common()
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", type=Path, help="CASES.json, as above")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--version", help="whose flags to know, as 0.16.1; without it, those of all versions")
    args = parser.parse_args()
    found = codec.parsed(read_text(args.cases))
    result = counted(found["cases"], args.version)
    share = result["start"] / result["cases"]
    return finish(
        {"source": found["source"], **result},
        [at_least("share that starts", share, 0.80)],
        as_json=args.json,
    )


if __name__ == "__main__":
    sys.exit(main())
