"""Packed sequences: documents that do not see one another, of any lengths, and conversations (``--sft``)."""

from __future__ import annotations

import random

import pytest

from odyssey_megatron.upstream.source import Source
from tests.e2e.jobs import assert_equal_numbers
from tests.megatron_lm.jobs import FLOAT64, MOCK, assert_same_lines, indexed

pytestmark = pytest.mark.timeout(300)

WITHOUT = "--position-embedding-type --tokenizer-type --vocab-size --seq-length --max-position-embeddings"
TWO = {"ranks": 4, "stages": 2}


def test_conversations_of_plain_megatron_lm(jobs, name, conversations):
    """With learned positions: core_v0.16.1 rotates packed sequences by Transformer Engine's kernels alone."""
    plain = jobs.plain(conversations, **TWO, without=WITHOUT)
    run = jobs.odyssey(name, conversations, **TWO, without=WITHOUT, inject="rank=2,step=2,at=backward")
    assert_same_lines(run, plain)
    assert len(run.killed) == 1


def test_conversations_with_tensor_parallelism_are_refused_where_megatron_lm_fails(jobs, name, conversations):
    how = {"ranks": 4, "stages": 2, "without": WITHOUT}
    run = jobs.odyssey(name, f"{conversations} --tensor-model-parallel-size 2", **how)
    assert run.exit_code == 2
    assert "does not work in megatron-core 0.16.1, with or without Odyssey" in run.log


@pytest.mark.matrix
def test_float64_to_the_last_digits(jobs, name, conversations):
    """Inner stages are told where conversations end, too: what is an end now may not be one after a failure."""
    flags = f"{conversations} --odyssey-float64 on --odyssey-policy replan"
    how = {"ranks": 8, "stages": 4, "without": WITHOUT}
    whole = jobs.odyssey(f"{name}-whole", flags, **how)
    inject = "rank=1,step=1,at=weight_grad;rank=7,step=3,at=forward"
    run = jobs.odyssey(name, flags, inject=inject, **how)
    assert len(run.killed) == 2
    assert_same_lines(run, whole, rel=FLOAT64)


BALANCED = "--odyssey-sequence-balance auto"


def assert_dealt(run, first=1):
    """Every step from ``first`` on, each once; and not all of them were even as they were."""
    dealt = {event["step"]: event for event in run.named("step_dealt")}
    assert sorted(dealt) == list(range(first, len(run.run.steps)))
    assert all(1.0 <= one["dealt"] <= one["natural"] for one in dealt.values())
    assert any(one["dealt"] < one["natural"] for one in dealt.values())


def test_balanced_steps_of_plain_megatron_lm(jobs, name, conversations):
    """Who runs which microbatch goes by their lengths; what is logged does not, a rank killed in such a step."""
    plain = jobs.plain(conversations, **TWO, without=WITHOUT)
    inject = "rank=2,step=2,at=backward"
    run = jobs.odyssey(name, f"{conversations} {BALANCED}", **TWO, without=WITHOUT, inject=inject)
    assert_same_lines(run, plain)
    assert len(run.killed) == 1
    assert_dealt(run)


@pytest.fixture(scope="module")
def unbalanced(jobs, conversations):
    """Nobody dies, and nothing is dealt."""
    flags = f"{conversations} --odyssey-float64 on"
    return jobs.odyssey("unbalanced", flags, ranks=8, stages=2, without=WITHOUT)


KILLS = {
    "none": "",
    "within-steps": "rank=1,step=1,at=weight_grad;rank=7,step=3,at=forward",
    "two-of-one-step": "rank=0,step=2,at=backward;rank=5,step=2,at=backward",
    "agreement": "rank=4,step=2,at=agreement",
    "behind-a-step": "rank=7,step=2,at=commit",
    "the-next-is-dealt": "rank=2,step=2,at=optimizer;rank=3,step=3,at=forward",
    "redone": "--odyssey-interrupted-step redo rank=6,step=2,at=reduce",
    "replanned": "--odyssey-policy replan rank=5,step=2,at=backward",
    "slices": "--use-distributed-optimizer rank=5,step=2,at=param_gather",
}


@pytest.mark.matrix
@pytest.mark.parametrize("case", KILLS)
def test_balanced_steps_to_the_last_digits(jobs, unbalanced, name, conversations, case):
    *more, inject = KILLS[case].split(" ")
    flags = f"{conversations} --odyssey-float64 on {BALANCED} {' '.join(more)}"
    run = jobs.odyssey(name, flags, ranks=8, stages=2, without=WITHOUT, inject=inject)
    assert len(run.killed) == (inject.count("rank=") if inject else 0)
    assert_same_lines(run, unbalanced, rel=FLOAT64)
    assert_dealt(run)


@pytest.mark.matrix
@pytest.mark.timeout(400)
def test_balanced_steps_of_a_rank_that_comes_back(jobs, name, conversations):
    """It is told of the dealing that its first step has."""
    flags = f"{conversations} --train-iters 80 --eval-interval 10 --odyssey-float64 on"
    how = {"ranks": 8, "stages": 4, "without": f"{WITHOUT} --train-iters --eval-interval"}
    whole = jobs.odyssey(f"{name}-whole", flags, **how)
    inject = "rank=7,step=2,at=backward;rank=2,step=3,at=reduce"
    run = jobs.odyssey(name, f"{flags} {BALANCED} --odyssey-respawn 1", inject=inject, **how)
    assert_same_lines(run, whole, rel=FLOAT64)
    assert len(run.named("rank_joined")) == len(run.killed) == 2
    assert_dealt(run)


@pytest.mark.matrix
def test_balanced_steps_of_growing_batches(jobs, name, conversations):
    without = f"{WITHOUT} --train-iters --lr-warmup-iters"
    samples = "--train-samples 84 --lr-decay-samples 84 --lr-warmup-samples 8 --rampup-batch-size 4 4 24"
    flags, how = (
        f"{conversations} {samples} --odyssey-float64 on",
        {"ranks": 4, "stages": 2, "without": without},
    )
    whole = jobs.odyssey(f"{name}-whole", flags, **how)
    inject = "rank=3,step=2,at=backward,microbatch=3;rank=0,step=5,at=reduce"
    run = jobs.odyssey(name, f"{flags} {BALANCED}", inject=inject, **how)
    assert_same_lines(run, whole, rel=FLOAT64)
    assert len(run.killed) == 2
    assert_dealt(run)


@pytest.mark.matrix
def test_balanced_steps_behind_a_checkpoint(jobs, name, conversations):
    """The first step of each job is in its own order."""
    flags, how = f"{conversations} --odyssey-float64 on", {**TWO, "without": WITHOUT}
    whole = jobs.odyssey(f"{name}-whole", flags, **how)
    saved = jobs.folder / name / "saved"
    save = f"--save {saved} --save-interval 3 --exit-interval 3"
    first = jobs.odyssey(name, f"{flags} {BALANCED} {save}", **how)
    assert first.exit_code == 0, first.log[-3000:]
    assert_dealt(first)
    inject = "rank=1,step=4,at=backward"
    second = jobs.odyssey(f"{name}-loaded", f"{flags} {BALANCED} --load {saved}", inject=inject, **how)
    assert second.exit_code == 0, second.log[-3000:]
    assert_equal_numbers(second.run.steps, whole.run.steps[3:], rel=FLOAT64)
    assert {event["step"] for event in second.named("step_dealt")} == {4, 5}


def test_balance_of_what_is_not_packed_says_that_it_does_nothing(jobs, name):
    run = jobs.odyssey(name, f"{MOCK} --train-iters 3 {BALANCED}", ranks=2, stages=1, without="--train-iters")
    assert run.exit_code == 0, run.log[-3000:]
    assert run.log.count("--odyssey-sequence-balance auto does nothing: all sequences are of one length") == 1
    assert not run.named("step_dealt")


DOCUMENTS = {
    "one-row": (4, 2, "", "rank=2,step=2,at=backward"),
    "two-rows": (3, 1, "--micro-batch-size 2", "rank=0,step=1,at=reduce"),  # plain's second stage reads 16 of 32
    "cells": (8, 2, "--tensor-model-parallel-size 2 --sequence-parallel", "rank=6,step=2,at=reduce"),
    "recomputed": (
        4, 2, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "rank=3,step=2,at=backward",
    ),
}  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("case", DOCUMENTS)
def test_documents_of_newer_versions(other_jobs, name, case):
    """Documents of a sample that do not see one another; what is logged of throughput goes by their lengths."""
    if Source((other_jobs.checkout,)).version() < "0.19":
        pytest.skip("this Megatron-LM does not know --dataloader-inter-document-masking")
    ranks, stages, flags, inject = DOCUMENTS[case]
    data = indexed(other_jobs.folder / "documents" / "text", texts())
    flags = f"--data-path {data} --dataloader-inter-document-masking --log-throughput {flags}"
    run = other_jobs.odyssey(name, f"{flags} {BALANCED}", ranks=ranks, stages=stages, inject=inject)
    plain = other_jobs.plain(flags, ranks=ranks, stages=stages)
    assert_same_lines(run, plain)
    assert_dealt(run)
    assert len(run.killed) == len(run.named("failure_detected")) * (2 if case == "cells" else 1) > 0


def texts():
    """Documents of 1 to 40 tokens, where a sample has 16."""
    draw = random.Random(1)
    return [bytes(draw.choices(range(1, 250), k=draw.randint(1, 40))) for _ in range(400)]


@pytest.mark.matrix
def test_conversations_of_newer_versions(other_jobs, name, conversations):
    flags = conversations.replace("--legacy-tokenizer ", "")
    without = WITHOUT.replace("--position-embedding-type ", "")
    inject = "rank=2,step=2,at=backward"
    run = other_jobs.odyssey(name, f"{flags} {BALANCED}", **TWO, without=without, inject=inject)
    assert_same_lines(run, other_jobs.plain(flags, **TWO, without=without))
    assert len(run.killed) == 1
    assert_dealt(run)
