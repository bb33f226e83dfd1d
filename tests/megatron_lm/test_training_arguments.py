"""Whatever changes training does so as in plain Megatron-LM, from the first iteration on, without a kill and with one.

Besides its lines, what a job saves at the end is compared: the learning rate and weight decay of every group of
parameters, which Megatron does not print, in all digits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron_lm.jobs import FLOAT32, MOCK, MegatronRun, assert_same_lines

pytestmark = pytest.mark.timeout(300)
"""Two jobs each; half a minute where nothing else runs."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Flags besides the usual ones, of which some may have to go."""

    flags: str
    without: str = ""
    rel: float = FLOAT32


BY_SAMPLES = "--train-iters --lr-warmup-iters"
"""What stands on the usual launch line and cannot stand beside samples."""

USUAL = {
    "samples": Case(
        flags="--train-samples 75 --lr-warmup-samples 20 --lr-decay-samples 66 --lr-decay-style linear",
        without=BY_SAMPLES,
    ),
    "sgd": Case(
        flags="--optimizer sgd --lr 0.3 --min-lr 0.01 --decoupled-lr 0.2 --start-weight-decay 0.01 "
        "--end-weight-decay 0.2 --weight-decay-incr-style linear --position-embedding-type learned_absolute"
    ),
}
"""By name; each a job of six iterations, of several arguments that do not touch each other."""
MORE = {
    "wsd-minus-sqrt": Case(
        flags="--train-samples 72 --lr-warmup-samples 20 --lr-decay-samples 66 --lr-decay-style WSD "
        "--lr-wsd-decay-style minus_sqrt --lr-wsd-decay-samples 30",
        without=BY_SAMPLES,
    ),
    **{
        f"wsd-{style}": Case(
            flags=f"--lr-decay-style WSD --lr-wsd-decay-style {style} --lr-wsd-decay-iters 3 --lr-decay-iters 5"
        )
        for style in ("linear", "cosine", "exponential")
    },
    "inverse-square-root": Case(
        flags="--lr-warmup-fraction 0.4 --lr-warmup-init 1e-4 --lr-warmup-iters 0 --lr-decay-iters 5 "
        "--lr-decay-style inverse-square-root --start-weight-decay 0.01 --end-weight-decay 0.4 "
        "--weight-decay-incr-style cosine --adam-beta1 0.8 --adam-beta2 0.9 --adam-eps 1e-3"
    ),
    "decoupled": Case(
        flags="--decoupled-lr 3e-2 --decoupled-min-lr 2e-3 --clip-grad 0 --start-weight-decay 0.0 "
        "--end-weight-decay 0.3 --weight-decay-incr-style linear --lr-decay-style constant"
    ),
    "two-samples": Case(
        flags="--global-batch-size 2 --optimizer sgd --sgd-momentum 0 --lr 0.3 --min-lr 0.01"
    ),
    "learned-positions-cpu": Case(
        flags="--position-embedding-type learned_absolute --use-cpu-initialization --init-method-std 0.05"
    ),
    "learned-positions-init": Case(
        flags="--position-embedding-type learned_absolute --embedding-init-method-std 0.1 --init-method-std 0.05 "
        "--squared-relu",
        without="--swiglu",
    ),
    "biases": Case(
        flags="--add-qkv-bias --normalization LayerNorm --attention-softmax-in-fp32 --openai-gelu "
        "--no-bias-gelu-fusion --make-vocab-size-divisible-by 77",
        without="--swiglu --disable-bias-linear",
    ),
    "learnable-softmax": Case(flags="--softmax-type learnable"),
    "softmax-off-by-one": Case(flags="--softmax-type off-by-one"),
    "output-gate": Case(flags="--attention-output-gate"),
    "rotary": Case(
        flags="--rotary-percent 0.5 --rotary-base 500 --use-rope-scaling --rope-scaling-factor 4 --qk-layernorm "
        "--no-weight-decay-cond-type apply_wd_to_qk_layernorm"
    ),
}
NEWER = {
    "mup": Case(flags="--use-mup --mup-base-hidden-size 8 --mup-embedding-mult 2.0 --mup-base-head-dim 4"),
    "mup-tied": Case(
        flags="--use-mup --mup-base-hidden-size 8 --optimizer sgd --lr 0.3 --min-lr 0.01",
        without="--untie-embeddings-and-output-weights",
    ),
}
"""Of versions after 0.16."""
CASES = USUAL | MORE | NEWER


def hyperparameters(saved: Path) -> list[dict[str, Any]]:
    """Of every group of parameters, as saved; and of the schedule."""
    state = torch.load(saved / "iter_0000006" / "common.pt", weights_only=False)
    optimizer = state["optimizer"]
    groups = optimizer.get("optimizer", optimizer)["param_groups"]
    return [
        *({name: value for name, value in group.items() if name != "params"} for group in groups),
        state["opt_param_scheduler"],
    ]


@pytest.mark.parametrize("killed", [False, True], ids=["whole", "killed"])
@pytest.mark.parametrize("case", [*USUAL, *(pytest.param(one, marks=pytest.mark.matrix) for one in MORE)])
def test_as_plain_megatron_lm(jobs, name, case, killed):
    assert_as_plain(jobs, name, case, killed=killed)


@pytest.mark.matrix
@pytest.mark.parametrize("case", NEWER)
def test_as_newer_plain_megatron_lm(other_jobs, name, case):
    assert_as_plain(other_jobs, name, case, killed=True)


def assert_as_plain(jobs: Any, name: str, case: str, *, killed: bool) -> MegatronRun:
    one = CASES[case]
    saved = {who: jobs.folder / f"{who}-{case}" / "saved" for who in ("plain", name)}
    flags = {who: f"{MOCK} {one.flags} --save {folder} --save-interval 6" for who, folder in saved.items()}
    plain = jobs.plain(flags["plain"], ranks=2, stages=2, without=one.without)
    inject = "rank=2,step=2,at=backward" if killed else ""
    run = jobs.odyssey(name, flags[name], ranks=4, stages=2, without=one.without, inject=inject)
    assert len(plain.iterations) == 6, plain.log[-3000:]
    assert_same_lines(run, plain, rel=one.rel)
    assert run.killed == ([2] if killed else [])
    if case not in NEWER or (saved[name] / "iter_0000006" / "common.pt").exists():  # 0.19 writes none
        assert hyperparameters(saved[name]) == hyperparameters(saved["plain"])
    return run


LOADS = {
    "as-it-was": "",
    "override": "--override-opt-param-scheduler --lr 5e-3 --global-batch-size 24 --adam-beta1 0.7",
    "checkpoint": "--use-checkpoint-opt-param-scheduler --lr 5e-3 --weight-decay 0.3",
    "without-optimizer": "--no-load-optim",
    "finetune": "--finetune --lr 4e-3",
}


@pytest.fixture(scope="session")
def third(jobs):
    """A checkpoint of plain Megatron-LM's, after three iterations."""
    folder = jobs.folder / "third"
    jobs.plain(f"{MOCK} --save {folder} --save-interval 3 --exit-interval 3", ranks=2, stages=2)
    return folder


@pytest.mark.matrix
@pytest.mark.parametrize("case", LOADS)
def test_what_a_checkpoint_says_counts_as_in_plain_megatron_lm(jobs, name, third, case):
    flags = f"{MOCK} --load {third} {LOADS[case]}"
    plain = jobs.plain(flags, ranks=2, stages=2)
    run = jobs.odyssey(name, flags, ranks=4, stages=2, inject="rank=2,step=4,at=backward")
    assert_same_lines(run, plain, first=plain.iterations[0].number)
    assert run.killed == [2]
