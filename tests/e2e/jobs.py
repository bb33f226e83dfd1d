"""Runs real jobs for the tests: real processes, real Megatron modules, real SIGKILL; and reads what they wrote."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from odyssey_megatron.metrics.journal import read_journal
from odyssey_megatron.metrics.run import Run, read_run
from odyssey_megatron.metrics.steps import CommittedStep, check_samples, loss_difference
from tests.launch.jobserver import CHECKOUT, JobServer

SCRIPT = CHECKOUT / "examples" / "llama" / "pretrain_llama.py"
PAIRS = CHECKOUT / "tests" / "e2e" / "pairs.py"
SMALL = (
    "--num-layers 6 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --num-query-groups 2 "
    "--seq-length 16 --micro-batch-size 1 --global-batch-size 12 --train-iters 6 --lr-warmup-iters 1 "
    "--odyssey-device cpu --odyssey-float64 on --odyssey-hang-s 1.0"
).split()
LONG = "--train-iters 60 --lr 1e-3"
"""Steps enough for a rank to come back. With the example's rate of 3e-3 norms leap, and one in thousands shows what is
rounded elsewhere, by 5e-10: runs without failures on two and eight ranks differ by 2e-12, with this rate by 5e-14.
"""
BFLOAT16 = "--bf16 --odyssey-float64 off --check-weight-hash-across-dp-replicas-interval 1"
TOLERANCE = 1e-10
"""Relative, float64: the project's bar for a run with failures against a run without."""
ROUNDING = 1e-3
"""Relative, 16 bits: losses and gradient norms whose sums were rounded in another order."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A job that has ended."""

    exit_code: int
    run_dir: Path
    log: str

    @property
    def events(self) -> list[dict[str, Any]]:
        return list(read_journal(self.run_dir))

    def named(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]

    @property
    def run(self) -> Run:
        return read_run(self.run_dir)

    def weights(self) -> dict[str, dict[str, torch.Tensor]]:
        """File's name, of a layer and a shard -> its weights by name."""
        return {
            path.stem: torch.load(path, weights_only=True)
            for path in sorted((self.run_dir / "weights").glob("layer_*.pt"))
        }


Case = tuple[tuple[int, int], str, str]
"""((ranks, stages), policy, the faults to inject)."""


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """Starts jobs from one preloaded process. ``cache`` holds what all of them share: corpus and indices."""

    server: JobServer
    folder: Path
    example: Path = SCRIPT
    """What they run, unless told otherwise."""

    def flags(self, name: str, *, stages: int) -> list[str]:
        """What every job is given; its run folder is ``folder / name``."""
        run_dir = self.folder / name
        return [
            *SMALL, "--pipeline-model-parallel-size", str(stages), "--odyssey-run-dir", str(run_dir),
            "--data-cache-path", str(self.folder / "cache"), "--save-weights", str(run_dir / "weights"),
        ]  # fmt: skip

    def run(
        self,
        name: str,
        *,
        ranks: int,
        stages: int,
        flags: str = "",
        script: Path | None = None,
        timeout_s: float = 90.0,
    ) -> Outcome:
        """One ``odyssey run``; flags given here win.

        What is left of a broken cell comes back where the test asks for ranks to do so (``--odyssey-respawn``).
        """
        argv = [
            "--nproc-per-node",
            str(ranks),
            str(script or self.example),
            *self.flags(name, stages=stages),
            *(() if "--odyssey-respawn" in flags else ("--odyssey-shrink", "off")),
            *flags.split(),
        ]
        job = self.server.run(argv, log=self.folder / f"{name}.log")
        exit_code = job.wait(timeout_s)
        return self.outcome(name, exit_code=exit_code, log=job.log())

    def outcome(self, name: str, *, exit_code: int, log: str) -> Outcome:
        return Outcome(exit_code=exit_code, run_dir=self.folder / name, log=log)

    def script(self, argv: list[str], *, log: Path, timeout_s: float = 90.0) -> None:
        """A Python script in a fork of the preloaded process. Raises AssertionError if it fails."""
        assert self.server.script(argv, log=log).wait(timeout_s) == 0, log.read_text()[-3000:]


def cases_of(cases: Iterable[str], always: Collection[str]) -> list[Any]:
    """Parameters: those not among ``always`` run by the marker; of some files CI draws a few (``tests/slices.py``)."""
    return [pytest.param(one, marks=() if one in always else pytest.mark.matrix) for one in cases]


def run_case(
    jobs: Jobs, name: str, case: Case, flags: str, reference: Outcome, *, alike: bool = False
) -> Outcome:
    """A job with ``flags`` that has come to the same as ``reference``; ``alike``: in 16 bits."""
    (ranks, stages), policy, inject = case
    flags = f"{flags} --odyssey-policy {policy} --odyssey-inject {inject}"
    shot = jobs.run(name, ranks=ranks, stages=stages, flags=flags)
    check = assert_alike_runs if alike else assert_equal_runs
    check(shot, reference, kills=inject.count("rank="))
    return shot


def assert_equal_runs(shot: Outcome, reference: Outcome, *, kills: int) -> None:
    """The whole claim of exactness: losses, weights, samples, steps; and that the failures really happened."""
    assert shot.exit_code == 0, shot.log[-4000:]
    assert len(shot.named("injected")) == kills, "the faults that the test is about did not happen"
    ours, theirs = shot.run.steps, reference.run.steps
    assert_equal_numbers(ours, theirs, rel=TOLERANCE)
    samples = check_samples(shot.events, ours)
    assert samples.ok, samples.problems
    assert_equal_weights(shot.weights(), reference.weights())
    assert_holders_agree(shot)


def assert_alike_runs(shot: Outcome, reference: Outcome, *, kills: int) -> None:
    """In 16 bits, with :data:`BFLOAT16`, beside the same without a failure: the same steps and numbers to rounding, and
    the same bytes on all holders of a layer after every step, which the job has checked itself, and at the end.
    """
    assert shot.exit_code == 0, shot.log[-4000:]
    assert len(shot.named("injected")) == kills, "the faults that the test is about did not happen"
    assert not shot.named("left_out"), "holders differed behind a step"
    assert_equal_numbers(shot.run.steps, reference.run.steps, rel=ROUNDING)
    assert_holders_agree(shot)


def assert_equal_numbers(
    ours: Sequence[CommittedStep], theirs: Sequence[CommittedStep], *, rel: float
) -> None:
    """The same steps, and of each all losses and the norm of the gradient: a part of a sum that is missing hardly shows
    in a few losses.
    """
    assert theirs
    assert [one.step for one in ours] == [one.step for one in theirs], "a step was skipped"
    difference = loss_difference(ours, theirs)
    assert difference.max_relative <= rel, difference
    norms = [[one.grad_norm for one in steps if not one.is_left_out] for steps in (ours, theirs)]
    assert None not in norms[1]
    assert norms[0] == pytest.approx(norms[1], rel=rel, abs=0.0)


def assert_equal_weights(
    ours: dict[str, dict[str, torch.Tensor]], theirs: dict[str, dict[str, torch.Tensor]]
) -> None:
    """Relative to the largest entry of each tensor. Biases of experts, which move by whole steps, must be the same."""
    assert ours.keys() == theirs.keys()
    for layer, weights in theirs.items():
        for name, weight in weights.items():
            if name.endswith("expert_bias"):
                assert torch.equal(ours[layer][name], weight), (
                    f"{layer} {name}: {ours[layer][name]}, {weight}"
                )
                continue
            assert weight.dtype == torch.float64
            gap = (ours[layer][name] - weight).abs().max() / weight.abs().max()
            assert gap <= TOLERANCE, f"{layer} {name}: {gap:.3e}"


def assert_holders_agree(outcome: Outcome) -> None:
    """All holders of a layer end with the same bytes, optimizer state included."""
    digests: dict[str, set[str]] = {}
    for event in outcome.named("weights"):
        for layer, digest in event["digest"].items():
            digests.setdefault(layer, set()).add(digest)
    assert digests
    assert all(len(found) == 1 for found in digests.values()), digests
