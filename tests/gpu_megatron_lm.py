"""What ``tests/gpu.sh`` runs of an unmodified Megatron-LM: jobs on GPUs beside plain Megatron-LM with the same flags.

Plain Megatron-LM has no way for several ranks on one GPU: where they share one, it runs with one rank that computes the
same microbatches, so that losses can be compared, and times say what sharing takes.

They take Megatron's own paths by device that the example does not (``docs/devices.md``): experts and how their tokens
come to the host, fused permutation and shared experts on a stream of their own, context parallelism, fused rotary
embeddings, ``--train-sync-interval``.
"""

from __future__ import annotations

import importlib.util
import re
import statistics
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from odyssey_megatron.errors import ConfigError
from tests.benchmarks.bars import largest_difference

CHECKOUT = Path(__file__).resolve().parents[1]
STEPS = 20
ROUNDING = 2e-3
"""Relative, of losses in bf16: sums in another order."""
NORM_ROUNDING = 2e-2
"""Of gradient norms in bf16, which leap where losses hardly differ (``NORM_BFLOAT16`` in ``megatron_lm/jobs.py``)."""
MODEL = (
    "--num-layers 8 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 8 --group-query-attention "
    "--num-query-groups 4 --seq-length 128 --max-position-embeddings 128 --normalization RMSNorm --swiglu "
    "--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout 0 "
    f"--hidden-dropout 0 --micro-batch-size 1 --global-batch-size 16 --train-iters {STEPS} --lr 1e-3 --min-lr 1e-4 "
    "--lr-warmup-iters 2 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --bf16 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 383 --num-workers 0 --log-interval 1 "
    "--eval-interval 1000 --eval-iters 0"
)
TE = "--transformer-impl transformer_engine"
LOCAL = "--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion --no-rope-fusion"
UNLESS = {"scaled_masked_softmax_cuda": "--no-masked-softmax-fusion"}
"""Flags of local layers where a module is missing: Megatron's error in the first forward. It comes with apex."""
SHARED = "--odyssey-backend gloo"
ON_CPU = "--distributed-backend gloo --no-masked-softmax-fusion --no-bias-swiglu-fusion"


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A job beside plain Megatron-LM."""

    name: str
    gpus: int
    flags: str
    inject: str = ""
    apart: str = ""
    """Besides ``flags``, how its ranks share out a microbatch."""
    needs: str = ""
    """A module of Python's."""

    @property
    def log(self) -> str:
        """Of the last of its jobs, without an ending."""
        name = self.name.replace(" ", "-").replace(",", "")
        return name if self.inject else f"{name}.undisturbed"


BESIDE = (
    Beside(name="Megatron-LM on one GPU", gpus=1, flags=f"{LOCAL} --train-sync-interval 5"),
    Beside(name="Megatron-LM, a kill", gpus=2, flags=LOCAL, inject="rank=1,step=6,at=backward"),
    Beside(
        name="Megatron-LM, experts, a kill",
        gpus=2,
        flags=f"{TE} --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm "
        "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-permute-fusion "
        "--moe-shared-expert-intermediate-size 128 --moe-shared-expert-overlap",
        needs="transformer_engine",
        inject="rank=1,step=6,at=forward",
    ),
    Beside(
        name="Megatron-LM, context-parallel, a kill",
        gpus=4,
        flags=TE,
        apart="--context-parallel-size 2",
        needs="transformer_engine",
        inject="rank=2,step=6,at=backward",
    ),
    Beside(
        name="Megatron-LM on one GPU, apex",
        gpus=1,
        flags="--transformer-impl local --no-rope-fusion --normalization LayerNorm --hidden-size 1024",
        needs="fused_weight_gradient_mlp_cuda",
    ),
    Beside(
        name="Megatron-LM on one GPU, which it fills",
        gpus=1,
        flags=f"{LOCAL} --num-layers 12 --hidden-size 2048 --ffn-hidden-size 5504 --num-attention-heads 16 "
        "--num-query-groups 8 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 2",
    ),
)


class Line(NamedTuple):
    """Of an iteration, as Megatron-LM prints it."""

    iteration: int
    seconds: float
    loss: float
    grad_norm: float


_LINE = re.compile(
    r"iteration +(\d+)/.*elapsed time per iteration \(ms\): ([.\d]+) \|.* lm loss: ([-+.E\d]+) \|.* grad norm: ([.\d]+)"
)


def lines(log: Path) -> list[Line]:
    """Each iteration once, as it was printed last. Raises ConfigError if one is missing."""
    found = {
        int(number): Line(int(number), float(time_ms) / 1e3, float(loss), float(norm))
        for number, time_ms, loss, norm in _LINE.findall(log.read_text())
    }
    if sorted(found) != [*range(1, STEPS + 1)]:
        raise ConfigError(f"{log}: printed {len(found)} of {STEPS} iterations")
    return [found[number] for number in sorted(found)]


def commands(
    case: Beside, checkout: Path, out: Path, *, dry: bool, shares: bool = False
) -> dict[str, list[str]]:
    """What is run, by the name of its log: plain, undisturbed, and shot at if it is; arguments of Python's. ``shares``:
    several ranks are on one GPU.
    """
    script, ranks = str(checkout / "pretrain_gpt.py"), ["--nproc-per-node", str(case.gpus)]
    flags = [*MODEL.split(), *case.flags.split(), *(ON_CPU.split() if dry else [])]
    if LOCAL in case.flags and not dry:
        flags += [flag for module, flag in UNLESS.items() if importlib.util.find_spec(module) is None]
    apart, name = case.apart.split(), case.log.removesuffix(".undisturbed")
    plain = [str(CHECKOUT / "tests" / "megatron_lm" / "plain.py")] if dry else []
    run = ["-m", "odyssey_megatron", "run", *ranks]
    run += ["--preload", "odyssey_megatron.mcore.cpu.preload"] if dry else []
    device = "cpu" if dry else "cuda"
    alone = ["--nproc-per-node", "1", *plain, script, *flags]
    beside = [*ranks, *plain, script, *flags, *apart]
    found = {f"{name}.plain": ["-m", "torch.distributed.run", *(alone if shares else beside)]}
    for log, inject in ((f"{name}.undisturbed", ""), *([(name, case.inject)] if case.inject else [])):
        own = ["--odyssey", "--odyssey-device", device, "--odyssey-run-dir", str(out / log)]
        own += SHARED.split() if shares else []
        found[log] = [*run, script, *flags, *apart, *own, *(["--odyssey-inject", inject] if inject else [])]
    return found


def figures(case: Beside, logs: dict[str, Path], *, shares: bool = False) -> str:
    """Raises ConfigError if losses or gradient norms differ, or steps are missing."""
    plain, *ours = (lines(path) for path in logs.values())
    losses, norms = (
        max(largest_difference([of(one) for one in run], [of(one) for one in plain]) for run in ours)
        for of in (attrgetter("loss"), attrgetter("grad_norm"))
    )
    if losses > ROUNDING or norms > NORM_ROUNDING:
        raise ConfigError(
            f"{case.name}: losses {losses:.2g}, gradient norms {norms:.2g} off plain Megatron-LM's: {[*logs.values()]}"
        )
    plain_s, own_s = (statistics.median(one.seconds for one in run[1:]) for run in (plain, ours[0]))
    return (
        f"losses within {losses:.2g}, gradient norms within {norms:.2g} relative of plain Megatron-LM's; iteration "
        f"{1000 * own_s:.0f} ms undisturbed, {own_s / plain_s:.2f} of its"
        + (" with one rank" if shares else "")
    )
