"""Packed sequences in models with experts and multi-token prediction, and over context-parallel ranks; and documents
that do not see one another by masks (``--reset-attention-mask``).
"""

from __future__ import annotations

import pytest

from odyssey_megatron.upstream.source import Source
from tests.e2e.jobs import cases_of
from tests.launch.jobserver import CHECKOUT
from tests.megatron_lm.jobs import FLOAT64, assert_same_iterations, assert_same_lines, indexed
from tests.megatron_lm.test_experts import CELLS, DEEPSEEK, GANGS, MIXTRAL, assert_same_auxiliary_losses
from tests.megatron_lm.test_future import AHEAD, assert_same_ahead
from tests.megatron_lm.test_packed import BALANCED, WITHOUT, assert_dealt, texts

pytestmark = pytest.mark.timeout(300)

UNPLACED = "--position-embedding-type none"
"""Where learned positions cannot be: core_v0.16.1 rotates packed sequences by Transformer Engine's kernels alone."""
CASES = {
    "experts": (4, 2, MIXTRAL, "rank=2,step=2,at=backward"),
    "experts-in-gangs": (8, 2, f"{DEEPSEEK} {GANGS}", "rank=3,step=1,at=backward;rank=6,step=3,at=evaluate"),
    "ahead": (6, 2, f"{AHEAD} 2 {UNPLACED}", "rank=0,step=1,at=backward;rank=5,step=3,at=reduce"),
    "ahead-of-experts": (8, 2, f"{AHEAD} 1 {UNPLACED} {DEEPSEEK} {GANGS}", "rank=6,step=2,at=weight_grad"),
}
ALWAYS = {"experts-in-gangs", "ahead"}


def assert_same(run, plain, flags):
    assert_same_lines(run, plain)
    assert_same_auxiliary_losses(run, plain)
    if AHEAD in flags:
        assert_same_ahead(run, plain)


@pytest.mark.parametrize("case", cases_of(CASES, ALWAYS))
def test_conversations_of_plain_megatron_lm(jobs, name, conversations, case):
    ranks, stages, flags, inject = CASES[case]
    flags, how = f"{conversations} {flags}", {"ranks": ranks, "stages": stages, "without": WITHOUT}
    run, plain = jobs.odyssey(name, f"{flags} {BALANCED}", inject=inject, **how), jobs.plain(flags, **how)
    assert_same(run, plain, flags)
    assert len(run.killed) == inject.count("rank=") * (2 if GANGS in flags else 1)
    assert_dealt(run)


@pytest.mark.matrix
@pytest.mark.parametrize("flags", [DEEPSEEK, f"{AHEAD} 2 {UNPLACED}"], ids=["experts", "ahead"])
def test_conversations_to_the_last_digits(jobs, name, conversations, flags):
    flags = f"{conversations} {flags} --odyssey-float64 on --odyssey-policy replan"
    how = {"ranks": 8, "stages": 4, "without": WITHOUT}
    whole = jobs.odyssey(f"{name}-whole", flags, **how)
    run = jobs.odyssey(name, flags, inject="rank=1,step=1,at=weight_grad;rank=7,step=3,at=forward", **how)
    assert len(run.killed) == 2
    assert_same_lines(run, whole, rel=FLOAT64)


CONTEXT = "--context-parallel-size 2"
IN_CONTEXT = {
    "alone": (8, 2, "", "rank=1,step=1,at=backward;rank=6,step=3,at=evaluate"),
    "cells": (8, 1, CELLS, "rank=5,step=2,at=reduce"),
    "inner-stages": (8, 4, "", "rank=2,step=2,at=weight_grad"),
    "experts": (8, 2, MIXTRAL, "rank=3,step=2,at=backward"),
    "ahead": (8, 2, f"{AHEAD} 2", "rank=5,step=2,at=optimizer"),
}


def in_context(other_jobs, conversations):
    """Flags of conversations, and what they do without."""
    if Source((other_jobs.checkout,)).version() < "0.18":
        pytest.skip("this Megatron-LM does not deal packed sequences out to context-parallel ranks")
    return conversations.replace("--legacy-tokenizer ", ""), WITHOUT.replace("--position-embedding-type ", "")


@pytest.mark.matrix
@pytest.mark.parametrize("case", IN_CONTEXT)
def test_conversations_over_context_ranks(other_jobs, name, conversations, case):
    flags, without = in_context(other_jobs, conversations)
    ranks, stages, more, inject = IN_CONTEXT[case]
    flags, how = f"{flags} {CONTEXT} {more}", {"ranks": ranks, "stages": stages, "without": without}
    more = f"{BALANCED} --odyssey-redundancy state"
    run = other_jobs.odyssey(name, f"{flags} {more}", inject=inject, **how)
    plain = other_jobs.plain(flags, **how)
    assert_same(run, plain, flags)
    assert len(run.killed) == inject.count("rank=") * (4 if case == "cells" else 2)
    if case != "inner-stages":  # one pipeline, which has all
        assert_dealt(run)


@pytest.mark.matrix
def test_conversations_over_context_ranks_beside_one_rank(other_jobs, name, conversations):
    """What Transformer Engine computes on a GPU is computed here by what was written for it, and without context
    parallelism by Megatron itself. Of evaluations it takes the mean of what each rank's part comes to.
    """
    flags, without = in_context(other_jobs, conversations)
    flags += (
        " --calculate-per-token-loss"  # else each rank's part of a sequence counts as much as the other's
    )
    how = {"stages": 2, "without": without}
    inject = "rank=4,step=2,at=backward"
    run = other_jobs.odyssey(name, f"{flags} {CONTEXT}", ranks=8, inject=inject, **how)
    padded = [str(CHECKOUT / "tests" / "megatron_lm" / "padded.py"), "2"]
    plain = other_jobs.plain_once(f"{name}-plain", flags, ranks=4, before=padded, **how)
    assert run.exit_code == plain.exit_code == 0, run.log[-3000:]
    assert_same_iterations(run.iterations, plain.iterations)
    assert len(run.iterations) == 6
    assert run.killed == [4, 5]


@pytest.mark.matrix
def test_conversations_over_context_ranks_to_the_last_digits(other_jobs, name, conversations):
    flags, without = in_context(other_jobs, conversations)
    flags += f" {CONTEXT} {AHEAD} 1 --odyssey-float64 on --odyssey-policy replan"
    how = {"ranks": 12, "stages": 2, "without": without}
    whole = other_jobs.odyssey(f"{name}-whole", flags, **how)
    inject = "rank=1,step=1,at=weight_grad;rank=10,step=3,at=forward"
    run = other_jobs.odyssey(name, flags, inject=inject, **how)
    assert run.killed == [0, 1, 10, 11]
    assert_same_lines(run, whole, rel=FLOAT64)


def test_conversations_over_context_ranks_are_refused_where_megatron_lm_fails(jobs, name, conversations):
    how = {"ranks": 4, "stages": 1, "without": WITHOUT}
    run = jobs.odyssey(name, f"{conversations} {CONTEXT}", **how)
    assert run.exit_code == 2
    assert "does not work in megatron-core 0.16.1, with or without Odyssey" in run.log


MASKED = "--reset-attention-mask --reset-position-ids --eod-mask-loss"
UNSEEN = {
    "alone": (4, 2, "", "rank=2,step=2,at=backward"),
    "cells": (8, 2, CELLS, "rank=6,step=2,at=reduce"),
    "experts": (8, 2, f"{DEEPSEEK} {GANGS}", "rank=3,step=1,at=backward;rank=6,step=3,at=evaluate"),
    "ahead": (6, 2, f"{AHEAD} 2", "rank=0,step=1,at=backward;rank=5,step=3,at=reduce"),
    "slices": (4, 1, "--use-distributed-optimizer", "rank=1,step=2,at=param_gather"),
    "context": (8, 2, f"{CONTEXT} --calculate-per-token-loss", "rank=5,step=2,at=backward"),
}


@pytest.fixture(scope="session")
def documents(jobs):
    """Flags of data in which documents end with Megatron's own mark."""
    data = indexed(jobs.folder / "marked" / "text", [one + bytes([255]) for one in texts()])
    return f"--data-path {data}"


@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=() if one == "alone" else pytest.mark.matrix) for one in UNSEEN]
)
def test_documents_with_masks_of_plain_megatron_lm(jobs, name, documents, case):
    ranks, stages, more, inject = UNSEEN[case]
    flags, at_once = f"{documents} {MASKED} {more}", 2 if case in ("cells", "context", "experts") else 1
    run = jobs.odyssey(name, flags, ranks=ranks, stages=stages, inject=inject)
    without_context = flags.replace(CONTEXT, "")
    plain = jobs.plain(without_context, ranks=4 if case == "context" else ranks, stages=stages)
    assert_same(run, plain, flags)
    assert len(run.killed) == inject.count("rank=") * at_once
    seen = jobs.plain(f"{documents} --eod-mask-loss", ranks=4, stages=2)
    assert seen.iterations[2].loss != run.iterations[2].loss, "the masks change nothing"


@pytest.mark.matrix
@pytest.mark.parametrize("more", ["", f"{AHEAD} 1 {DEEPSEEK}"], ids=["alone", "ahead-of-experts"])
def test_documents_with_masks_to_the_last_digits(jobs, name, documents, more):
    """Inner stages have the masks, too: plain Megatron-LM gives them none, and what is inner changes."""
    flags = f"{documents} {MASKED} {more} --odyssey-float64 on --odyssey-policy replan"
    how = {"ranks": 8, "stages": 4}
    whole = jobs.odyssey(f"{name}-whole", flags, **how)
    run = jobs.odyssey(name, flags, inject="rank=1,step=1,at=weight_grad;rank=7,step=3,at=forward", **how)
    assert len(run.killed) == 2
    assert_same_lines(run, whole, rel=FLOAT64)


@pytest.mark.matrix
def test_documents_over_context_ranks_fail_in_megatron_lm(other_jobs, name):
    """Pieces of a sample are dealt out, and pieces of its documents rotated, whose lengths have no such sum."""
    if Source((other_jobs.checkout,)).version() < "0.19":
        pytest.skip("this Megatron-LM does not know --dataloader-inter-document-masking")
    data = indexed(other_jobs.folder / "documents" / "text", texts())
    flags, how = (
        f"--data-path {data} --dataloader-inter-document-masking {CONTEXT}",
        {"ranks": 4, "stages": 1},
    )
    plain = other_jobs.plain_once(f"{name}-plain", flags, **how)
    assert plain.exit_code != 0
    assert "split_with_sizes expects split_sizes to sum exactly" in plain.log
    run = other_jobs.odyssey(name, flags, **how)
    assert run.exit_code == 2
    assert "--dataloader-inter-document-masking with --context-parallel-size 2 does not work" in run.log
