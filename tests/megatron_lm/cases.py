"""Megatron-LM's own training cases, shrunk until they run on a CPU."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odyssey_megatron.doctor.launch_line import case_flags, judged
from tests.megatron_lm.jobs import SCRIPT

SIZES: dict[str, int] = {
    "--hidden-size": 32, "--ffn-hidden-size": 64, "--seq-length": 16, "--max-position-embeddings": 16,
    "--kv-channels": 8, "--kv-lora-rank": 16, "--q-lora-rank": 16, "--qk-head-dim": 8, "--qk-pos-emb-head-dim": 4,
    "--v-head-dim": 8, "--moe-ffn-hidden-size": 32, "--moe-shared-expert-intermediate-size": 32,
    "--train-iters": 6, "--eval-interval": 3, "--exit-interval": 6, "--save-retain-interval": 6,
}  # fmt: skip
"""What a case that has the flag gets in its place."""
LAYERS, HEADS, MICROBATCHES = 8, 8, 16
"""At most."""
STATES = {"--mamba-state-dim": 8, "--mamba-head-dim": 8, "--mamba-num-groups": 2}
"""Of state spaces, which leave their sizes to Megatron-LM."""
ELSEWHERE = (
    "--data-path --data-cache-path --vocab-file --merge-file --tokenizer-type --tokenizer-model --vocab-size "
    "--mock-data --split --save --save-interval --load --tensorboard-dir --seed --distributed-backend "
    "--wandb-project --wandb-exp-name --wandb-entity --wandb-save-dir "
    "--distributed-timeout-minutes --global-batch-size --micro-batch-size --pipeline-model-parallel-size "
    "--transformer-impl --bf16 --attention-dropout --hidden-dropout --no-load-optim --finetune "
    "--error-injection-rate --error-injection-type --use-checkpoint-opt_param-scheduler --override-opt_param-scheduler"
).split()
"""Files and their formats, what is added below, what a job without a checkpoint to load cannot be asked, and mistakes
that Megatron-LM is to make, and ends by.
"""
ON_A_CPU = (
    "--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-bias-swiglu-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion --attention-dropout 0 "
    "--hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 255 --mock-data --split 90,8,2 --num-workers 0 "
    "--distributed-backend gloo --micro-batch-size 1"
)
"""No Transformer Engine there, and no fused kernels. Without dropout, whose numbers Odyssey draws by the microbatch."""
NEEDS = {"--fp8-format": "Transformer Engine", "--cross-entropy-loss-fusion": "a fused kernel"}
NEEDS |= dict.fromkeys(
    ("--moe-grouped-gemm", "--moe-permute-fusion", "--moe-router-fusion"), "Transformer Engine"
)
NEEDS |= {"--multi-latent-attention": "Transformer Engine", "--apply-layernorm-1p": "Transformer Engine"}
NEEDS |= {"--fim-data": "a tokenizer of text"}
NEEDS |= {"--defer-embedding-wgrad-compute": "a fused kernel"}
NEEDS |= {"--overlap-p2p-communication-warmup-flush": "CUDA's streams"}
"""Flag -> what it needs: cases with it are counted, and not run."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What some of Megatron's cases come to."""

    names: tuple[str, ...]
    flags: str
    ranks: int
    stages: int
    script: str
    needs: str = ""
    """That a CPU lacks."""


WITH_TRANSFORMER_ENGINE = " --".join(
    one
    for one in ON_A_CPU.split(" --")
    if one not in ("--transformer-impl local", "no-gradient-accumulation-fusion", "no-rope-fusion")
)
"""The same where there is one (``tests/te``)."""
STILL_NEEDS = {
    flag: what for flag, what in NEEDS.items() if what != "Transformer Engine" or flag == "--fp8-format"
} | {"--moe-router-fusion": "a fused kernel"}


def shrunk(args: Mapping[str, Any], on_a_cpu: str = ON_A_CPU) -> tuple[str, int, int]:
    """(flags, ranks, stages) of a small job with all that the case with ``args`` asks for, and what it needs here."""
    stages, tensor = (args.get(f"--{kind}-model-parallel-size", 1) for kind in ("pipeline", "tensor"))
    tensor *= args.get("--context-parallel-size", 1)
    small = {flag: value for flag, value in args.items() if flag not in ELSEWHERE}
    small |= {flag: min(value, small[flag]) for flag, value in SIZES.items() if flag in small}
    for flag in ("--hierarchical-context-parallel-sizes", "--spec"):
        if isinstance(words := small.get(flag), str):
            small[flag] = words.strip("[]")
    if "--hybrid-override-pattern" in small:
        small["--hybrid-override-pattern"] = small["--hybrid-override-pattern"][:LAYERS]
    if "--spec" in small:
        small |= STATES
    small |= {"--eval-iters": 2, "--log-interval": 1}
    if "--fp16" in small:  # a scale with which no step overflows
        small |= {"--initial-loss-scale": 1024}
    small["--num-layers"] = min(args["--num-layers"], LAYERS)
    small["--num-attention-heads"] = min(args["--num-attention-heads"], HEADS)
    if "--num-query-groups" in small:
        small["--num-query-groups"] = min(args["--num-query-groups"], HEADS // 2)
    replicas = 3 if stages * tensor == 1 else 2 if stages * tensor <= 4 or stages == 1 else 1
    if stages == 1 and (experts := args.get("--expert-model-parallel-size", 1)) > 1:
        replicas = 2 * experts  # a second gang
    share = args["--global-batch-size"] // args["--micro-batch-size"]
    small["--global-batch-size"] = max(min(share, MICROBATCHES) // replicas, stages, 2) * replicas
    if "--rampup-batch-size" in small:
        share = small["--global-batch-size"] // 2
        small["--rampup-batch-size"] = f"{share} {share} {3 * share}"
    # Interleaved messages that overlap would give plain Megatron-LM other losses each time, without CUDA's streams.
    if any("virtual" in flag for flag in small) and "--overlap-p2p-communication-warmup-flush" not in small:
        small["--no-overlap-p2p-communication"] = True
    words = case_flags({"args": dict(sorted(small.items()))})
    given = {word for word in words if word.startswith("--")}
    usual = [one for one in on_a_cpu.split(" --") if f"--{one.removeprefix('--').split()[0]}" not in given]
    return (
        " ".join([*words, *(f"--{one.removeprefix('--')}" for one in usual)]),
        stages * tensor * replicas,
        stages,
    )


def distinct(
    path: Path, version: str, *, needed: Mapping[str, str] = NEEDS, on_a_cpu: str = ON_A_CPU
) -> list[Case]:
    """Of the cases in ``path`` that start under ``--odyssey``, each combination of flags once.

    Args:
        needed: flag -> what it needs that there is not.
        on_a_cpu: further flags of all of them.
    """
    found: dict[tuple[str, int, int, str, str], list[str]] = defaultdict(list)
    for case in json.loads(path.read_text())["cases"]:
        verdict = judged(case_flags(case), version)
        if verdict.refused or verdict.unknown:
            continue
        needs = next((what for flag, what in needed.items() if flag in case["args"]), "")
        script = "pretrain_mamba.py" if case["family"] == "hybrid" else SCRIPT
        found[(*shrunk(case["args"], on_a_cpu), script, needs)].append(case["name"])
    return [
        Case(names=tuple(names), flags=flags, ranks=ranks, stages=stages, script=script, needs=needs)
        for (flags, ranks, stages, script, needs), names in found.items()
    ]
