"""The number of GPUs on which a launch script starts its job, from what it tells its launcher, or else Slurm."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise, takewhile

# Of torchrun, DeepSpeed and mpirun.
_NODES = ("nnodes", "num-nodes")
_PER_NODE = ("nproc-per-node", "num-gpus", "npernode")
_RANKS = ("np",)
_SLURM_NODES = ("nodes", "N")
_SLURM_PER_NODE = ("gpus-per-node", "gres", "ntasks-per-node")
_GPUS = re.compile(r"(?:gpu:)?(?:[\w.-]+:)?(\d+)(?:\(.*\))?")
"""As Slurm writes them: ``8``, ``h100:8``, ``gpu:8`` and ``gpu:h100:8``."""


def nodes_and_gpus(launcher: Sequence[str]) -> tuple[int, int] | None:
    """Nodes, and the GPUs of each, by the words before a job's script; None: one of the two is not said, or only
    running it would tell.
    """
    slurm = list(takewhile(lambda word: not word.endswith("numactl"), launcher))  # which has a -N of its own
    given, told = _values(launcher), _values(slurm)
    gpus = _number(given, _PER_NODE) or _number(told, _SLURM_PER_NODE)
    usual = 1 if _PER_NODE[0] in given and _NODES[0] not in given else None  # torchrun's
    nodes = _number(given, _NODES) or usual or _number(told, _SLURM_NODES)
    if gpus and (ranks := _number(given, _RANKS)):
        nodes = ranks // gpus
    return (nodes, gpus) if nodes and gpus else None


def slurm_variables(told: Sequence[str]) -> dict[str, list[str]]:
    """The variables that Slurm sets for a job which ``told`` are the options of, as far as these say."""
    values = _values(told)
    nodes, tasks = _number(values, _SLURM_NODES), _number(values, ("ntasks-per-node",))
    gpus = _number(values, ("gpus-per-node", "gres"))
    found = {
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NTASKS_PER_NODE": tasks,
        "SLURM_NTASKS": _number(values, ("ntasks", "n")) or (nodes * tasks if nodes and tasks else None),
        "SLURM_GPUS_ON_NODE": gpus,
        "SLURM_GPUS_PER_NODE": gpus,
    }
    return {name: [str(value)] for name, value in found.items() if value}


def _values(words: Sequence[str]) -> dict[str, str]:
    """Flag, without dashes -> its value; the last one if it is given several times."""
    found = {}
    for word, behind in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            found[name[2:].replace("_", "-")] = value if equals else behind
        elif word == "-np":
            found["np"] = behind
        elif word.startswith("-N"):
            found["N"] = word[2:].removeprefix("=") or behind
    return found


def _number(values: dict[str, str], names: Sequence[str]) -> int | None:
    """The number of GPUs or nodes that the first of the flags ``names`` with one says; None: none does."""
    for name in names:
        for one in values.get(name, "").split(","):
            if (said := _GPUS.fullmatch(one)) and (name != "gres" or one.startswith("gpu:")) and int(said[1]):
                return int(said[1])
    return None
