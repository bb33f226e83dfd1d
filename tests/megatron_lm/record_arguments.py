"""Writes down what Megatron-LM's own parser knows: each flag, its destination, what it sets if it takes no value, and
which values it takes, if not any: ``int``, ``float``, or ``a|b|c``.

MEGATRON_LM_PATH=... python tests/megatron_lm/record_arguments.py patches/<tag>/arguments.txt
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parent.parent.parent


def lines() -> list[str]:
    """One for each flag, in the order of the parser."""
    from megatron.post_training.arguments import add_modelopt_args
    from megatron.training.arguments import add_megatron_arguments

    # pretrain_gpt.py adds the latter where Model Optimizer is installed.
    parser = add_modelopt_args(add_megatron_arguments(argparse.ArgumentParser(add_help=False)))
    return [
        f"{flag} {action.dest}" + (f"={_constant(action, flag)}" if action.nargs == 0 else _takes(action))
        for action in parser._actions
        for flag in action.option_strings
    ]


def _constant(action: argparse.Action, flag: str) -> object:
    if isinstance(action, argparse.BooleanOptionalAction):
        return not flag.startswith("--no-")
    return action.const


def _takes(action: argparse.Action) -> str:
    if action.choices:
        return " " + "|".join(str(getattr(one, "name", one)) for one in action.choices)
    return f" {action.type.__name__}" if action.type in (int, float) else ""


if __name__ == "__main__":
    if "megatron.training" not in sys.modules:  # else in a process that has imported what a rank imports
        sys.path.insert(0, str(CHECKOUT))
        import tests.megatron_lm.preload  # noqa: F401
    Path(sys.argv[1]).write_text("\n".join(lines()) + "\n")
