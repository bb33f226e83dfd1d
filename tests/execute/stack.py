"""A job without Megatron: the stack of ``model.py`` trained through the real rank runtime, groups and recovery.

Run by ``odyssey run``. ``--messages pairs`` uses one group for each (sender, receiver, kind), as NCCL needs it.
Journals the losses and the weights' digests; the test compares them with ``alone.undisturbed``.
"""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

import torch

from odyssey_megatron import recover
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.codec import to_json
from odyssey_megatron.config import OdysseyConfig, add_arguments, config_from
from odyssey_megatron.errors import JobStopped
from odyssey_megatron.execute.rank import RankRuntime
from odyssey_megatron.launch.rank.environment import journal_of
from odyssey_megatron.launch.rank.injector import Injector
from odyssey_megatron.launch.rank.member import Member
from odyssey_megatron.policy.costs.estimate import estimated_profile
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.costs.sizes import AttentionShape, Precision
from odyssey_megatron.rebuild.groups import build_groups, init_default_group
from tests.execute.alone import LAYERS, MICROBATCHES, STEPS, WIDTH
from tests.execute.model import Stack


def job_of(config: OdysseyConfig, **sizes: Any) -> JobSpec:
    """A job that trains the stack."""
    usual = {"tensor_model_parallel_size": 1, "train_steps": STEPS}
    return JobSpec(
        num_layers=LAYERS,
        num_microbatches=MICROBATCHES,
        tokens_per_step=MICROBATCHES,
        least_holders=config.least_holders,
        eager_forwards=config.eager_forwards,
        **(usual | sizes),
    )


def profile(*, tied: bool = False) -> Profile:
    """What the stack costs, about."""
    return estimated_profile(
        num_transformer_layers=LAYERS - 2, hidden_size=WIDTH, ffn_hidden_size=WIDTH,
        attention=AttentionShape.grouped(WIDTH, 1, 1, WIDTH), seq_length=2, micro_batch_size=1, vocab_size=WIDTH,
        precision=Precision(dtype_bytes=8), flops_per_s=1e9, is_tied=tied,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--messages", choices=("tags", "pairs"), default="tags")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--exhausted", type=int, default=-1, help="rank without memory in generation 2")
    parser.add_argument("--out", required=True)
    add_arguments(parser)
    args = parser.parse_args()
    config = config_from(args)
    member = Member.connect(config)
    journal = journal_of(member.rank, config.run_dir)
    init_default_group(member)
    job = job_of(config, pipeline_model_parallel_size=args.stages)
    member.starting.post_job(job, to_json(profile()))
    model, injector = Stack(), Injector(config.injections, member.rank, journal, member.incarnation)
    rank = RankRuntime(
        config=config,
        member=member,
        model=model,
        build=lambda number, named, before: build_groups(member, number, named, config, before=before),
        tagged_messages=args.messages == "tags",
        fault_point=injector.at,
        slow_links=injector.slow_links,
        journal=journal,
        on_commit=lambda step, outcome: None,
    )
    if member.rank == args.exhausted:
        model.room = lambda: rank.generation != 2
    try:
        recover.train(member, rank, train_steps=STEPS)
    except JobStopped as stop:
        raise SystemExit(stop.exit_code) from None
    weights = {layer: pieces["w0"][0] for layer, pieces in model.held.items()}
    torch.save(weights, f"{args.out}.{member.rank}")
    digest = {str(layer): hashlib.sha256(one.numpy().tobytes()).hexdigest() for layer, one in weights.items()}
    journal.event("weights", step=STEPS, digest=digest)


if __name__ == "__main__":
    main()
