"""Sums of gradients of which each holder needs some slices: those who keep one have the same bytes of it, whether they
are passed on one by one or all at the end.
"""

from __future__ import annotations

import multiprocessing
import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")


def holder(rank: int, ranks: tuple[int, ...], folder: Path) -> None:
    """Of holders that have so many ``ranks``, which have the same gradients to sum."""
    import torch.distributed as dist

    from odyssey_megatron.execute.scatter import GradientRows, Slices
    from odyssey_megatron.plan.placing.stretches import Seats

    size = sum(ranks)
    if dist.is_initialized():  # this is a fork of the test process, where other tests need a group
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    holders, draw = len(ranks), random.Random(3)
    for case in range(8):
        sizes = [draw.choice([0, 1, 5, 17]) for _ in range(3 * holders)] + [2]
        owners = [tuple(draw.sample(range(holders), min(2, holders))) for _ in sizes]
        everyone = [
            torch.randn(sum(sizes), generator=torch.Generator().manual_seed(100 * case + one))
            for one in range(size)
        ]
        mine, expected = everyone[rank].clone(), 0.5 * torch.stack(everyone).double().sum(0)
        views = torch.split(mine, sizes)
        # A slice may be of several parameters.
        count = max(ranks)  # of stretches
        stretch = [at % count for at in range(len(sizes))]
        slices = [
            Slices(who, [*torch.tensor_split(view, 2)], number, count)
            for who, view, number in zip(owners, views, stretch, strict=True)
        ]
        rows = GradientRows(slices, ranks, dist.group.WORLD)
        assert rows.passes_on
        seats = Seats(ranks, count)
        at_once = case % 2
        for low in range(0, rows.width, 7):
            high = min(low + 7, rows.width)
            sums, work = rows.sum(rows.packed(low, high, 0.5))
            work.wait()
            pairs, behind = rows.pass_on(sums, low, high) if at_once else ([], work)
            behind.wait()
            for view, total in [
                *pairs,
                *((view, sums[at : at + view.numel()]) for at, view in rows.own(low, high)),
            ]:
                view.copy_(total)
        for view, total in [] if at_once else rows.exchange():
            view.copy_(total)
        found = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(found, mine)
        at = 0
        for who, number, one in zip(owners, sizes, stretch, strict=True):
            here, keep = slice(at, at + number), {seats.keeping(holder, one) for holder in who}
            for other in range(size):
                if {rank, other} <= keep:
                    assert torch.allclose(mine[here].double(), expected[here], atol=1e-5)
                    assert torch.equal(mine[here], found[other][here])
            at += number
    (folder / f"done{rank}").touch()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [(1, 1), (1, 1, 1), (1, 1, 1, 1), (2, 2), (2, 1), (1, 4, 2), (4, 3)])
def test_all_who_keep_a_slice_have_its_sums(tmp_path, ranks):
    fork = multiprocessing.get_context("fork")
    started = [fork.Process(target=holder, args=(rank, ranks, tmp_path)) for rank in range(sum(ranks))]
    for one in started:
        one.start()
    for one in started:
        one.join(60)
        one.kill()
    assert len([*tmp_path.glob("done*")]) == sum(ranks)
