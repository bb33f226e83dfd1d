"""I5: what the survivors make of where they stand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from odyssey_megatron.plan.layout import layout_from_routes, megatron_layout, pipeline_route
from odyssey_megatron.plan.scheduling.generate import build_schedule
from tests.plan.samples import uniform_costs

torch = pytest.importorskip("torch")


def standing(done: int, ready: bool = False):
    from odyssey_megatron.rebuild.agree import Standing

    return Standing(done=done, ready=ready)


def test_nobody_came_out_of_the_agreement_so_all_do_the_step_again():
    from odyssey_megatron.rebuild.agree import left_behind

    assert not left_behind([standing(4), standing(4, ready=True), standing(4)])


def test_one_came_out_so_all_finish():
    from odyssey_megatron.rebuild.agree import left_behind

    assert left_behind([standing(4, ready=True), standing(5), standing(4, ready=True)])


@pytest.mark.parametrize(
    "standings",
    [
        [standing(5), standing(4, ready=False)],  # it cannot have entered, so nobody can have come out
        [standing(6), standing(4, ready=True)],  # two steps apart
    ],
)
def test_what_cannot_be_stops_the_job(standings):
    from odyssey_megatron.rebuild.agree import AgreementBroken, left_behind

    with pytest.raises(AgreementBroken):
        left_behind(standings)


def test_phases_follow_the_table():
    """Every phase but ABORT can be cut short, and the way back into training is the whole way."""
    from odyssey_megatron.recover import NEXT, Phase

    assert all(Phase.ABORT in NEXT[phase] for phase in Phase if phase is not Phase.ABORT)
    path = [Phase.ABORT]
    while path[-1] is not Phase.TRAIN:
        path.append(next(phase for phase in NEXT[path[-1]] if phase is not Phase.ABORT))
    assert path == list(Phase)
    assert all(b in NEXT[a] for a, b in itertools.pairwise(path))


def progress_of(layout, *instructions):
    from odyssey_megatron.execute.progress import Progress
    from odyssey_megatron.plan.schedule import parse_instr

    progress = Progress(layout.num_microbatches, layout.num_layers, keeps=True)
    for text in instructions:
        instr = parse_instr(text)
        progress.reached(instr, instr.op)
    return progress


def test_what_a_rank_has_done_stays_if_the_plan_lets_it():
    from odyssey_megatron.execute.interrupted import can_resume
    from odyssey_megatron.plan.schedule import parse_instr
    from odyssey_megatron.plan.scheduling.smaller import StepPlan

    layout = layout_from_routes(4, (pipeline_route((0, 1), (2, 4), (0,)),))
    device, program = torch.device("cpu"), (parse_instr("F0[0:2]"), parse_instr("B0[0:2]"))
    plan = StepPlan(layout=layout, program=program)
    assert can_resume(None, plan, 0, progress_of(layout), device), "it has not begun"
    assert can_resume(None, plan, 0, progress_of(layout, "F0[0:2]", "I0[0:2]"), device)
    assert not can_resume(None, plan, 1, progress_of(layout, "F0[0:2]"), device), "now another worker's"
    assert not can_resume(None, plan, 0, progress_of(layout, "F0[0:3]"), device), "the plan cuts it"
    assert not can_resume(None, plan, 0, progress_of(layout, "F0[0:1]"), device), "layers would run apart"


def test_a_rank_reads_little_of_a_large_job_to_go_on_with_a_step():
    """One of 16,384 GPUs: 2,048 workers in pipelines of 16, and 32 microbatches in each of these."""
    from odyssey_megatron.cluster.cell import Cell
    from odyssey_megatron.plan.scheduling.smaller import StepPlan
    from tests.benchmarks.going_on import go_on

    pipeline = megatron_layout(num_layers=82, pipeline_size=16, num_workers=16, num_microbatches=32)
    schedule = build_schedule(pipeline, uniform_costs(82))
    for worker in (0, 7, 15):
        plan = StepPlan(layout=replace(pipeline, step_microbatches=4096), program=schedule.program(worker))
        exchanged_bytes, _ = go_on(plan, Cell(rank=8 * worker, size=8))
        assert exchanged_bytes <= 65536


def test_gradients_that_were_cut_off_half_way_do_not_stay():
    from odyssey_megatron.execute.interrupted import can_resume
    from odyssey_megatron.plan.scheduling.smaller import StepPlan

    layout = layout_from_routes(4, (pipeline_route((0, 1), (2, 4), (0,)),))
    progress = progress_of(layout, "F0[0:2]")
    with progress.adding():
        pass
    assert progress.whole
    with pytest.raises(RuntimeError), progress.adding():
        raise RuntimeError("a collective of the cell was aborted")
    assert not can_resume(None, StepPlan(layout=layout, program=()), 0, progress, torch.device("cpu"))


def test_weight_gradients_that_ran_beside_their_input_gradient_are_done():
    """The input gradient is noted behind them, and makes nothing undone."""
    from odyssey_megatron.plan.schedule import parse_instr
    from odyssey_megatron.plan.scheduling.resume import Levels, cuts_of, levels_at, rest

    layout = layout_from_routes(4, (pipeline_route((0,), (4,), (0,)),))
    progress = progress_of(layout, "F0[0:4]")
    upper, whole = parse_instr("W0[2:4]"), parse_instr("I0[0:4]")
    with progress.adding():
        with progress.adding():
            progress.reached(upper, upper.op)
        assert not progress.whole
        progress.reached(whole, whole.op)
    assert progress.whole
    assert progress.table.tolist() == [[6, 2, 7, 3]]
    program = tuple(
        map(parse_instr, "I0[0:4] W0[2:4] REDUCE_GRAD[2:4] W0[0:2] REDUCE_GRAD[0:2] STEP".split())
    )
    cuts = cuts_of(layout) | {2}
    left = rest(program, progress.rows(), Levels(cuts, levels_at(cuts, progress.table.numpy())))
    assert " ".join(map(str, left)) == "REDUCE_GRAD[2:4] W0[0:2] REDUCE_GRAD[0:2] STEP"


def test_what_became_a_sum_for_good_beside_an_input_gradient_is_not_forgotten():
    """There was no room for copies."""
    from odyssey_megatron.plan.schedule import parse_instr

    layout = layout_from_routes(4, (pipeline_route((0,), (4,), (0,)),))
    progress = progress_of(layout, "F0[0:4]")
    with progress.adding():
        progress.summed(parse_instr("REDUCE_GRAD[2:4]"), None, torch.ones(1), None)
    assert not progress.whole


def test_what_ranks_that_compute_together_began_with_nothing_may_have_changed_gradients():
    """What they exchange within is garbage behind an abort; a rank alone has only zeros to add."""
    from odyssey_megatron.execute.progress import Progress
    from odyssey_megatron.plan.schedule import parse_instr

    stands, fallen = torch.ones(()), torch.zeros(())
    for alone in (True, False):
        for text in ("I0[0:4]", "W0[0:4]"):
            progress = Progress(1, 4, keeps=True, alone=alone)
            instr = parse_instr(text)
            progress.reached(instr, instr.op, stands, stands)
            progress.take_stock()
            assert progress.whole
            progress.reached(instr, instr.op, fallen, fallen)
            progress.take_stock()
            assert progress.whole is alone


def test_results_stay_until_the_step_ends_or_until_they_are_sent():
    from odyssey_megatron.execute.progress import Progress
    from odyssey_megatron.plan.schedule import Op

    output = torch.ones(2, requires_grad=True) * 3
    for keeps in (True, False):
        progress = Progress(1, 4, keeps=keeps)
        progress.leave(Op.SEND_FORWARD, 0, 2, output)
        output.data = torch.empty(1)  # Megatron's deallocate_output_tensor
        assert progress.take(Op.SEND_FORWARD, 0, 2)[0].tolist() == [3.0, 3.0]
        assert bool(progress.results) == keeps
        output = torch.ones(2, requires_grad=True) * 3
