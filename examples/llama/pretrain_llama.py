"""Pretrains a small Llama on real text with Megatron-Core, surviving the loss of ranks.

    odyssey run --nproc-per-node 8 examples/llama/pretrain_llama.py --pipeline-model-parallel-size 4 \
        --odyssey-device cpu --odyssey-inject "rank=5,step=7,at=backward"

Flags are spelled as Megatron-LM's. The model is what Megatron-LM builds for --normalization RMSNorm --swiglu
--position-embedding-type rope --group-query-attention --disable-bias-linear, and, unless they are to share a weight,
--untie-embeddings-and-output-weights. With --num-experts it is a mixture of experts.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import corpus

from odyssey_megatron.config import add_arguments, config_from
from odyssey_megatron.errors import EXIT_BAD_INPUT, ConfigError
from odyssey_megatron.mcore.plugin import Session, TrainingJob
from odyssey_megatron.upstream import compat


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    whole, real = {"type": int}, {"type": float}
    for name, default, kind in (
        ("num-layers", 8, whole), ("hidden-size", 64, whole), ("ffn-hidden-size", 192, whole),
        ("num-attention-heads", 4, whole), ("num-query-groups", 2, whole), ("seq-length", 64, whole),
        ("micro-batch-size", 1, whole), ("global-batch-size", 16, whole), ("train-iters", 40, whole),
        ("pipeline-model-parallel-size", 1, whole), ("tensor-model-parallel-size", 1, whole), ("seed", 1234, whole),
        ("context-parallel-size", 1, whole), ("expert-model-parallel-size", 1, whole),
        ("expert-tensor-parallel-size", None, whole),
        ("lr", 3e-3, real), ("min-lr", 3e-4, real), ("lr-warmup-iters", 4, whole), ("weight-decay", 0.1, real),
        ("clip-grad", 1.0, real), ("sgd-momentum", 0.9, real), ("attention-dropout", 0.0, real),
        ("hidden-dropout", 0.0, real), ("check-weight-hash-across-dp-replicas-interval", 0, whole),
        ("num-experts", None, whole), ("moe-router-topk", 2, whole), ("moe-layer-freq", 1, whole),
        ("moe-shared-expert-intermediate-size", None, whole), ("moe-router-load-balancing-type", "aux_loss", {}),
        ("moe-aux-loss-coeff", 0.0, real), ("moe-z-loss-coeff", None, real), ("moe-input-jitter-eps", None, real),
        ("moe-expert-capacity-factor", None, real), ("moe-token-dispatcher-type", "alltoall", {}),
        ("mtp-num-layers", None, whole),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", default=default, **kind)
    parser.add_argument(
        "--moe-router-enable-expert-bias",
        action="store_true",
        help="balance experts without an auxiliary loss",
    )
    parser.add_argument(
        "--data-path", default="", help="prefix of a Megatron dataset; default: built in the run folder"
    )
    parser.add_argument(
        "--data-cache-path",
        default="",
        help="folder of the dataset's indices, which all nodes have in common; default: in the run folder",
    )
    parser.add_argument("--sequence-parallel", action="store_true", help="with tensor parallelism")
    parser.add_argument(
        "--share-embeddings-and-output-weights", action="store_true", help="one weight of embedding and head"
    )
    parser.add_argument("--qk-layernorm", action="store_true", help="norms on queries and keys")
    parser.add_argument("--optimizer", default="adam", choices=("adam", "sgd"), help="Megatron's")
    precision = parser.add_mutually_exclusive_group()
    precision.add_argument(
        "--bf16", action="store_true", help="train in bfloat16 with float32 main parameters"
    )
    precision.add_argument("--fp16", action="store_true", help="in float16, with a dynamic loss scale")
    parser.add_argument(
        "--use-distributed-optimizer",
        action="store_true",
        help="optimizer state of a layer on two of its holders, not on all (--odyssey-redundancy-level)",
    )
    parser.add_argument(
        "--save-weights", default="", help="folder for the final weights, a file a layer and shard"
    )
    add_arguments(parser)
    return parser.parse_args()


def check_model(args: argparse.Namespace) -> None:
    """What Megatron would only notice in the first forward. Raises ConfigError."""
    for whole, part in (("num_attention_heads", "num_query_groups"), ("hidden_size", "num_attention_heads")):
        if getattr(args, whole) % getattr(args, part):
            flags = [f"--{name.replace('_', '-')} {getattr(args, name)}" for name in (whole, part)]
            raise ConfigError(f"{flags[0]} is not divisible by {flags[1]}. Choose a divisor.")


def experts(args: argparse.Namespace) -> dict[str, Any]:
    """Megatron's configuration of a mixture of experts."""
    if args.num_experts is None:
        return {}
    given = {name: value for name, value in vars(args).items() if name.startswith("moe_")}
    score = {"moe_router_score_function": "sigmoid"} if args.moe_router_enable_expert_bias else {}
    return {
        "num_moe_experts": args.num_experts,
        "moe_ffn_hidden_size": args.ffn_hidden_size,
        **score,
        **given,
    }


def transformer_config(args: argparse.Namespace, dtype: Any) -> Any:
    """Megatron's configuration of the model; fusions that need a GPU are off."""
    import torch
    from megatron.core.transformer import TransformerConfig

    try:
        return TransformerConfig(
            num_layers=args.num_layers,
            hidden_size=args.hidden_size,
            ffn_hidden_size=args.ffn_hidden_size,
            num_attention_heads=args.num_attention_heads,
            num_query_groups=args.num_query_groups,
            tensor_model_parallel_size=args.tensor_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            sequence_parallel=args.sequence_parallel,
            qk_layernorm=args.qk_layernorm,
            attention_dropout=args.attention_dropout,
            hidden_dropout=args.hidden_dropout,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=args.bf16,
            fp16=args.fp16,
            calculate_per_token_loss=True,
            deallocate_pipeline_outputs=True,
            gradient_accumulation_fusion=False,
            mtp_num_layers=args.mtp_num_layers,
            masked_softmax_fusion=False,
            persist_layer_norm=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            apply_rope_fusion=False,
            **experts(args),
        )
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"Megatron refuses this model: {error}") from error


def model_spec(args: argparse.Namespace, float64: bool) -> Any:
    """How to build any part of the model, and how to train it."""
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig

    from odyssey_megatron.mcore.model.layers import ModelSpec

    check_model(args)
    half = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    dtype = half or (torch.float64 if float64 else torch.float32)
    config = transformer_config(args, dtype)

    def layer_spec() -> Any:
        if args.num_experts is None:
            return get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=args.qk_layernorm)
        return get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")

    def model_provider(pre_process: bool, post_process: bool, pg_collection: Any) -> GPTModel:
        inner = layer_spec()
        return GPTModel(
            config,
            inner,
            vocab_size=corpus.VOCAB_SIZE,
            max_sequence_length=args.seq_length,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=args.share_embeddings_and_output_weights,
            position_embedding_type="rope",
            mtp_block_spec=get_gpt_mtp_block_spec(config, inner, use_transformer_engine=False),
            pg_collection=pg_collection,
        )

    optimizer = OptimizerConfig(
        optimizer=args.optimizer,
        sgd_momentum=args.sgd_momentum,
        lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        clip_grad=args.clip_grad,
        bf16=args.bf16,
        fp16=args.fp16,
        params_dtype=dtype,
    )
    return ModelSpec(
        config=config,
        model_provider=model_provider,
        optimizer_config=optimizer,
        ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=args.bf16 or args.fp16),
        seed=args.seed,
        is_tied=args.share_embeddings_and_output_weights,
    )


def forward_step(data_iterator: Any, model: Any) -> tuple[Any, Any]:
    """Megatron's: one microbatch through one model chunk."""
    import torch
    from megatron.core.utils import get_attr_wrapped_model

    first = get_attr_wrapped_model(model, "pre_process")
    last = get_attr_wrapped_model(model, "post_process")
    if not (first or last):  # the chunk's input comes from the previous stage
        return model(None, None, None), None
    device = torch.cuda.current_device()
    batch = {name: value.to(device, non_blocking=True) for name, value in next(data_iterator).items()}
    batch = compat.batch_on_this_cp_rank(batch)
    labels = batch["labels"] if last else None
    output = model(batch["tokens"], batch["position_ids"], None, labels=labels, loss_mask=batch["loss_mask"])
    return output, partial(loss_function, batch["loss_mask"])


def loss_function(loss_mask: Any, losses: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Sum of the losses, number of tokens, and what is reported: with per-token loss, as in pretrain_gpt.py."""
    import torch

    loss_mask = loss_mask.reshape(-1).to(losses.dtype)
    total = (losses.reshape(-1) * loss_mask).sum()
    num_tokens = loss_mask.sum()
    return total, num_tokens.to(torch.int), {"lm loss": torch.stack([total.detach(), num_tokens])}


def build_dataset(args: argparse.Namespace, run_dir: str) -> Any:
    for suffix in (".bin", ".idx") if args.data_path else ():
        if not Path(args.data_path + suffix).is_file():
            raise ConfigError(
                f"--data-path {args.data_path}: there is no file {args.data_path + suffix}. Give the prefix of a "
                "dataset made with Megatron's tools/preprocess_data.py (PREFIX.bin and PREFIX.idx), or leave the "
                "flag out to train on the built-in text."
            )
    prefix = args.data_path or corpus.build(Path(run_dir) / "corpus" / "topics")
    try:
        return corpus.dataset(
            prefix,
            seq_length=args.seq_length,
            num_samples=args.train_iters * args.global_batch_size,
            seed=args.seed,
            cache=Path(args.data_cache_path or Path(run_dir) / "corpus" / "cache"),
        )
    except FileNotFoundError as error:  # of ranks other than 0: Megatron builds indices on that one alone
        raise ConfigError(
            f"{error.filename} does not exist on this node, where these indices are of {args.train_iters} iterations "
            f"of {args.global_batch_size} samples of {args.seq_length} tokens, seed {args.seed}. If the job was "
            "started with others, use its arguments (--train-iters, --global-batch-size, --seq-length, --seed). "
            "Otherwise rank 0 has built them where it alone sees them: name folders that all nodes have in common, "
            "by --odyssey-run-dir, or, if nodes have run folders of their own, by --data-path and --data-cache-path."
        ) from error


def scheduler_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """As Megatron-LM computes them from the flags, in samples."""
    samples = args.train_iters * args.global_batch_size
    return {
        "init_lr": 0.0,
        "max_lr": args.lr,
        "min_lr": args.min_lr,
        "lr_warmup_steps": args.lr_warmup_iters * args.global_batch_size,
        "lr_decay_steps": samples,
        "lr_decay_style": "cosine",
        "start_wd": args.weight_decay,
        "end_wd": args.weight_decay,
        "wd_incr_steps": samples,
        "wd_incr_style": "constant",
    }


def save_weights(folder: Path, model: Any) -> None:
    """A file a layer and shard. If a rank dies meanwhile, those who are left have its layers and do this again."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    for (layer, shard), weights in model.weights().items():
        name = f"layer_{layer:03d}" + (f"_{shard}" if shard else "")
        unfinished = folder / f"{name}.unfinished"
        torch.save(weights, unfinished)
        unfinished.rename(folder / f"{name}.pt")


def main() -> None:
    args = parse_arguments()
    config = config_from(args)
    with Session.start(config) as session:
        spec = model_spec(args, float64=config.float64 == "on")
        with session.rank_zero_first():
            dataset = build_dataset(args, config.run_dir)
        session.train(
            TrainingJob(
                model=spec,
                forward_step=forward_step,
                dataset=dataset,
                train_iters=args.train_iters,
                global_batch_size=args.global_batch_size,
                micro_batch_size=args.micro_batch_size,
                seq_length=args.seq_length,
                vocab_size=corpus.VOCAB_SIZE,
                pipeline_model_parallel_size=args.pipeline_model_parallel_size,
                optimizer_copies=config.optimizer_copies if args.use_distributed_optimizer else 0,
                scheduler=scheduler_arguments(args),
                check_weight_hash_across_dp_replicas_interval=args.check_weight_hash_across_dp_replicas_interval,
                on_step=partial(print_step, args.train_iters),
                on_end=partial(save_weights, Path(args.save_weights)) if args.save_weights else None,
            )
        )


def print_step(train_iters: int, step: int, outcome: Any) -> None:
    """A progress line now and then."""
    if step % 10 == 0 or step == train_iters - 1:
        norm = "skipped" if outcome.skipped else f"grad norm {outcome.grad_norm:.3f}"
        print(
            f"step {step:5d}/{train_iters} | lm loss {outcome.losses['lm loss']:.6f} | {norm} | "
            f"lr {outcome.lr:.3e}",
            flush=True,
        )


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
