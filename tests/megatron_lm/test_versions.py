"""The newer versions of Megatron-LM: the same jobs, compared with that version without the plugin."""

from __future__ import annotations

import pytest

from odyssey_megatron.upstream.refusals import REFUSALS
from tests.megatron_lm import torchrun
from tests.megatron_lm.jobs import FLOAT64, MOCK, assert_same_iterations, assert_same_lines
from tests.megatron_lm.test_moments import MOMENTS
from tests.megatron_lm.test_refusals import assert_recorded, assert_refused

pytestmark = pytest.mark.timeout(300)
"""Each is two or three jobs of up to 8 ranks; half a minute each where nothing else runs."""


def test_ranks_die_in_a_step_an_evaluation_and_a_checkpoint(other_jobs, name):
    run = other_jobs.odyssey(
        name, f"{MOCK} --save {other_jobs.folder / name / 'saved'} --save-interval 4", ranks=8, stages=4,
        inject="rank=3,step=1,at=backward;rank=7,step=3,at=evaluate;rank=0,step=4,at=checkpoint",
    )  # fmt: skip
    assert_same_lines(run, other_jobs.plain(ranks=8, stages=4))
    assert run.killed == [0, 3, 7]


def test_uneven_stages_of_cells_that_share_out_the_optimizer(other_jobs, name):
    flags = (
        f"{MOCK} --tensor-model-parallel-size 2 --decoder-first-pipeline-num-layers 1 "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    )
    run = other_jobs.odyssey(name, flags, ranks=8, stages=2, inject="rank=2,step=2,at=backward")
    assert_same_lines(run, other_jobs.plain(flags, ranks=8, stages=2))
    assert run.killed == [2, 3]


def test_moments_in_bf16_and_buffers_that_are_not_registered(other_jobs, name):
    """Newer versions' scripts make an optimizer's config before the job begins, which must pass."""
    flags = f"{MOCK} {MOMENTS} --use-nccl-ub --odyssey-float64 on"
    whole = other_jobs.odyssey(f"{name}-reference", flags, ranks=4, stages=2)
    run = other_jobs.odyssey(name, flags, ranks=4, stages=2, inject="rank=1,step=2,at=optimizer")
    assert_same_lines(run, whole, rel=FLOAT64)
    assert run.killed == [1]
    assert "--use-nccl-ub changes nothing" in run.log


def test_a_checkpoint_of_survivors_loads_into_plain_megatron_lm_and_back(other_jobs, name):
    folder = other_jobs.folder / name / "saved"
    run = other_jobs.odyssey(
        name, f"{MOCK} --save {folder} --save-interval 3 --exit-interval 3", ranks=6, stages=2,
        inject="rank=0,step=0,at=backward;rank=4,step=1,at=forward",
    )  # fmt: skip
    assert run.exit_code == 0, run.log[-4000:]
    plain = other_jobs.plain(f"{MOCK} --load {folder}", ranks=2, stages=2)
    again = other_jobs.odyssey(f"{name}-again", f"{MOCK} --load {folder}", ranks=4, stages=4)
    assert_same_lines(again, plain, first=4)
    whole = other_jobs.plain(ranks=6, stages=2)
    assert_same_iterations(plain.iterations[:1], whole.iterations[3:4])


@pytest.mark.matrix
def test_a_checkpoint_with_hashes_is_verified(other_jobs, name):
    folder, flags = other_jobs.folder / name / "saved", f"{MOCK} --verify-integrity"
    run = other_jobs.odyssey(
        name, f"{flags} --save {folder} --save-interval 3 --exit-interval 3", ranks=4, stages=2,
        inject="rank=0,step=3,at=checkpoint",
    )  # fmt: skip
    assert run.exit_code == 0, run.log[-4000:]
    assert run.killed == [0]
    plain = other_jobs.plain(f"{flags} --load {folder}", ranks=2, stages=2)
    again = other_jobs.odyssey(f"{name}-again", f"{flags} --load {folder}", ranks=4, stages=4)
    assert_same_lines(again, plain, first=4)
    weights = max((folder / "iter_0000003").glob("*.distcp"), key=lambda one: one.stat().st_size)
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    spoilt = other_jobs.odyssey(f"{name}-spoilt", f"{flags} --load {folder}", ranks=4, stages=4)
    assert spoilt.exit_code == 1, spoilt.log[-3000:]
    assert f"{weights.name}: hash mismatch" in spoilt.log
    assert not spoilt.iterations


@pytest.mark.matrix
def test_a_graph_of_the_optimizer_is_left_out(other_jobs, name):
    run = other_jobs.odyssey(
        name, f"{MOCK} --optimizer-cuda-graph", ranks=4, stages=2, inject="rank=2,step=2,at=backward"
    )
    assert_same_lines(run, other_jobs.plain(ranks=4, stages=2))
    assert run.killed == [2]
    assert run.log.count("--optimizer-cuda-graph changes nothing with --odyssey: ") == 1


def test_under_torchrun_in_a_patched_checkout(other_jobs, tmp_path):
    run = torchrun.run(
        other_jobs,
        tmp_path,
        MOCK,
        ranks=4,
        stages=2,
        inject="rank=3,step=2,at=backward;rank=0,step=4,at=forward",
    )
    assert_same_lines(run, other_jobs.plain(ranks=4, stages=2))
    assert run.killed == [0, 3]
    assert "waitForInput" not in run.log  # of the processes that torchrun has started, which wait


def test_every_refusal_that_this_version_has(other_jobs):
    assert_refused(other_jobs)
    assert_recorded(other_jobs)


@pytest.mark.parametrize("flag", ["--qk-clip", "--inprocess-restart"])
def test_a_refused_job_ends_with_one_message(other_jobs, name, flag):
    run = other_jobs.odyssey(name, f"{MOCK} {flag}", ranks=2, stages=2)
    assert run.exit_code == 2, run.log[-3000:]
    assert "Traceback" not in run.log
    (refusal,) = (one for one in REFUSALS if one.flag == flag)
    assert run.log.count(f"{flag} {refusal.verdict}: {refusal.reason}") == 1, run.log[-3000:]


def test_observing_changes_nothing(other_jobs, name):
    run = other_jobs.odyssey(name, MOCK, ranks=4, stages=2, mode="observe")
    assert_same_lines(run, other_jobs.plain(ranks=4, stages=2), rel=0.0)
