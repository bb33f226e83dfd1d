"""A job without Megatron: a stack of small matrices trained through the real rank runtime, groups and recovery.

Run by ``odyssey run``. ``--messages pairs`` uses one group for each (sender, receiver, kind), as NCCL needs it.
Journals the losses and the weights' digests; the test compares them with :func:`undisturbed`.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from odyssey_megatron import recover
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.codec import to_json
from odyssey_megatron.config import add_arguments, config_from
from odyssey_megatron.errors import JobStopped
from odyssey_megatron.execute.interpreter import Needs
from odyssey_megatron.execute.rank import RankRuntime
from odyssey_megatron.launch.environment import journal_of
from odyssey_megatron.launch.inject import Injector
from odyssey_megatron.launch.member import Member
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.slices import Span
from odyssey_megatron.policy.profile import Attention, Precision, estimated_profile
from odyssey_megatron.rebuild.groups import build_groups, init_default_group
from odyssey_megatron.rebuild.manifest import Tensors

LAYERS, WIDTH, MICROBATCHES, STEPS = 6, 4, 8, 8


def by_number(tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a layer with names."""
    return {str(number): tensor for number, tensor in enumerate(tensors)}


def initial(layer: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(layer)
    return torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=generator) / 2


def sample(step: int, microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + microbatch)
    return torch.randn(2, WIDTH, dtype=torch.float64, generator=generator)


def apply_step(weight: torch.Tensor, momentum: torch.Tensor, gradient: torch.Tensor) -> None:
    momentum.mul_(0.9).add_(gradient, alpha=1 / MICROBATCHES)
    weight.sub_(momentum, alpha=0.05)


@dataclass
class Outcome:
    losses: dict[str, float]
    grad_norm: float = 0.0
    lr: float = 0.05
    tokens: int = MICROBATCHES
    num_microbatches: int = MICROBATCHES
    skipped: bool = False
    dealt: tuple[float, float] | None = None


class NoLossScale:
    """Implements ``execute.parts.LossScale``."""

    blames_nobody = False

    def state(self) -> torch.Tensor:
        return torch.zeros(0, dtype=torch.float64)


class CellOfOne:
    """What a model of ``execute.parts.Model`` has to say of cells that are one rank."""

    cuts_activations = False

    def expect(self, kept: Mapping[int, tuple[Span, ...]]) -> None: ...

    def filled(self, layer: int, part: int, span: Span, tensors: Tensors) -> None: ...

    def settled(self) -> None: ...

    def take_over(self, totals: torch.Tensor, step: int, scale: torch.Tensor) -> None:
        assert not scale.numel()

    def weights_arrived(self, layer: int, part: int, spans: Sequence[Span], tensors: Tensors) -> None: ...

    def take_sums(self) -> None: ...

    def partial_gradients(self, first: int, last: int, part: int) -> list[torch.Tensor]:
        return []

    def expert_gradients(self, first: int, last: int, part: int) -> list[torch.Tensor]:
        return []

    def slices(self, first: int, last: int, part: int) -> list[Any]:
        return []

    def expert_slices(self, first: int, last: int, part: int) -> list[Any]:
        return []


class Stack(CellOfOne):
    """Implements ``execute.parts.Model``: layer i is x -> tanh(x W_i); the loss is the mean square of the output."""

    num_totals = 2
    share = 1.0
    loss_scale = NoLossScale()

    def __init__(self, device: str = "cpu") -> None:
        self._where: dict[str, Any] = {"device": torch.device(device), "dtype": torch.float64}
        self.held: dict[int, list[torch.Tensor]] = {}
        self._incoming: dict[int, list[torch.Tensor]] = {}
        self._flights: dict[tuple[int, int], tuple[Any, Any, Any]] = {}
        self._spans: dict[tuple[int, int], torch.Tensor] = {}
        self._gradients: dict[int, torch.Tensor] = {}
        self._losses: dict[int, torch.Tensor] = {}
        self._ahead: set[tuple[int, int]] = set()
        self._step = 0
        self.room: Callable[[], bool] = lambda: True
        self.begins: Callable[[], None] = lambda: None
        """Told of each step."""

    def create_layers(self, layers: tuple[int, ...], kept: Mapping[int, tuple[Span, ...]]) -> None:
        for layer in layers:
            momentum = torch.zeros(WIDTH, WIDTH, **self._where)
            self.held.setdefault(layer, [initial(layer).to(momentum.device), momentum])

    def moved_bytes(self, layer: int) -> int:
        return sum(tensor.nbytes for tensor in self.held[layer])

    def weights_of(self, layer: int, part: int, spans: Sequence[Span]) -> dict[str, torch.Tensor]:
        return {str(layer): self.held[layer][0]}

    def tensors_to_send(self, layer: int, part: int, span: Span) -> dict[str, torch.Tensor]:
        return by_number(self.held[layer])

    def tensors_to_fill(self, layer: int, part: int, span: Span) -> dict[str, torch.Tensor]:
        self._incoming[layer] = [torch.empty(WIDTH, WIDTH, **self._where) for _ in range(2)]
        return by_number(self._incoming[layer])

    def discard_incoming(self) -> None:
        self._incoming.clear()

    def forget(self) -> None:
        self.discard_incoming()
        self.held.clear()

    def take_layout(self, layout: Layout, worker: int) -> None:
        self.held.update(self._incoming)
        self._incoming.clear()
        before = self._gradients
        blocks = [block for block in layout.blocks() if worker in block.holders]
        size = WIDTH * WIDTH
        self._spans = {
            (b.first, b.last): torch.zeros((b.last - b.first) * size, **self._where) for b in blocks
        }
        self._gradients = {
            block.first + index: piece.view(WIDTH, WIDTH)
            for block in blocks
            for index, piece in enumerate(self._spans[block.first, block.last].split(size))
        }
        for layer in before.keys() & self._gradients.keys():
            self._gradients[layer].copy_(before[layer])

    def microbatches_of(self, step: int) -> int:
        return MICROBATCHES

    def begin_step(self, step: int) -> None:
        self.begins()
        self._step = step
        self._flights.clear()
        self._ahead.clear()
        self._losses.clear()
        for span in self._spans.values():
            span.zero_()

    def _sample(self, microbatch: int) -> torch.Tensor:
        return sample(self._step, microbatch).to(self._where["device"], non_blocking=True)

    def forward(
        self,
        microbatch: int,
        first: int,
        last: int,
        activation: torch.Tensor | None,
        *,
        ahead: bool = False,
        needs: Needs = None,
    ) -> torch.Tensor:
        if not self.room():
            raise torch.OutOfMemoryError("no room for an activation")
        x = self._sample(microbatch) if activation is None else activation
        x = x.requires_grad_()
        weights = [self.held[layer][0].detach().requires_grad_() for layer in range(first, last)]
        out = x
        for layer, weight in enumerate(weights, start=first):
            if needs is not None:
                needs(layer)
            out = torch.tanh(out @ weight)
        if last == LAYERS:
            out = out.square().mean()
        if ahead:
            self._ahead.add((microbatch, first))
        else:
            self._count(microbatch, out)
        self._flights[microbatch, first] = (x, weights, out)
        return out

    def _count(self, microbatch: int, out: torch.Tensor) -> None:
        if out.ndim == 0:  # a loss
            self._losses[microbatch] = out.detach()

    def adopt(self, visits: Any) -> None:
        ours = {(microbatch, first) for microbatch, first, _ in visits}
        for place in self._ahead:
            if place in ours:
                self._count(place[0], self._flights[place][2])
            else:
                del self._flights[place]
        self._ahead = set()

    def kept(self, microbatch: int, first: int, last: int) -> None: ...

    def undo(self, visits: Any) -> None:
        for microbatch, first, last in visits:
            self._flights.pop((microbatch, first), None)
            self._ahead.discard((microbatch, first))
            if last == LAYERS:
                self._losses.pop(microbatch, None)

    def input_grad(
        self,
        microbatch: int,
        first: int,
        last: int,
        grad: torch.Tensor | None,
        *,
        word: Any = None,
        passed: Callable[[int], None] | None = None,
    ) -> torch.Tensor | None:
        passed = passed or (lambda layer: None)
        passed(last)
        x, weights, out = self._flights[microbatch, first]
        grad = word if grad is None else grad
        input_grad, *weight_grads = torch.autograd.grad(out, [x, *weights], grad)
        self._flights[microbatch, first] = (None, weight_grads, None)
        for layer in reversed(range(first + 1, last)):
            passed(layer)
        return input_grad

    def weight_grad(self, microbatch: int, first: int, last: int) -> None:
        begin = max(at for one, at in self._flights if one == microbatch and at <= first)
        _, weight_grads, _ = self._flights[microbatch, begin]
        for layer in range(first, last):
            self._gradients[layer] += weight_grads[layer - begin]
            weight_grads[layer - begin] = None
        if not any(one is not None for one in weight_grads):
            del self._flights[microbatch, begin]

    def gradients(self, first: int, last: int, part: int) -> list[torch.Tensor]:
        begin = max(at for at, _ in self._spans if at <= first)
        whole = next(span for (at, _), span in self._spans.items() if at == begin)
        return [whole[(first - begin) * WIDTH**2 : (last - begin) * WIDTH**2]]

    def empty_message(self) -> torch.Tensor:
        return torch.empty(2, WIDTH, **self._where)

    def local_totals(self) -> torch.Tensor:
        totals = torch.zeros(2, **self._where)
        for loss in self._losses.values():
            totals[0] += loss
        totals[1] += len(self._losses)
        return totals

    def apply(self, totals: torch.Tensor, checkpoint: Any) -> Outcome:
        for layer, gradient in self._gradients.items():
            apply_step(*self.held[layer], gradient)
            checkpoint()
        self.held = {layer: self.held[layer] for layer in self._gradients}
        loss, count = totals.tolist()
        return Outcome(losses={"loss": loss / count})

    def timed(self, took_s: object) -> None:
        """All microbatches are alike."""

    def samples_of_losses(self) -> dict[int, list[int]]:
        return {m: [self._step * MICROBATCHES + m] for m in self._losses}


def undisturbed(steps: int = STEPS) -> tuple[list[float], dict[int, torch.Tensor]]:
    """The same training in one process, without schedule or messages: losses and final weights."""
    weights = {layer: initial(layer) for layer in range(LAYERS)}
    momenta = {layer: torch.zeros(WIDTH, WIDTH, dtype=torch.float64) for layer in range(LAYERS)}
    losses = []
    for step in range(steps):
        leaves = [weights[layer].detach().requires_grad_() for layer in range(LAYERS)]
        total = torch.zeros((), dtype=torch.float64)
        for microbatch in range(MICROBATCHES):
            out = sample(step, microbatch)
            for leaf in leaves:
                out = torch.tanh(out @ leaf)
            total = total + out.square().mean()
        losses.append(float(total.detach()) / MICROBATCHES)
        for layer, gradient in enumerate(torch.autograd.grad(total, leaves)):
            apply_step(weights[layer], momenta[layer], gradient)
    return losses, weights


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
    job = JobSpec(
        num_layers=LAYERS, pipeline_model_parallel_size=args.stages, tensor_model_parallel_size=1,
        num_microbatches=MICROBATCHES, tokens_per_step=MICROBATCHES, train_steps=STEPS,
        least_holders=config.least_holders, eager_forwards=config.eager_forwards,
    )  # fmt: skip
    profile = estimated_profile(
        num_transformer_layers=LAYERS - 2, hidden_size=WIDTH, ffn_hidden_size=WIDTH,
        attention=Attention.grouped(WIDTH, 1, 1, WIDTH), seq_length=2, micro_batch_size=1, vocab_size=WIDTH,
        precision=Precision(dtype_bytes=8), flops_per_s=1e9,
    )  # fmt: skip
    member.starting.post_job(job, to_json(profile))
    model, injector = Stack(), Injector(config.injections, member.rank, journal, member.incarnation)
    rank = RankRuntime(
        config=config,
        member=member,
        model=model,
        build=lambda generation, named: build_groups(member, generation, named, config),
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
    torch.save({layer: state[0] for layer, state in model.held.items()}, f"{args.out}.{member.rank}")
    digest = {
        str(layer): hashlib.sha256(state[0].numpy().tobytes()).hexdigest()
        for layer, state in model.held.items()
    }
    journal.event("weights", step=STEPS, digest=digest)


if __name__ == "__main__":
    main()
