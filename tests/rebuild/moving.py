"""Run as a job of three ranks: layers move between workers, some of which have not what the others send."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.config import config_from_argv
from odyssey_megatron.errors import TensorsDiffer
from odyssey_megatron.launch.rank.member import Member
from odyssey_megatron.plan.layout import layout_from_routes, pipeline_route
from odyssey_megatron.plan.placing.slices import Span, elements
from odyssey_megatron.plan.plan import Transfer
from odyssey_megatron.rebuild.groups import GroupSet, build_groups, init_default_group
from odyssey_megatron.rebuild.manifest import Tensors
from odyssey_megatron.rebuild.transfer import Moving, Spreading, Way
from tests.launch.toy import posted_job

TRANSFERS = (Transfer(layer=1, source=0, target=1), Transfer(layer=3, source=2, target=0))

WHOLE = {"weight": torch.ones(3, 5), "bias": torch.ones(3), "weight.momentum": torch.ones(3, 5)}
OTHERS: dict[str, Tensors] = {
    "less": {name: one for name, one in WHOLE.items() if name != "weight.momentum"},
    "shape": WHOLE | {"weight": torch.ones(5, 3)},
    "type": WHOLE | {"bias": torch.ones(3, dtype=torch.int32)},
    "name": {name.replace("momentum", "speed"): one for name, one in WHOLE.items()},
    "order": dict(reversed(WHOLE.items())),
}
"""What the receiver has of the last layer."""


def move(groups: GroupSet, rank: int, room: Tensors) -> list[Tensors]:
    """What has arrived here."""
    filled: list[Tensors] = []

    def to_fill(layer: int, part: int, span: Span) -> Tensors:
        return {name: one * 0 for name, one in (room if layer == 3 else WHOLE).items()}

    moving = Moving(
        [one for one in TRANSFERS if rank in (one.source, one.target)],
        num_layers=5,
        cell=Cell(rank=rank),
        world=groups["world"],
        ways=lambda transfer, number: [
            Way(
                part=0,
                slot=0,
                rank=transfer.target if transfer.source == rank else transfer.source,
                where={"group": groups["world"], "tag": number},
            )
        ],
        tensors_to_send=lambda layer, part, span: {name: one * (rank + 7) for name, one in WHOLE.items()},
        tensors_to_fill=to_fill,
        filled=lambda layer, part, span, tensors: filled.append(tensors),
        checkpoint=lambda: None,
    )
    moving.finish()
    return filled


def give_weights(groups: GroupSet, rank: int, mine: torch.Tensor) -> None:
    """Of each of three layers; each slice is kept by two of the three."""
    layout = layout_from_routes(3, tuple(pipeline_route((one,), (3,), (one,)) for one in range(3)))
    layout = replace(layout, keepers=((0, 1, 2), (1, 0, 2), (2, 1, 0)), copies=2)
    spreading = Spreading(
        layout,
        layout.blocks(),
        cell=Cell(rank=rank),
        world=groups["world"],
        holders_of=lambda first, last, part, parts: (groups["world"], (1, 1, 1)),
        weights_of=lambda layer, part, spans: {
            "weight": mine[layer][slice(*elements(spans[0], mine.shape[1]))]
        },
        arrived=lambda layer, part, spans, tensors: None,
    )
    spreading.begin()
    spreading.finish()


def refusal(work: object, *args: object) -> str:
    try:
        work(*args)  # type: ignore[operator]
    except TensorsDiffer as error:
        return str(error)
    return ""


def main() -> None:
    config = config_from_argv(sys.argv[1:])
    member = Member.connect(config)
    init_default_group(member)
    member.starting.post_job(*posted_job(pipeline=1, steps=1))
    generation = member.next_generation(0)
    groups = build_groups(member, generation.number, {"world": generation.members}, config)
    member.report_live(generation.number)
    rank = member.rank
    found = {case: refusal(move, groups, rank, room) for case, room in OTHERS.items()}
    found["weights"] = refusal(
        give_weights, groups, rank, torch.full((3, 2 if rank == 2 else 3), float(rank))
    )
    # The groups are as good as before: nothing was left half sent.
    arrived = move(groups, rank, WHOLE)
    assert [float(one.sum()) for tensors in arrived for one in tensors.values()] == {
        0: [9.0 * 15, 9.0 * 3, 9.0 * 15], 1: [7.0 * 15, 7.0 * 3, 7.0 * 15], 2: [],
    }[rank]  # fmt: skip
    mine = torch.full((3, 3), float(rank))
    give_weights(groups, rank, mine)
    # A row has a number of each of its slices: what this rank keeps it has stepped itself.
    assert (
        mine.tolist()
        == {
            0: [[0.0, 1.0, 0.0], [0.0, 0.0, 2.0], [2.0, 0.0, 0.0]],
            1: [[1.0, 1.0, 2.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0]],
            2: [[0.0, 2.0, 2.0], [1.0, 2.0, 2.0], [2.0, 1.0, 2.0]],
        }[rank]
    )
    (Path(config.run_dir) / f"found{rank}.json").write_text(json.dumps(found))
    member.finish(generation.number)


if __name__ == "__main__":
    main()
