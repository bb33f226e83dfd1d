"""Mistakes that the twin of NCCL and CUDA must see: each is made on purpose, in the product."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from odyssey_megatron.launch.rank import member  # noqa: E402
from odyssey_megatron.plan.schedule import Op  # noqa: E402
from tests.strict import communicators, machine  # noqa: E402
from tests.strict.cases import TIGHT, case, changing, healthy  # noqa: E402
from tests.strict.checking import check  # noqa: E402
from tests.strict.communicators import OrdersDiffer  # noqa: E402
from tests.strict.job import Kill  # noqa: E402
from tests.strict.machine import Deadlock, this_host  # noqa: E402

PLANS, TIMINGS = 200, 20
"""What the tests marked ``matrix`` try; the others try a few."""


@pytest.mark.parametrize("device", [{}, {"one_queue": True, "resident": 1}], ids=["no copies", "one place"])
def test_a_swapped_order_of_groups_is_seen(monkeypatch, device):
    """Of two blocks that the same workers hold, one sums the gradients of the other first. Without room for copies, or
    for a second kernel, each sum waits for the one before.
    """
    from odyssey_megatron.execute import reduction
    from odyssey_megatron.execute.interpreter import Interpreter

    run = Interpreter.run

    def swapped(self, program, trace, progress):
        sums = [at for at, one in enumerate(program) if one.op is Op.REDUCE_GRAD]
        if this_host().name == "rank 0":
            program = [*program]
            program[sums[0]], program[sums[-1]] = program[sums[-1]], program[sums[0]]
        run(self, program, trace, progress)

    if not device:
        monkeypatch.setattr(reduction, "ROOM_BYTES", 0)
    one = healthy(stages=2, replicas=1, flags={"redundancy": "state"}, **device)
    check(one, seed=1)
    monkeypatch.setattr(Interpreter, "run", swapped)
    with pytest.raises(Deadlock, match=r"allreduce SUM of \S+ began"):
        check(one, seed=1)


def test_a_swapped_order_of_messages_is_seen(monkeypatch):
    """One channel carries two, which both are received before the first is used: no tag tells them apart, and they are
    of one size, so that each microbatch goes on with the other's, and nothing but its numbers says so.
    """
    from odyssey_megatron.execute.interpreter import Interpreter

    run = Interpreter.run

    def swapped(self, program, trace, progress):
        if this_host().name == "rank 2":
            first, second, *_ = [at for at, one in enumerate(program) if one.op is Op.RECV_FORWARD]
            assert all(one.op is not Op.FORWARD for one in program[:second])
            program = [*program]
            program[first], program[second] = program[second], program[first]
        run(self, program, trace, progress)

    monkeypatch.setattr(Interpreter, "run", swapped)
    with pytest.raises(AssertionError, match="comparison failed"):
        check(healthy(stages=3), seed=1)


def test_kernels_that_do_not_fit_are_seen():
    """Of two neighbours each waits to receive, and then nobody has room to send."""
    for one_queue in (False, True):
        one = healthy(stages=3, replicas=1, flags={"redundancy": "state"}, one_queue=one_queue, resident=1)
        with pytest.raises(Deadlock, match=r"recv of \S+ began"):
            check(one, seed=1)
    check(replace(one, resident=TIGHT["resident"]), seed=1)
    with pytest.raises(
        Deadlock, match=r"recv of \S+ began"
    ):  # whatever starts first, beside layers that move
        check(replace(changing("move", 2), resident=TIGHT["resident"]), seed=0)


def test_a_communicator_that_is_kept_with_something_outstanding_is_seen(monkeypatch):
    from odyssey_megatron.rebuild.abort import Use

    monkeypatch.setattr(Use, "is_clean", property(lambda self: self.connected))
    kill = Kill(rank=0, step=1, point="backward")
    with pytest.raises((Deadlock, OrdersDiffer)):
        [
            check(healthy(stages=3, steps=3, kills=(kill,), flags={"policy": "reroute"}), one)
            for one in range(4)
        ]


def test_a_kernel_that_waits_for_the_dead_is_seen_though_its_work_is_said_to_be_completed(monkeypatch):
    from odyssey_megatron.rebuild import abort

    kill = Kill(rank=0, step=1, point="backward")
    monkeypatch.setattr(abort, "_is_through", lambda work: work.is_completed())
    with pytest.raises(Deadlock):
        [
            check(healthy(stages=3, steps=3, kills=(kill,), flags={"policy": "reroute"}), one)
            for one in range(4)
        ]


def test_messages_that_are_connected_when_they_are_first_sent_are_seen(monkeypatch):
    """A worker of one microbatch receives its gradient ahead of sending its activation, to the same one."""
    from tests.strict.communicators import End

    one, seed = replace(case(5), one_queue=True), 5
    assert check(one, seed).wires["groups/2/0>2"].lazy
    monkeypatch.setattr(End, "first_message", lambda self, way: None)
    with pytest.raises(Deadlock):
        check(one, seed)


def test_a_message_that_is_used_before_its_event_is_seen(monkeypatch):
    from odyssey_megatron.execute.channels import Pending
    from tests.strict.device import Race

    def wait(self):
        ((_, arrives, (room,)),) = self.pieces
        return arrives[:-1].view(room.shape), arrives[-1]  # it waits for nothing

    monkeypatch.setattr(Pending, "wait", wait)
    with pytest.raises(Race, match="may still be using"):
        check(healthy(), seed=1)


def test_a_forward_that_does_not_wait_for_its_weights_is_seen(monkeypatch):
    from odyssey_megatron.rebuild.transfer import Spreading
    from tests.strict.device import Race

    sliced = healthy(stages=2, replicas=3, steps=3, copies=2)
    with monkeypatch.context() as patch:
        patch.setattr(Spreading, "arrive", lambda self, layer: None)
        with pytest.raises(AssertionError, match="Max relative difference"):
            check(sliced, seed=1)
    end, nothing = Spreading._end, SimpleNamespace(wait=lambda: True)
    monkeypatch.setattr(Spreading, "_end", lambda self, one: end(self, replace(one, work=nothing)))
    with pytest.raises(Race, match="may still be using"):
        check(sliced, seed=1)


def test_a_send_before_its_producers_event_is_seen(monkeypatch):
    from tests.strict.communicators import End
    from tests.strict.device import Race

    def send(self, tensors, peer, tag=0):
        return self._give("send", tensors, peer=peer, after=None)  # it waits for nothing

    monkeypatch.setattr(End, "send", send)
    with pytest.raises(Race, match=r"send of \S+ on \S+ reads memory"):
        check(healthy(), seed=1)


def test_a_reused_buffer_is_seen(monkeypatch):
    from odyssey_megatron.execute.channels import Channels, MessagePart, Pending
    from tests.strict.device import Race

    rooms = {}

    def receive(self, instr, room, *, with_word):
        message = rooms.setdefault(id(self), room.new_empty(room.numel() + 1))
        ((peer, *_),) = self._ends_at(instr.peer)
        work = torch.distributed.irecv(message, peer, **self._where(instr, peer))
        return Pending([MessagePart(work, message, [room])], room, with_word)

    monkeypatch.setattr(Channels, "receive", receive)
    with pytest.raises(Race, match=r"reads memory that recv of \S+ on \S+ may still be using"):
        check(healthy(stages=3), seed=1)


def test_a_sum_in_place_is_seen(monkeypatch):
    """As long as a holder is missing nothing is summed, and the step goes on. In place, what an abort leaves of a sum
    would count as gradients: so they are copied, and back when it is whole.
    """
    from odyssey_megatron.execute.reduction import Reduction

    def start(self, instr, own, group, ranks, share, progress):
        for buffer in own.gradients:
            if group is not None:
                torch.distributed.all_reduce(buffer, group=group)
                progress.summed(instr, self._ledger.word(), buffer, None)

    kill = Kill(rank=1, step=1, point="reduce")
    one = healthy(stages=1, replicas=3, kills=(kill,), flags={"policy": "reroute"})
    assert {outcome for seed in range(4) for outcome in check(one, seed).outcomes()} <= {"resume", "finish"}
    monkeypatch.setattr(Reduction, "start", start)
    with pytest.raises(AssertionError, match="differs"):
        [check(one, seed) for seed in range(8)]


@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_an_abort_before_others_have_heard_is_seen(monkeypatch):
    """They would take for messages what it leaves, if any are under way: in a few of these jobs. As it is, or if they
    are not waited for and the step is done again, nothing of it counts.
    """
    seen = []
    for number in range(16):
        kill = Kill(rank=number % 6, step=1, point=("forward", "backward")[number % 2], microbatch=number % 3)
        one = healthy(stages=3, replicas=2, steps=2, kills=(kill,))
        assert check(one, number)
        with monkeypatch.context() as mistaken:
            mistaken.setattr(member, "fallen_everywhere", lambda *of: False)
            assert check(one, number)
            mistaken.setattr(member, "fallen_everywhere", lambda *of: True)
            try:
                check(one, number)
            except AssertionError:
                seen.append(number)
    assert seen


def test_both_ways_of_neighbours_in_one_stream_are_seen(monkeypatch):
    """Of a device's streams there are few, and communicators that outlive failures keep theirs."""
    monkeypatch.setattr(machine, "_RING", 1)
    jobs = [healthy(stages=stages, replicas=1, flags={"redundancy": "state"}) for stages in (3, 4)]
    for one in jobs:
        check(one, seed=0)
    monkeypatch.setattr(communicators, "comes_first", lambda way: False)
    for one in jobs:
        with pytest.raises(Deadlock):
            check(one, seed=0)
