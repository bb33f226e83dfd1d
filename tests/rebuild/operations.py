"""Run as a job: torch.distributed's operations over groups built by ``build_groups``, and how fast they end."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from odyssey_megatron.config import config_from_argv
from odyssey_megatron.errors import OdysseyError, PeerFailed, Superseded
from odyssey_megatron.launch.rank.member import Member
from odyssey_megatron.plan.sending.generation import Generation
from odyssey_megatron.rebuild.groups import GroupSet, build_groups, init_default_group
from tests.launch.toy import posted_job


class Checks:
    """Everything that library code may do with a group. All members call the same ones in the same order."""

    def __init__(self, group: dist.ProcessGroup, members: tuple[int, ...], rank: int):
        self.group, self.members, self.n = group, members, len(members)
        self.rank, self.at = rank, members.index(rank)
        self.total = sum(members)

    def mine(self) -> torch.Tensor:
        return torch.full((4,), float(self.rank))

    def all_reduce(self) -> None:
        x = self.mine()
        dist.all_reduce(x, group=self.group)
        assert float(x[0]) == self.total
        x = self.mine()
        work = dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        work.wait()
        assert work.is_completed()
        assert float(x[0]) == max(self.members)

    def broadcast_and_reduce(self) -> None:
        x = self.mine()
        dist.broadcast(x, src=self.members[-1], group=self.group)
        assert float(x[0]) == self.members[-1]
        x = self.mine()
        dist.reduce(x, dst=self.members[0], group=self.group)
        if self.at == 0:
            assert float(x[0]) == self.total

    def gather_and_scatter(self) -> None:
        parts = [torch.zeros(4) for _ in self.members]
        dist.all_gather(parts, self.mine(), group=self.group)
        assert [float(p[0]) for p in parts] == list(map(float, self.members))
        whole = torch.zeros(4 * self.n)
        dist.all_gather_into_tensor(whole, self.mine(), group=self.group)
        assert whole[::4].tolist() == list(map(float, self.members))
        part = torch.zeros(4)
        dist.reduce_scatter_tensor(part, torch.arange(4.0 * self.n), group=self.group)
        assert float(part[0]) == self.n * 4.0 * self.at
        first = self.at == 0
        dist.gather(self.mine(), parts if first else None, dst=self.members[0], group=self.group)
        dist.scatter(part, parts if first else None, src=self.members[0], group=self.group)
        assert float(part[0]) == self.rank

    def all_to_all(self) -> None:
        out = torch.zeros(self.n)
        dist.all_to_all_single(out, torch.full((self.n,), float(self.rank)), group=self.group)
        assert out.tolist() == list(map(float, self.members))

    def objects(self) -> None:
        found = [None] * self.n
        dist.all_gather_object(found, {"rank": self.rank}, group=self.group)
        assert found == [{"rank": rank} for rank in self.members]

    def messages(self) -> None:
        after, before = (self.at + 1) % self.n, (self.at - 1) % self.n
        x, y = self.mine(), torch.zeros(4)
        sent = dist.isend(x, group=self.group, group_dst=after, tag=3)
        dist.irecv(y, group=self.group, group_src=before, tag=3).wait()
        sent.wait()
        assert float(y[0]) == self.members[before]
        ops = [
            dist.P2POp(dist.isend, x, group=self.group, group_peer=after, tag=4),
            dist.P2POp(dist.irecv, y, group=self.group, group_peer=before, tag=4),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert float(y[0]) == self.members[before]

    def tags_out_of_order(self) -> None:
        after, before = (self.at + 1) % self.n, (self.at - 1) % self.n
        sent = [
            dist.isend(torch.full((2,), float(tag)), group=self.group, group_dst=after, tag=tag)
            for tag in range(5)
        ]
        for tag in reversed(range(5)):
            y = torch.zeros(2)
            dist.irecv(y, group=self.group, group_src=before, tag=tag).wait()
            assert float(y[0]) == tag
        for work in sent:
            work.wait()

    def barrier_and_queries(self) -> None:
        dist.barrier(group=self.group)
        assert dist.get_rank(self.group) == self.at
        assert dist.get_world_size(self.group) == self.n
        assert dist.get_process_group_ranks(self.group) == list(self.members)
        assert dist.get_global_rank(self.group, 0) == self.members[0]
        assert dist.get_group_rank(self.group, self.rank) == self.at

    def ddp(self) -> None:
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1), process_group=self.group)
        model(self.mine()).sum().backward()
        assert float(model.module.weight.grad[0, 0]) == self.total / self.n

    def two_threads(self) -> None:
        """Each waits in a helper of its own."""
        after, before = (self.at + 1) % self.n, (self.at - 1) % self.n
        y = torch.zeros(4)
        receiver = threading.Thread(
            target=lambda: dist.irecv(y, group=self.group, group_src=before, tag=9).wait()
        )
        receiver.start()
        time.sleep(0.02)
        dist.isend(self.mine(), group=self.group, group_dst=after, tag=9).wait()
        receiver.join()
        assert float(y[0]) == self.members[before]

    def run(self) -> None:
        for check in (
            self.all_reduce, self.broadcast_and_reduce, self.gather_and_scatter, self.all_to_all,
            self.objects, self.messages, self.tags_out_of_order, self.barrier_and_queries, self.ddp,
            self.two_threads,
        ):  # fmt: skip
            check()


def blocked(name: str, groups: GroupSet, member: Member, generation: Generation) -> float:
    """Blocks all ranks but 0, which asks for a new generation; how long the others took to leave, in seconds."""
    group = groups["world"]
    if member.rank == 0:
        time.sleep(0.2)
        member.reports.ask_retry(generation.number, name)
        while not member.newer_than(generation.number):
            time.sleep(0.001)
        return 0.0
    operation = {
        "recv": lambda: dist.recv(torch.zeros(4), group=group, group_src=0),
        "large recv": lambda: dist.recv(torch.zeros(1 << 20), group=group, group_src=0),
        "send": lambda: dist.send(torch.zeros(1 << 20), group=group, group_dst=0),
        "all_reduce": lambda: dist.all_reduce(torch.zeros(4), group=group),
        "large all_reduce": lambda: dist.all_reduce(torch.zeros(1 << 20), group=group),
        "barrier": lambda: dist.barrier(group=group),
        "object": lambda: dist.all_gather_object([None] * 3, 1, group=group),
        "chain": lambda: dist.recv(torch.zeros(4), group=group, group_src=member.rank - 1),
    }[name]
    try:
        operation()
    except (Superseded, PeerFailed):
        left_s = time.monotonic()
    else:
        raise AssertionError(f"{name} came back")
    try:
        operation()
    except (Superseded, PeerFailed):
        pass
    else:
        raise AssertionError(f"{name} works after the end of its generation")
    return left_s


def one_generation(member: Member, generation: Generation, groups: GroupSet, folder: Path, name: str) -> None:
    members, rank = generation.members, member.rank
    assert set(groups) == {"world", f"solo:{rank}"} | ({"pair"} if rank != 1 else set())
    Checks(groups["world"], members, rank).run()
    if rank in (0, 2):
        Checks(groups["pair"], (0, 2), rank).run()
    alone = Checks(groups[f"solo:{rank}"], (rank,), rank)
    alone.all_reduce()
    alone.gather_and_scatter()
    member.report_live(generation.number)
    if name:
        left_s = blocked(name, groups, member, generation)
        member.next_generation(generation.number)
        (folder / f"left-{rank}-{name}").write_text(str(left_s - member.heard_s))


def main() -> None:
    config = config_from_argv(sys.argv[1:])
    member = Member.connect(config)
    init_default_group(member)
    member.starting.post_job(*posted_job(pipeline=1, steps=1))
    number = 0
    for name in (
        "recv",
        "large recv",
        "send",
        "all_reduce",
        "large all_reduce",
        "barrier",
        "object",
        "chain",
        "",
    ):
        generation = member.next_generation(number)
        number = generation.number
        named = {
            "world": generation.members,
            "pair": (0, 2),
            **{f"solo:{r}": (r,) for r in generation.members},
        }
        groups = build_groups(member, generation.number, named, config)
        one_generation(member, generation, groups, Path(config.run_dir), name)
        stale = groups["world"]
        groups.close()
        try:
            dist.all_reduce(torch.ones(1), group=stale)
        except (OdysseyError, ValueError):  # ValueError: torch no longer knows the group
            pass
        else:
            raise AssertionError("a closed group works")
    member.finish(number)


if __name__ == "__main__":
    main()
