"""Jobs of the real ``pretrain_gpt.py``, with the plugin and without, and what they print."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from tests.e2e.jobs import Outcome, assert_equal_numbers
from tests.launch.jobserver import CHECKOUT, Job, JobServer

MODEL = (
    "--num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 12 "
    "--train-iters 6 --lr 1e-2 --min-lr 1e-3 --lr-warmup-iters 2 --lr-decay-style cosine --weight-decay 0.1 "
    "--clip-grad 1.0 --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --transformer-impl local "
    "--no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion "
    "--no-rope-fusion --tokenizer-type NullTokenizer --vocab-size 255 --split 90,8,2 --num-workers 0 "
    "--log-interval 1 --eval-interval 3 --eval-iters 2 --distributed-backend gloo"
)
MOCK = "--mock-data"
SCRIPT = "pretrain_gpt.py"
FLOAT32 = 1e-5
"""Relative difference of two float32 losses that sum in different orders."""
FLOAT64 = 1e-10
NORM_BFLOAT16 = 2e-2
"""Relative difference of two gradient norms in bf16 where they leap, and losses are within 2e-3. Undisturbed jobs with
the plugin and without are 3e-3 apart after six iterations (1.035, 1.038), and 8e-3 with Adam's moments in bf16 (1.030).
So are plain ones of one replica and of three: by its number Megatron-LM scales the loss, and what is not scaled by a
power of two is rounded to other numbers (test_bfloat16.py).
"""

_ITERATION = re.compile(
    r"iteration +(\d+)/ *(\d+) \| consumed samples: +(\d+) \|.* learning rate: ([-+.E\d]+) "
    r"\| global batch size: +(\d+) \| lm loss: ([-+.E\d]+) \|.* grad norm: ([.\d]+) \|"
)
_EVALUATION = re.compile(r"validation(\S*) loss at (.+?) \| lm loss value: ([-+.E\d]+) \|")


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """One of Megatron's lines."""

    number: int
    of: int
    consumed_samples: int
    lr: str
    """As printed: it must not differ at all."""
    global_batch_size: int
    loss: float
    grad_norm: float


@dataclass(frozen=True, kw_only=True)
class MegatronRun(Outcome):
    """A job of Megatron-LM that has ended. Without the plugin there is nothing in ``run_dir``."""

    @property
    def iterations(self) -> list[Iteration]:
        return [
            Iteration(
                number=int(number), of=int(of), consumed_samples=int(samples), lr=lr, global_batch_size=int(batch),
                loss=float(loss), grad_norm=float(norm),
            )
            for number, of, samples, lr, batch, loss, norm in _ITERATION.findall(self.log)
        ]  # fmt: skip

    @property
    def evaluations(self) -> list[tuple[str, float]]:
        """(when and of which set, loss)."""
        return [(when + which, float(loss)) for which, when, loss in _EVALUATION.findall(self.log)]

    @property
    def killed(self) -> list[int]:
        """The ranks whose death was noticed."""
        return sorted(rank for event in self.named("failure_detected") for rank in event["dead"])


class MegatronJobs:
    """Starts jobs from one preloaded process, and keeps those without the plugin to compare with."""

    def __init__(self, server: JobServer, folder: Path, checkout: Path):
        self._server, self.folder, self.checkout = server, folder, checkout
        self._known: dict[str, MegatronRun] = {}
        self._plain = -1

    def plain(
        self,
        flags: str = MOCK,
        *,
        ranks: int,
        stages: int,
        without: str = "",
        model: str = MODEL,
        script: str = SCRIPT,
    ) -> MegatronRun:
        """Megatron-LM itself; the ranks have nothing of Odyssey but the CPU device. Run once for the same flags."""
        key = f"{script} {ranks}-{stages} {model} {flags} -{without}"
        if key not in self._known:
            self._plain += 1  # one that fails has had its log
            how: dict[str, Any] = {"ranks": ranks, "stages": stages, "without": without}
            run = self.plain_once(f"plain-{self._plain}", flags, model=model, script=script, **how)
            assert run.exit_code == 0, run.log[-4000:]
            self._known[key] = run
        return self._known[key]

    def plain_once(
        self,
        name: str,
        flags: str,
        *,
        ranks: int,
        stages: int,
        without: str = "",
        before: Sequence[str] = (),
        model: str = MODEL,
        script: str = SCRIPT,
    ) -> MegatronRun:
        """As :meth:`plain`, with a name, its script run by ``before``, and whatever it comes to."""
        plain = str(CHECKOUT / "tests" / "megatron_lm" / "plain.py")
        job = self._start([plain, *before], name, flags, ranks, stages, without, model, script)
        return self.outcome(name, job)

    def odyssey(self, name: str, flags: str = MOCK, **how: Any) -> MegatronRun:
        """The same under ``--odyssey``; ``how`` as of :meth:`start`."""
        return self.outcome(name, self.start(name, flags, **how))

    def start(
        self,
        name: str,
        flags: str,
        *,
        ranks: int,
        stages: int,
        inject: str = "",
        mode: str = "recover",
        without: str = "",
        before: Sequence[str] = (),
        model: str = MODEL,
        script: str = SCRIPT,
    ) -> Job:
        """A job that is on its way, ``without`` some of the flags of ``model``, its script run by ``before``."""
        flags = f"--odyssey {mode} --odyssey-run-dir {self.folder / name} --odyssey-hang-s 2 {flags}"
        if (
            not mode and "--odyssey-respawn" not in flags
        ):  # cells leave, unless the test is about ranks that come back
            flags += " --odyssey-shrink off"
        flags += f" --odyssey-inject {inject}" if inject else ""
        return self._start(before, name, flags, ranks, stages, without, model, script)

    def outcome(self, name: str, job: Job, *, limit_s: float = 200.0) -> MegatronRun:
        """What ``job`` has come to."""
        exit_code = job.wait(limit_s)
        return MegatronRun(exit_code=exit_code, run_dir=self.folder / name, log=job.log())

    def script(self, argv: list[str]) -> None:
        """A Python script in a fork of the preloaded process. Raises AssertionError if it fails."""
        log = self.folder / "script.log"
        assert self._server.script(argv, log=log).wait(200.0) == 0, log.read_text()[-3000:]

    def _start(
        self,
        before: Sequence[str],
        name: str,
        flags: str,
        ranks: int,
        stages: int,
        without: str = "",
        model: str = MODEL,
        script: str = SCRIPT,
    ) -> Job:
        usual = [
            one for one in re.findall(r"--\S+(?: [^-]\S*)*", model) if one.split()[0] not in without.split()
        ]
        flags += f" --pipeline-model-parallel-size {stages} --data-cache-path {self.folder / 'cache'}"
        path = str(self.checkout / script)
        return self._server.run(
            ["--nproc-per-node", str(ranks), *before, path, *" ".join(usual).split(), *flags.split()],
            log=self.folder / f"{name}.log",
            # --deterministic-mode asks for the latter two.
            env={"ODYSSEY_DEVICE": "cpu", "NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"},
        )


def assert_same_lines(
    run: MegatronRun,
    plain: MegatronRun,
    *,
    rel: float = FLOAT32,
    first: int = 1,
    skipped: Collection[int] = (),
) -> None:
    """All that Megatron prints of iterations and evaluations: each once, in order, with the same numbers.

    Where both are jobs with the plugin, the losses and gradient norms of their journals, too, which have all digits.

    Args:
        first: the iteration that ``run`` begins with, of those that ``plain`` printed.
        skipped: iterations that neither prints.
    """
    assert run.exit_code == 0, run.log[-4000:]
    ours, theirs = run.iterations, [one for one in plain.iterations if one.number >= first]
    expected = [one for one in range(first, theirs[-1].number + 1) if one not in skipped]
    assert [one.number for one in theirs] == expected
    assert_same_iterations(ours, theirs, rel=rel)
    evaluated = [one for one in plain.evaluations if _iteration_of(one[0]) >= first]
    assert [one[0] for one in run.evaluations] == [one[0] for one in evaluated]
    assert [one[1] for one in run.evaluations] == pytest.approx([one[1] for one in evaluated], rel=rel)
    if plain.events:
        known = [step for step in plain.run.steps if step.step >= first - 1]
        assert_equal_numbers(run.run.steps, known, rel=rel)


def assert_same_iterations(
    ours: Sequence[Iteration],
    theirs: Sequence[Iteration],
    *,
    rel: float = FLOAT32,
    norm_rel: float | None = None,
) -> None:
    """All that Megatron prints of each: losses within ``rel``, gradient norms within ``norm_rel`` (if None, ``rel``),
    the rest as it is.
    """
    assert theirs
    blank = {"loss": 0.0, "grad_norm": 0.0}
    assert [replace(one, **blank) for one in ours] == [replace(one, **blank) for one in theirs]
    losses, known = ([one.loss for one in lines] for lines in (ours, theirs))
    assert losses == pytest.approx(known, rel=rel), (losses, known)
    norms, known = ([one.grad_norm for one in lines] for lines in (ours, theirs))
    # Three digits of it are printed.
    assert norms == pytest.approx(known, rel=norm_rel or rel, abs=1.1e-3), (norms, known)


def behind_a_load(iterations: Sequence[Iteration]) -> list[Iteration]:
    """As Megatron prints them in a job that loads a checkpoint: the second loss is the mean of the first two. Gradient
    norms are each iteration's own.
    """
    first, second, *others = iterations
    return [first, replace(second, loss=(first.loss + second.loss) / 2), *others]


def _iteration_of(when: str) -> int:
    found = re.match(r"iteration (\d+)", when)
    assert found is not None, when
    return int(found.group(1))


def assert_equal_checkpoints(ours: Path, theirs: Path, iteration: int) -> None:
    """Weights and optimizer state, float64; relative to the largest entry of each tensor."""
    mine, other = (checkpoint(folder, iteration) for folder in (ours, theirs))
    assert mine.keys() == other.keys()
    floats = {
        key: value
        for key, value in other.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    assert sum("exp_avg" in key for key in floats) >= 2 * 2, "no optimizer state was compared"
    for key, value in floats.items():
        if value.numel():
            assert (mine[key] - value).abs().max() <= FLOAT64 * value.abs().max(), (iteration, key)


def assert_checkpoints_there_and_back(
    jobs: MegatronJobs, name: str, flags: str, *, inject: str, skipped: Collection[int] = (), **how: Any
) -> None:
    """Saved at iteration 4; plain Megatron-LM goes on with ours as with its own, and we, a rank killed, with its."""
    saves = {who: jobs.folder / f"{name}-{who}" for who in ("plain", "odyssey")}
    save = "--save {} --save-interval 4 --exit-interval 4"
    jobs.plain(f"{flags} {save.format(saves['plain'])}", **how)
    shot = jobs.odyssey(name, f"{flags} {save.format(saves['odyssey'])}", inject=inject, **how)
    assert shot.exit_code == 0, shot.log[-4000:]
    whole = jobs.plain(f"{flags} --load {saves['plain']}", **how)
    ours = jobs.plain(f"{flags} --load {saves['odyssey']}", **how)
    assert_same_lines(ours, whole, first=5, skipped=skipped)
    inject = "rank=2,step=5,at=agreement"
    loaded = jobs.odyssey(f"{name}-loaded", f"{flags} --load {saves['plain']}", inject=inject, **how)
    assert_same_lines(loaded, whole, first=5, skipped=skipped)


def indexed(prefix: Path, documents: Sequence[bytes]) -> Path:
    """An indexed dataset of ``documents``, a token for each byte; returns its ``prefix``."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix.parent.mkdir(exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for document in documents:
        builder.add_document(torch.tensor(list(document)), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return prefix


class _Tensors(_EmptyStateDictLoadPlanner):
    """Objects may be of classes that another Megatron-LM has."""

    def _should_include_key(self, key: str, metadata: Metadata) -> bool:
        return isinstance(metadata.state_dict_metadata[key], TensorStorageMetadata)


def checkpoint(folder: Path, iteration: int) -> dict[str, torch.Tensor | None]:
    """What a torch_dist checkpoint holds, by global name: its tensors, and None for other objects."""
    reader, state = FileSystemReader(folder / f"iter_{iteration:07d}"), dict[str, Any]()
    _load_state_dict(state, storage_reader=reader, planner=_Tensors(), no_dist=True)
    return dict.fromkeys(reader.read_metadata().state_dict_metadata) | state
