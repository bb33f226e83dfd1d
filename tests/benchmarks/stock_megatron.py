"""The example's model under Megatron-Core alone: its own groups, 1F1B, DDP, optimizer; nothing of Odyssey.

Started like the example (same flags, same initial weights, same samples in each microbatch), as plain
processes:

    stock_megatron.py --world-size 8 --out steps.json [flags of pretrain_llama.py]

Writes {"loss": [...], "grad_norm": [...], "committed_s": [...]} of the steps: when each was done; and "optimizer_bytes"
of the fullest rank. With ``--odyssey-float64 on`` it trains in float64, too (:func:`keep_float64`), and with
``--drawn-in-float32`` from the initial weights of a float32 job.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "llama"))

from odyssey_megatron.mcore.cpu import preload  # isort: skip  # noqa: F401 - the CPU device first
import pretrain_llama
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.optimizer import clip_grads, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection

from odyssey_megatron.mcore.model import float64, rng, span
from odyssey_megatron.mcore.model.layers import initial_parts


def keep_float64() -> None:
    """Let Megatron train in float64: its optimizers then take such weights for float32 ones, and its norm and its
    scaling by the number of tokens (core_v0.16.1 core/distributed/finalize_model_grads.py, line 496) round to it.
    """
    float64.install()
    torch.set_default_dtype(torch.float64)
    type_of = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = type_of(self, *args, **kwargs)
        return "torch.cuda.FloatTensor" if found == "torch.cuda.DoubleTensor" else found

    def norm(chunk_size: int, overflows: Any, tensors: list[list[torch.Tensor]], *args: Any) -> Any:
        return torch.stack([one.norm() for one in tensors[0]]).norm().reshape(1), None

    torch.Tensor.type = type_
    clip_grads.l2_norm_impl = norm


class ReplicaBatches:
    """The microbatches that Odyssey's failure-free layout gives to this replica, in its order."""

    def __init__(self, dataset: Any, args: Any):
        self._dataset, self._args = dataset, args
        self._replica, self._replicas = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        self.per_step = args.global_batch_size // args.micro_batch_size // self._replicas
        self.consumed = 0

    def __next__(self) -> Any:
        args = self._args
        step, index = divmod(self.consumed, self.per_step)
        self.consumed += 1
        microbatch = index * self._replicas + self._replica
        first = step * args.global_batch_size + microbatch * args.micro_batch_size
        return torch.utils.data.default_collate(
            [self._dataset[sample] for sample in range(first, first + args.micro_batch_size)]
        )


def build_model(args: Any, spec: Any, drawn: Any) -> Any:
    """A stage as GPTModel itself builds it, with Odyssey's initial weights, those of ``drawn``."""
    config, groups = spec.config, ProcessGroupCollection.use_mpu_process_groups()
    config.pipeline_model_parallel_size = args.pipeline_model_parallel_size
    config.finalize_model_grads_func = finalize_model_grads
    first, last = mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()
    model = spec.model_provider(pre_process=first, post_process=last, pg_collection=groups)
    model.model_type = ModelType.encoder_or_decoder

    def copy(target: torch.nn.Module, layer: int, part: str) -> None:
        target.load_state_dict(initial_parts(drawn, [layer], groups)[layer][part].state_dict())

    if first:
        copy(model.embedding, 0, "embedding")
    for layer in model.decoder.layers:
        copy(layer, layer.layer_number, "layer")
    if last:
        copy(model.decoder.final_layernorm, spec.head, "final_layernorm")
        copy(model.output_layer, spec.head, "output_layer")
    return DistributedDataParallel(config, spec.ddp_config, model, pg_collection=groups)


class StockTrainer:
    """One rank's stage, its optimizer and its data; ``parallel_state`` must be initialised."""

    def __init__(self, args: Any, dataset: Any, *, drawn_in_float32: bool = False):
        in_float64 = pretrain_llama.config_from(args).float64 == "on"
        if in_float64:
            keep_float64()
        spec = pretrain_llama.model_spec(args, float64=in_float64)
        drawn = pretrain_llama.model_spec(args, float64=False) if drawn_in_float32 else spec
        if args.use_distributed_optimizer:  # Odyssey does without Megatron's
            spec.ddp_config.use_distributed_optimizer = True
            spec.optimizer_config.use_distributed_optimizer = True
        rng.initialize(args.seed, rng.LayerPart.of(ProcessGroupCollection.use_mpu_process_groups()))
        span.install()
        self._args, self._model = args, build_model(args, spec, drawn)
        self._optimizer = get_megatron_optimizer(spec.optimizer_config, [self._model])
        self._scheduler = OptimizerParamScheduler(self._optimizer, **pretrain_llama.scheduler_arguments(args))
        self._batches, self._forward_backward = ReplicaBatches(dataset, args), get_forward_backward_func()

    def step(self) -> tuple[float, float]:
        """One training step; the mean loss of the global batch, and the gradient's norm."""
        args = self._args
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        losses = self._forward_backward(
            forward_step_func=pretrain_llama.forward_step,
            data_iterator=self._batches,
            model=[self._model],
            num_microbatches=self._batches.per_step,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=False,
        )
        _, grad_norm, _ = self._optimizer.step()
        self._scheduler.step(args.global_batch_size)
        total = sum((one["lm loss"] for one in losses), torch.zeros(2))
        dist.all_reduce(total)
        return float(total[0] / total[1]), float(grad_norm)

    def optimizer_bytes(self) -> int:
        """Of what the optimizer keeps on this rank, and of weights that it keeps beside the model's."""
        model = {parameter.untyped_storage().data_ptr() for parameter in self._model.parameters()}
        inner = [one.optimizer for one in self._optimizer.chained_optimizers if one.optimizer is not None]
        optimized = [
            parameter for one in inner for group in one.param_groups for parameter in group["params"]
        ]
        kept = [value for one in inner for state in one.state.values() for value in state.values()]
        kept += [parameter for parameter in optimized if parameter.untyped_storage().data_ptr() not in model]
        return sum(value.nbytes for value in kept)

    def state(self) -> dict[str, Any]:
        """What a checkpoint of this rank holds."""
        (inner,) = self._optimizer.chained_optimizers
        return {
            "model": self._model.state_dict(),
            "optimizer": inner.optimizer.state_dict(),
            "scheduler": self._scheduler.state_dict(),
            "microbatches": self._batches.consumed,
        }

    def load(self, state: dict[str, Any]) -> None:
        (inner,) = self._optimizer.chained_optimizers
        self._model.load_state_dict(state["model"])
        inner.optimizer.load_state_dict(state["optimizer"])
        self._scheduler.load_state_dict(state["scheduler"])
        self._batches.consumed = state["microbatches"]


def train(trainer: StockTrainer, steps: int) -> dict[str, Any]:
    result: dict[str, list[float]] = {"loss": [], "grad_norm": [], "committed_s": []}
    for _ in range(steps):
        loss, grad_norm = trainer.step()
        result["loss"].append(loss)
        result["grad_norm"].append(grad_norm)
        result["committed_s"].append(time.monotonic())
    most = torch.tensor(trainer.optimizer_bytes())
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return result | {"optimizer_bytes": int(most)}


def run_rank(rank: int, given: argparse.Namespace, port: int, args: Any, dataset: Any) -> None:
    world_size = given.world_size
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    mpu.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
    )
    trainer = StockTrainer(args, dataset, drawn_in_float32=given.drawn_in_float32)
    result = train(trainer, args.train_iters)
    if rank == 0:
        given.out.write_text(json.dumps(result))
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--drawn-in-float32", action="store_true")
    given, sys.argv[1:] = parser.parse_known_args()
    args = pretrain_llama.parse_arguments()
    # Before the fork: its index files are then built once, and its pages shared.
    dataset = pretrain_llama.build_dataset(args, pretrain_llama.config_from(args).run_dir)
    port = 20000 + os.getpid() % 20000
    children = []
    for rank in range(given.world_size):
        child = os.fork()
        if child == 0:
            run_rank(rank, given, port, args, dataset)
            os._exit(0)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(1 if any(statuses) else 0)


if __name__ == "__main__":
    main()
