"""Megatron-LM's own parser, and then Odyssey's look at what it found.

python tests/megatron_lm/refuse.py CASES.json OUT.json   # {name: argv} -> {name: what is said}
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from megatron.core import __version__
from megatron.training.arguments import add_megatron_arguments, parse_args

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.upstream import refusals

PARSER = refusals.MegatronParser.of(add_megatron_arguments(argparse.ArgumentParser()), __version__)


def refusal(argv: list[str]) -> str | None:
    """None: nothing. "unknown": this Megatron-LM does not have one of the flags."""
    sys.argv = ["pretrain_gpt.py", *argv]
    try:
        refusals.check(parse_args(), PARSER, accepted=())
    except ConfigError as error:
        return str(error)
    except SystemExit:
        return "unknown"
    return None


if __name__ == "__main__":
    cases, out = map(Path, sys.argv[1:])
    out.write_text(json.dumps({name: refusal(argv) for name, argv in json.loads(cases.read_text()).items()}))
