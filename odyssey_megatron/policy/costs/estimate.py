"""The expected costs of a model, from its sizes, before it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from typing import NamedTuple

from odyssey_megatron.plan.costs import Costs, LayerCost
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.costs.sizes import AttentionShape, Experts, Precision, Recomputed

_COPIED_BYTES_PER_S = 1e12
"""Rate of a GPU's copies: about half of an A100's memory bandwidth (data sheet: 2 TB/s), as a copy reads and writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links among the ranks of a worker. By default nothing that they exchange takes time."""

    node_bytes_per_s: float = inf
    """What one GPU sends, and receives meanwhile, to others of its node."""
    card_bytes_per_s: float = inf
    """The same, to other nodes."""
    node_gpus: int = 8

    def within_layer_s(
        self,
        attention: AttentionShape,
        ffn: int,
        spread: int,
        *,
        experts: Experts | None,
        states_bytes: float,
        tensor_parallel_size: int,
    ) -> float:
        """Return the seconds that ranks exchange in a layer's forward, and again in its input gradient.

        Tensor-parallel ranks sum all hidden states behind attention and behind a dense MLP (or gather and scatter them,
        which takes as long; Shoeybi et al., arXiv 1909.08053, section 3). Where experts are spread over other ranks,
        each token goes to ``topk`` of them and comes back.

        Args:
            ffn: hidden units of an MLP, or of shared experts.
            spread: hidden units of all experts; 0 where there are none.
            states_bytes: bytes of the hidden states of a microbatch.
        """
        tp = tensor_parallel_size
        parts = experts.parts if experts and spread else 0  # 0: experts, if any, are cut like other weights
        sums = bool(attention.weights) + bool(ffn or (spread and not parts))
        sent = experts.topk * states_bytes / tp if experts and parts else 0.0
        return sums * self.sum_s(states_bytes, tp) + 2 * self.each_to_each_s(sent, parts or 1)

    def sum_s(self, size: float, ranks: int) -> float:
        """Return the seconds in which ``ranks``, next to each other, sum ``size`` bytes of each in a ring."""
        rate = self.node_bytes_per_s if ranks <= self.node_gpus else self.card_bytes_per_s
        return 2 * (ranks - 1) / ranks * size / rate

    def each_to_each_s(self, size: float, ranks: int) -> float:
        """Return the seconds in which each of ``ranks`` sends ``size`` bytes, equally many to each, itself included."""
        near = min(ranks, self.node_gpus)
        within, beyond = (near - 1) / ranks * size, (ranks - near) / ranks * size
        return max(within / self.node_bytes_per_s, beyond / self.card_bytes_per_s)


def estimated_profile(
    *,
    num_transformer_layers: int,
    hidden_size: int,
    ffn_hidden_size: int,
    attention: AttentionShape,
    seq_length: int,
    micro_batch_size: int,
    vocab_size: int,
    precision: Precision = Precision(),  # noqa: B008 # frozen
    flops_per_s: float = 2e14,  # achieved by one of a worker's GPUs
    link_latency_s: float = 2e-5,
    link_bytes_per_s: float = 2.5e10,
    memory_bytes: int | None = None,
    memory_bytes_per_s: float = 2e12,  # an A100's; the optimizer is as fast as memory
    tensor_parallel_size: int = 1,
    context_parallel_size: int = 1,  # keys and values are exchanged while it computes
    sequence_parallel: bool = True,
    is_tied: bool = False,
    is_gated: bool = True,  # MLPs have three products, as with SwiGLU, not two
    recomputed: Recomputed = Recomputed(),  # noqa: B008 # frozen
    experts: Experts | None = None,
    mtp_num_layers: int = 0,
    unlike: Sequence[tuple[AttentionShape, int]] = (),  # (attention, hidden units) of each layer
) -> Profile:
    """Return the costs of a decoder, estimated from FLOPs.

    Products and their gradients take 2 per weight and token, causal scores ``2 * seq``, in the backward twice.
    """
    tokens, tp = seq_length * micro_batch_size // context_parallel_size, tensor_parallel_size
    products, apart, words = 3 if is_gated else 2, experts.parts if experts else 0, vocab_size * hidden_size
    rate, whole = flops_per_s * tp, 4 * hidden_size * (1 if sequence_parallel else tp)
    layer = functools.partial(_layer_cost, precision=precision, parts=tp)

    def transformer(shape: tuple[AttentionShape, int, int, int, int], kept: _Kept) -> LayerCost:
        attention, ffn, spread, passed, routed = shape
        matmul_s = 2 * tokens * (attention.weights + hidden_size * (products * passed + routed)) / rate
        forward_s, again = matmul_s + 2 * tokens * seq_length * attention.score_width / rate, recomputed.share
        own = hidden_size * products * (spread * tp // (apart or tp))
        held = attention.weights + hidden_size * (products * ffn + routed + 2) + own
        later_s = (1 - again) * (matmul_s - 2 * tokens * kept.anew_with_gradients / rate)
        times_s = forward_s, forward_s * (2 + again) + 2 * tokens * kept.anew / rate - later_s, later_s
        sizes = round(tokens * kept.numbers), held, own * bool(apart), round(tokens * kept.late)
        return layer(times_s, *sizes)

    shapes = _shapes(num_transformer_layers, attention, ffn_hidden_size, experts, unlike)
    kept = [_kept(recomputed, experts, products, hidden_size, seq_length, whole, tp, one) for one in shapes]
    inner = [*map(transformer, shapes, kept)]
    copied, ahead = tokens * hidden_size * precision.dtype_bytes / tp, inner[-1:] * mtp_num_layers
    first, last, tied = _ends(layer, copied, rate, tokens, whole, hidden_size, words, is_tied, ahead)
    costs = Costs(
        layers=(first, *inner, last),
        tied=tied,
        message_bytes=tokens * hidden_size * precision.dtype_bytes // (tp if sequence_parallel else 1),
        link_latency_s=link_latency_s,
        link_bytes_per_s=link_bytes_per_s,
        memory_bytes=memory_bytes,
        optimizer_s_per_byte=precision.optimizer_s_per_byte(memory_bytes_per_s),
    ).with_room(_run_again(recomputed, kept, tokens * precision.dtype_bytes / tp))
    return Profile(operations=((copied, 0.0, copied), *_operations((*inner, last), flops_per_s)), costs=costs)


def exchanging(
    profile: Profile,
    links: Links,
    *,
    hidden_size: int,
    ffn_hidden_size: int,
    attention: AttentionShape,
    tokens: int,
    precision: Precision,
    tensor_parallel_size: int,
    recomputed: Recomputed,
    experts: Experts | None,
    unlike: Sequence[tuple[AttentionShape, int]],
) -> Profile:
    """Return ``profile`` with the time that ranks of a worker take to exchange what ``links`` pass, after each other.

    Arguments are those of :func:`estimated_profile`, and ``tokens`` are those of a microbatch that a rank has. The ends
    stay as they are.
    """
    first, *inner, last = profile.costs.layers
    shapes = _shapes(len(inner), attention, ffn_hidden_size, experts, unlike)
    within_s = functools.partial(
        links.within_layer_s,
        experts=experts,
        states_bytes=tokens * hidden_size * precision.dtype_bytes,
        tensor_parallel_size=tensor_parallel_size,
    )
    nothing, layers = AttentionShape(weights=0, score_width=0, kept=0), []
    for layer, (own, ffn, spread, *_) in zip(inner, shapes, strict=True):
        more_s, anew_s = within_s(own, ffn, spread), 0.0
        if ("moe" if spread else "mlp") in recomputed.modules:
            anew_s = within_s(nothing, ffn, spread)
        elif spread and "shared_experts" in recomputed.modules:
            anew_s = within_s(nothing, ffn, 0)
        backward_s = layer.input_grad_s + (1 + recomputed.share) * more_s + anew_s
        layers.append(replace(layer, forward_s=layer.forward_s + more_s, input_grad_s=backward_s))
    return replace(profile, costs=replace(profile.costs, layers=(first, *layers, last)))


def share_of_experts(
    experts: Experts,
    *,
    num_transformer_layers: int,
    hidden_size: int,
    ffn_hidden_size: int,
    attention: AttentionShape,
    seq_length: int,
    vocab_size: int,
    is_gated: bool = True,
    unlike: Sequence[tuple[AttentionShape, int]] = (),
) -> float:
    """Return the share of a model's FLOPs that are of experts, without the shared ones. Arguments and rules are those
    of :func:`estimated_profile`.
    """
    products = 3 if is_gated else 2
    spread, others = 0, vocab_size * hidden_size
    for own, _, of_all, passed, routed in _shapes(
        num_transformer_layers, attention, ffn_hidden_size, experts, unlike
    ):
        chosen = experts.topk * experts.ffn_hidden_size if of_all else 0
        spread += hidden_size * products * chosen
        others += own.weights + seq_length * own.score_width
        others += hidden_size * (products * (passed - chosen) + routed)
    return spread / (spread + others)


def _operations(layers: Sequence[LayerCost], flops_per_s: float) -> Iterator[tuple[float, float, float]]:
    for one in layers:
        yield one.forward_s * flops_per_s, one.input_grad_s * flops_per_s, one.weight_grad_s * flops_per_s


def _ends(
    layer: Callable[..., LayerCost],
    copied: float,
    rate: float,
    tokens: int,
    whole: int,
    hidden_size: int,
    words: int,
    is_tied: bool,
    again: Sequence[LayerCost],
) -> tuple[LayerCost, LayerCost, LayerCost | None]:
    """Return embedding, of ``copied`` bytes, head, and the weight that they share, if any.

    With multi-token prediction the head is computed once more for each layer in ``again``: it joins two hidden states,
    passes that layer, and is a head again.
    """
    copy_s = copied / _COPIED_BYTES_PER_S
    head_s, joined_s = 2 * tokens * words / rate, 4 * tokens * hidden_size**2 / rate
    kept, logits = tokens * whole // 2, tokens * words // hidden_size
    tied = layer((0.0,) * 3, 0, words) if is_tied or again else None
    embedding = layer((copy_s, 0.0, copy_s), tokens, 0 if tied else words)
    head = layer((head_s,) * 3, kept, hidden_size + (0 if is_tied else words), logits=logits)
    joining = layer(
        (joined_s + head_s,) * 3,
        kept + 4 * tokens * hidden_size,
        (2 * hidden_size + 3) * hidden_size,
        logits=logits,
    )
    return embedding, _together(head, *again, *[joining] * len(again)), tied


def _together(*layers: LayerCost) -> LayerCost:
    """Return the sum of ``layers``, as one layer."""
    return LayerCost(
        **{one.name: sum(getattr(layer, one.name) for layer in layers) for one in fields(LayerCost)}
    )


def _shapes(
    num_transformer_layers: int,
    attention: AttentionShape,
    ffn: int,
    experts: Experts | None,
    unlike: Sequence[tuple[AttentionShape, int]],
) -> list[tuple[AttentionShape, int, int, int, int]]:
    """Return for each transformer layer: attention, hidden units, those of all experts, those that a token passes, and
    the number of experts to choose from.
    """
    found = []
    for layer, (own, units) in enumerate(unlike or [(attention, ffn)] * num_transformer_layers, start=1):
        if experts is not None and layer in experts.layers:
            each, shared = experts.ffn_hidden_size, experts.shared_ffn_hidden_size
            found.append((own, shared, experts.count * each, experts.topk * each + shared, experts.count))
        else:
            found.append((own, units, 0, units, 0))
    return found


class _Kept(NamedTuple):
    """What a layer keeps of a token, in numbers, and the weights whose products it computes again."""

    numbers: float
    """From its forward to its backward."""
    late: float
    """Besides, from its input gradient to its weight gradient; below 0: so many fewer."""
    run_again: float
    """Within its backward, of what is run again and is free behind it."""
    anew: int
    """Weights whose products its modules compute again in the input gradient."""
    anew_with_gradients: int
    """Those of them whose gradients come with it, as all do of a layer that is run again as a whole."""


def _run_again(recomputed: Recomputed, kept: Sequence[_Kept], bytes_each: float) -> int:
    """Return the most bytes of what is run again at a time, with ``bytes_each`` number."""
    return round(recomputed.at_a_time * max(one.run_again for one in kept) * bytes_each)


def _kept(
    recomputed: Recomputed,
    experts: Experts | None,
    products: int,
    hidden_size: int,
    seq_length: int,
    whole: int,
    tensor_parallel_size: int,
    shape: tuple[AttentionShape, int, int, int, int],
) -> _Kept:
    """Return what a layer of ``shape`` (:func:`_shapes`) keeps, and what it runs again (``mcore/model/wgrad.py``).

    Attention is fused (arXiv 2205.05198, section 4.2). ``whole`` is of four hidden states, of which a layer that is
    run again as a whole keeps one. The weight gradients of experts need a copy of each token for each expert that it
    goes to, and gradients of what these make of it. Ranks that have parts of the same expert all have the copy. With
    sequence parallelism the gradient behind a product over pieces of its input is gathered in the input gradient, and
    kept as a whole on each rank (core/tensor_parallel/layers.py, RowParallelLinear).

    Modules that a layer does not have drop nothing, nor does ``core_attn``, which is fused. ``layernorm`` drops the
    output of norms that Transformer Engine does not fuse with a product: in front of multi-latent attention, and of
    experts. Source: core_v0.16.1 and core_v0.19.0 core/transformer (``recompute_modules``) and
    core/models/gpt/gpt_layer_specs.py.
    """
    attention, shared, spread, passed, routed = shape
    numbers, inputs = products * passed, 0
    if experts and spread:
        inputs = hidden_size * experts.topk * (experts.tensor_parts or tensor_parallel_size)
    dropped = {
        "core_attn": (0, seq_length * attention.score_width),
        "mla_up_proj": (attention.up_kept, attention.up_weights),
        "layernorm": (hidden_size * (bool(attention.up_kept) + bool(spread)), 0),
    }
    if not spread:
        dropped["mlp"] = numbers, hidden_size * numbers
    elif "moe" in recomputed.modules:
        dropped["moe"] = numbers + inputs, hidden_size * (numbers + routed)
    else:
        dropped["moe_act"] = passed - shared, 0
        dropped["shared_experts"] = products * shared, hidden_size * products * shared
    found = {name: one for name, one in dropped.items() if name in recomputed.modules}
    at_once = [found[name] for name in ("mlp", "moe", "shared_experts") if name in found]
    most, share = whole + attention.kept + numbers + inputs, recomputed.share
    kept = share * whole / 4 + (1 - share) * (most - sum(one for one, _ in found.values()))
    is_cut = whole < 4 * hidden_size * tensor_parallel_size  # along the sequence
    has_mlp = bool(passed) and not spread and "mlp" not in found
    gathered = (bool(attention.weights) + has_mlp) * is_cut * hidden_size * (tensor_parallel_size - 1)
    stays = most + gathered + inputs * ("moe" not in found) - sum(one for one, _ in at_once)
    anew, with_gradients = (sum(weights for _, weights in of) for of in (found.values(), at_once))
    run_again = most - whole / 4 if share else sum(one for one, _ in at_once)
    return _Kept(kept, (1 - share) * stays - kept, run_again, anew, with_gradients)


def _layer_cost(
    times: tuple[float, float, float],
    kept: int,
    weights: int,
    of_experts: int = 0,
    late: int = 0,
    *,
    logits: int = 0,
    precision: Precision,
    parts: int,
) -> LayerCost:
    """Return the cost of one of ``parts`` of a layer that has ``weights`` parameters and keeps ``kept`` activation
    numbers, ``logits`` not among them. ``of_experts``: those of the parameters that are of experts spread over ranks.
    ``late``: the numbers that it keeps besides from the input gradient on.
    """
    kept, weights = kept // parts, weights // parts
    dtype_bytes, optimizer = precision.dtype_bytes, precision.optimizer_bytes
    forward_s, input_grad_s, weight_grad_s = times
    # Megatron's cross entropy keeps the exponentials of logits in float32, and so does its native fusion
    # (core/tensor_parallel/cross_entropy.py, core/fusions/fused_cross_entropy.py). Transformer Engine's may keep fewer
    # bytes.
    logit_bytes = logits // parts * max(4, dtype_bytes)
    return LayerCost(
        forward_s=forward_s,
        input_grad_s=input_grad_s,
        weight_grad_s=weight_grad_s,
        activation_bytes=kept * dtype_bytes + logit_bytes,
        early_bytes=-(late // parts * dtype_bytes),
        weight_bytes=dtype_bytes * weights,
        expert_bytes=dtype_bytes * (of_experts // parts),
        gradient_bytes=max(precision.gradient_bytes, dtype_bytes) * weights,
        optimizer_bytes=optimizer * weights,
        state_bytes=(dtype_bytes + optimizer) * weights,
    )
