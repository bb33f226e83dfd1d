"""Jobs under the rules of CUDA and NCCL (``machine.py``, ``device.py``, ``communicators.py``): no timing lets them
hang, read what is not there, or come to other numbers than one process. The ranks run the product's own runtime,
recovery and decisions.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from tests.execute.alone import LAYERS  # noqa: E402
from tests.execute.model import Stack  # noqa: E402
from tests.strict.cases import DEVICES, POINTS, TIGHT, case, healthy, profile  # noqa: E402
from tests.strict.checking import check  # noqa: E402
from tests.strict.job import Case, Kill, one_process  # noqa: E402
from tests.strict.machine import this_host  # noqa: E402

PLANS, TIMINGS = 200, 20
"""What the tests marked ``matrix`` try; the others try a few."""


def spans(published):
    """What a rank has measured of its layers, without the probe."""
    return [one for one in json.loads(published)["spans"] if one["last"]]


def seeds(number, count):
    return [1000 * number + at for at in range(count)]


@pytest.mark.parametrize("number", range(4))
def test_random_jobs(number):
    for seed in seeds(number, 2):
        check(case(number), seed)


@pytest.mark.parametrize("number", range(4))
def test_random_jobs_with_slices_of_optimizer_state(number):
    for seed in seeds(number, 2):
        check(case(number, copies=2), seed)


@pytest.mark.parametrize("number", [4, 5])
def test_random_jobs_on_one_hardware_queue(number):
    """Whatever stages a worker has got of a dead one's."""
    check(replace(case(number), **TIGHT), seed=number)


@pytest.mark.parametrize("kills", [(), (Kill(rank=2, step=1, point="backward"),)])
def test_routes_that_turn_on_one_hardware_queue(kills):
    """Down the two workers and up again: each sends the other forwards and gradients, of two stages."""
    ample = replace(profile().costs, link_latency_s=0.0, link_bytes_per_s=1e12, memory_bytes=10**9)
    quick = replace(profile(), costs=ample)
    turning = Case(stages=2, replicas=2, steps=2, profile=quick, virtual_stages=2, kills=kills, **TIGHT)
    for seed in range(3):
        ended = check(turning, seed)
        if not kills:
            both_ends = [{0, LAYERS - 1} <= {layer for layer, _ in rank.weights} for rank in ended.ranks]
            assert sorted(both_ends) == [False, False, True, True]


@pytest.mark.matrix
@pytest.mark.timeout(3600)
@DEVICES
@pytest.mark.parametrize("part", range(20))
def test_all_random_jobs(part, device):
    for number in range(part, PLANS, 20):
        for seed in seeds(number, TIMINGS):
            check(replace(case(number), **device), seed)


@pytest.mark.matrix
@pytest.mark.timeout(3600)
@DEVICES
@pytest.mark.parametrize("part", range(20))
def test_all_random_jobs_with_slices_of_optimizer_state(part, device):
    for number in range(part, PLANS, 20):
        for seed in seeds(number, TIMINGS):
            check(replace(case(number, copies=2), **device), seed)


@pytest.mark.parametrize("point", POINTS)
def test_any_moment_of_a_step_on_one_hardware_queue(point):
    killed = healthy(steps=3, kills=(Kill(rank=1, step=1, point=point),), **TIGHT)
    assert check(killed, seed=POINTS.index(point)).outcomes()


@pytest.mark.parametrize("point", ["reduce", "agreement", "optimizer", "param_gather"])
def test_any_moment_of_slices_on_one_hardware_queue(point):
    kill = Kill(rank=1, step=1, point=point)
    killed = healthy(stages=2, replicas=3, steps=3, copies=2, kills=(kill,), **TIGHT)
    assert check(killed, seed=0).outcomes()


def test_a_failure_costs_the_others_nothing_though_hosts_run_ahead():
    """What has been queued behind the failure computes with garbage, and counts for nothing: the step goes on."""
    kill = Kill(rank=1, step=1, point="backward", microbatch=3)
    one = healthy(stages=4, replicas=1, kills=(kill,), flags={"policy": "reroute", "redundancy": "state"})
    outcomes = [outcome for seed in range(4) for outcome in check(one, seed).outcomes()]
    assert set(outcomes) <= {"resume", "finish"}, "finish: somebody had not heard of the step before yet"
    assert "resume" in outcomes


def test_clean_communicators_outlive_a_failure():
    """Behind the last step nothing is outstanding: only what has other members than before is connected."""
    kill = Kill(rank=0, step=1, point="commit")
    ended = check(healthy(stages=3, kills=(kill,), flags={"policy": "reroute"}), seed=0)
    assert ended.connected(2), "the dead worker's neighbours have new ones"
    assert not ended.connected(1) & ended.connected(2)


def test_however_many_a_rank_has_may_outlive_a_failure():
    """In a large job, where many others take a dead worker's microbatches, dozens. Here one of them was given more on
    one rank, and a third rank has none.
    """
    from odyssey_megatron.rebuild.abort import Use
    from odyssey_megatron.rebuild.kept import Communicator, Spare
    from tests.strict.between_hosts import HostAbort, HostEnd, Table
    from tests.strict.communicators import End, Wire
    from tests.strict.device import DeviceMemory
    from tests.strict.machine import Machine

    machine, table, taken, ends = Machine(seed=1), Table(3), {}, {0: {}, 1: {}, 2: {}}
    wires = {f"0>{number}": Wire(f"0>{number}", 2, lazy=False) for number in range(1, 71)}

    def rank(own):
        def main():
            memory, spare = DeviceMemory(machine.device(own)), Spare()
            for name, wire in wires.items() if own < 2 else ():
                use, end = Use(), End(wire, own, memory)
                use.given, ends[own][name] = int(name == "0>9" and own == 1), end
                wire.ends[own] = end
                spare.lay_by(
                    [Communicator(name=name, number=1, ranks=(0, 1), backend=end, store=None, use=use)]
                )
            wanted = dict.fromkeys(wires, (0, 1)) if own < 2 else {}
            world = HostEnd(table, own, machine, HostAbort())
            taken[own] = spare.take(wanted, world, (0, 1, 2))

        return main

    for number in range(3):
        machine.host(f"rank {number}", rank(number))
    with one_process():
        machine.run()
    assert [len(taken[own]) for own in range(3)] == [69, 69, 0]
    goes_on = [{name: one.name for name, one in taken[own].items()} for own in (0, 1)]
    assert goes_on[0] == goes_on[1]
    for own in (0, 1):
        assert [name for name, end in ends[own].items() if end.aborted] == ["0>9"]


def test_what_is_outstanding_is_aborted_and_the_rest_outlives_it():
    """Whoever waits for a living rank may wait, by that one, for the dead."""
    kill, kept, lost = Kill(rank=0, step=1, point="backward"), 0, 0
    for seed in range(4):
        ended = check(healthy(stages=3, steps=3, kills=(kill,), flags={"policy": "reroute"}), seed)
        both = {name for name in ended.connected(1) if ">" in name and "0" not in name}
        lost += len(both & ended.connected(2))
        kept += len(both - ended.connected(2))
    assert kept
    assert lost


def test_whoever_connects_with_the_dead_is_left_behind_in_it():
    """No abort reaches a communicator that is not connected yet."""
    kills = (Kill(rank=1, step=1, point="backward"), Kill(rank=3, step=1, point="connect", generation=2))
    for seed in range(3):
        ended = check(healthy(stages=2, replicas=3, steps=3, kills=kills), seed)
        half = [name for name, wire in ended.wires.items() if "/2/" in name and not wire.connected]
        assert half, "somebody connects with the dead for ever"


def test_the_world_is_a_tree_of_hosts(monkeypatch):
    """As in jobs of more ranks than one group connects: here three levels."""
    from odyssey_megatron.rebuild import hosts

    monkeypatch.setattr(hosts, "FAN", 2)
    for seed, point in enumerate(("backward", "agreement", "commit")):
        killed = healthy(stages=2, replicas=3, steps=3, kills=(Kill(rank=seed * 2, step=1, point=point),))
        assert check(killed, seed).outcomes()


def test_what_hosts_agree_on_may_lie_on_a_device():
    """Library code hands its world whatever it has."""
    from odyssey_megatron.rebuild.hosts import StagedGroup
    from tests.strict.between_hosts import HostAbort, HostEnd, Table
    from tests.strict.device import DEVICE, DeviceMemory, on_device
    from tests.strict.machine import Machine

    machine, table, found = Machine(seed=1), Table(2), {}

    def rank(number):
        def main():
            memory = DeviceMemory(machine.device(number))
            with on_device(memory):
                group = StagedGroup(HostEnd(table, number, machine, HostAbort()), HostAbort())
                own = torch.full((2,), number + 1.0, device=DEVICE)
                group.allreduce([own]).wait()
                rooms = [torch.empty(2, device=DEVICE) for _ in range(2)]
                group.allgather([rooms], [own * (number + 1)]).wait()
                assert all(one.device == DEVICE for one in (own, *rooms))
                before = own._version
                sent, came = group.send([own], 1 - number, 7), torch.empty(2, device=DEVICE)
                group.recv([came], 1 - number, 7).wait()
                sent.wait()
                assert torch.equal(came.cpu(), own.cpu())
                assert own._version == before, "a backward pass may need what is sent, and would not take it"
                found[number] = [own.tolist(), *(one.tolist() for one in rooms)]

        return main

    for number in range(2):
        machine.host(f"rank {number}", rank(number))
    machine.run()
    assert found[0] == found[1] == [[3.0, 3.0], [3.0, 3.0], [6.0, 6.0]]


@pytest.mark.matrix
@pytest.mark.parametrize("point", ["reduce", "agreement"])
def test_what_has_been_summed_is_not_lost(point):
    """Who has summed all has his own gradients still, and goes on with them."""
    one = healthy(
        stages=1, replicas=3, kills=(Kill(rank=1, step=1, point=point),), flags={"policy": "reroute"}
    )
    outcomes = {outcome for seed in range(11) for outcome in check(one, seed).outcomes()}
    assert outcomes <= {"resume", "finish"}
    assert "resume" in outcomes


def test_sums_begin_within_the_last_input_gradient(monkeypatch):
    """Of a first stage, whose nobody waits for; the others' are behind theirs."""
    from odyssey_megatron.execute.reduction import Reduction

    begun, start, input_grad = {}, Reduction.start, Stack.input_grad
    inside = []

    def starts(self, instr, *args, **others):
        begun.setdefault(this_host() in inside, set()).add(instr.first)
        start(self, instr, *args, **others)

    def goes_back(self, *args, **others):
        inside.append(this_host())
        try:
            return input_grad(self, *args, **others)
        finally:
            inside.remove(this_host())

    monkeypatch.setattr(Reduction, "start", starts)
    monkeypatch.setattr(Stack, "input_grad", goes_back)
    check(healthy(stages=2, replicas=2, steps=1), seed=1)
    assert begun == {True: {1, 2}, False: {0, 3, 4, 5}}


@pytest.mark.parametrize("copies", [0, 2])
def test_the_host_waits_for_nothing_before_the_agreement(copies):
    one = replace(
        healthy(stages=2, replicas=3, steps=3, copies=copies, tied=True), profile=profile(tied=True)
    )
    ended = check(one, seed=1)
    assert [rank.syncs for rank in ended.ranks] == [[[], [], []]] * 6
    assert all(rank.device.syncs for rank in ended.ranks), "the agreement itself is one"
    assert not any("stopwatch" in rank.device.syncs for rank in ended.ranks), (
        "behind it all is over that is timed"
    )
    measured = [one for rank in ended.ranks for one in spans(rank.measured)]
    assert len(measured) >= len(ended.ranks)
    assert all(one["forward_s"] > 0 and one["input_grad_s"] > 0 for one in measured)


def weights_arrived(monkeypatch):
    """Of each gather whether a forward waited for it, and the layers: filled in as jobs run."""
    from odyssey_megatron.rebuild.transfer import Spreading

    inside, found, forward, end = [], set(), Stack.forward, Spreading._end

    def goes(self, *args, **others):
        inside.append(this_host())
        try:
            return forward(self, *args, **others)
        finally:
            inside.remove(this_host())

    def ends(self, one):
        found.add((this_host() in inside, *one.message.layers))
        return end(self, one)

    monkeypatch.setattr(Stack, "forward", goes)
    monkeypatch.setattr(Spreading, "_end", ends)
    return found


def test_weights_arrive_beside_the_next_forward(monkeypatch):
    """Each layer's when it computes; behind the last step, and where memory is short, before."""
    from odyssey_megatron.rebuild import transfer

    found = weights_arrived(monkeypatch)
    check(healthy(stages=2, replicas=3, steps=2, copies=2), seed=1)
    assert found == {(within, layer) for within in (False, True) for layer in range(LAYERS)}
    found.clear()
    monkeypatch.setattr(transfer, "ROOM_BYTES", 0)
    check(healthy(stages=2, replicas=3, steps=2, copies=2), seed=1)
    assert found == {(False, layer) for layer in range(LAYERS)} | {(True, 2), (True, 5)}, "the newest of each"


@pytest.mark.matrix
@DEVICES
@pytest.mark.parametrize("rank", [0, 4])
def test_killed_while_weights_arrive(rank, device):
    """In a first forward, behind which others wait for weights that this one sends."""
    kill = Kill(rank=rank, step=1, point="forward")
    for seed in range(4):
        killed = healthy(stages=2, replicas=3, steps=3, copies=2, kills=(kill,), **device)
        assert check(killed, seed).outcomes()


@pytest.mark.parametrize("copies", [2, 3])
def test_the_second_copys_sums_follow_each_bucket(monkeypatch, copies):
    """They run beside what is left. Where two others need the same sums, those are sent when all are made."""
    from tests.strict.communicators import End

    given, give = {}, End._give

    def gives(self, kind, *args, **others):
        if kind in ("scatter SUM", "alltoall"):
            given.setdefault((self.rank(), self.wire.name), []).append(kind[0])
        return give(self, kind, *args, **others)

    monkeypatch.setattr(End, "_give", gives)
    check(healthy(stages=1, replicas=4, steps=1, copies=copies), seed=1)
    expected = "sa" * LAYERS if copies == 2 else "s" * LAYERS + "a" * LAYERS
    assert {"".join(kinds) for kinds in given.values()} == {expected}
