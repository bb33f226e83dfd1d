"""Hybrid models on a CPU: replaces mamba-ssm's kernels, and the Transformer Engine layers of Megatron's hybrid stacks,
by the same functions of the same parameters in torch operations.

Neither has a build for a CPU. The state space (Dao and Gu, arXiv 2405.21060) is computed in its quadratic form, as
attention with a decaying mask, which is exact, and fast enough for the short sequences of tests.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

import torch
from torch.nn import functional


def offer_mamba_ssm() -> None:
    """Provide what Megatron's mixers import from mamba-ssm, if it is missing. Must run before Megatron is imported."""
    if importlib.util.find_spec("mamba_ssm") is not None:
        return
    named: dict[str, dict[str, Any]] = {
        "layernorm_gated": {"RMSNorm": GatedRMSNorm},
        "ssd_combined": {
            "mamba_chunk_scan_combined": mamba_chunk_scan_combined,
            "mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
        },
    }
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        _module(name, {})
    for name, found in named.items():
        _module(f"mamba_ssm.ops.triton.{name}", found)


def _module(name: str, found: dict[str, Any]) -> None:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(found)
    sys.modules[name] = module


def let_stacks_do_without_transformer_engine() -> None:
    """Make Megatron's hybrid stack of layers that work on a CPU, if Transformer Engine is missing."""
    if importlib.util.find_spec("transformer_engine") is not None:
        return
    from megatron.core.extensions import transformer_engine as te
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.models.mamba import mamba_layer_specs
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    stack: Any = mamba_layer_specs.mamba_stack_spec
    stack.submodules.moe_layer.submodules.mlp = get_moe_module_spec(
        use_te=False, num_experts=1, moe_grouped_gemm=False
    )
    instead = {
        id(te.TENorm): WrappedTorchNorm,
        id(te.TELayerNormColumnParallelLinear): _normed_columns(ColumnParallelLinear),
        id(te.TEColumnParallelLinear): ColumnParallelLinear,
        id(te.TERowParallelLinear): RowParallelLinear,
        id(te.TEDotProductAttention): DotProductAttention,
    }
    _put(stack, instead)
    sys.modules[stack.module.__module__].TENorm = WrappedTorchNorm  # type: ignore[attr-defined] # behind the last layer


def _put(spec: Any, instead: dict[int, Any]) -> None:
    """Replace values, by their ``id``, in ``spec`` and all that it is made of."""
    if isinstance(spec, functools.partial):
        found, owner = spec.keywords, spec.keywords
    elif dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        found, owner = {one.name: getattr(spec, one.name) for one in dataclasses.fields(spec)}, vars(spec)
    else:
        return
    for name, value in found.items():
        if id(value) in instead:
            owner[name] = instead[id(value)]
        for one in value if isinstance(value, list) else [value]:
            _put(one, instead)


def _normed_columns(columns: Any) -> Any:
    """A linear layer of class ``columns`` that includes the norm of its input, with Transformer Engine's parameter
    names.
    """

    class NormedColumns(columns):  # type: ignore[misc] # Megatron has no types
        def __init__(self, input_size: int, output_size: int, *, config: Any, **how: Any):
            from megatron.core.transformer.torch_norm import WrappedTorchNorm

            super().__init__(input_size, output_size, config=config, **how)
            norm: Any = WrappedTorchNorm(config, input_size, eps=config.layernorm_epsilon)
            self.layer_norm_weight, self.layer_norm_bias = norm.weight, getattr(norm, "bias", None)
            self._of_norm = input_size, config.normalization, config.layernorm_epsilon

        def forward(self, hidden: torch.Tensor, *rest: Any, **how: Any) -> Any:
            size, kind, eps = self._of_norm
            weight, bias = self.layer_norm_weight, self.layer_norm_bias
            if kind == "RMSNorm":
                hidden = functional.rms_norm(hidden, (size,), weight, eps)
            else:
                hidden = functional.layer_norm(hidden, (size,), weight, bias, eps)
            return super().forward(hidden, *rest, **how)

    return NormedColumns


# -- mamba-ssm's --------------------------------------------------------------------------------------------------


class GatedRMSNorm(torch.nn.Module):
    """RMS norm of [..., channels], in groups of ``group_size`` channels, with a gate before or after it, or none."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size or hidden_size, norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        dtype, x = x.dtype, _long(x)
        gate = 1.0 if z is None else functional.silu(_long(z))
        x = x if self.norm_before_gate else x * gate
        grouped = torch.unflatten(x, -1, (-1, self.group_size))
        normed = functional.rms_norm(grouped, (self.group_size,), eps=self.eps).flatten(-2)
        normed = normed * _long(self.weight)
        return (normed * gate if self.norm_before_gate else normed).to(dtype)


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: None = None,
    seq_idx: None = None,
    cu_seqlens: None = None,
    dt_softplus: bool = False,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> torch.Tensor:
    """A state space over a sequence, h[t] = exp(dt[t] A) h[t-1] + dt[t] B[t] x[t] and y[t] = C[t] h[t] + D x[t].

    Args:
        x: [b, l, heads, channels], and so is ``z``; ``dt``: [b, l, heads]; ``A``, ``dt_bias``: [heads]; ``D``: [heads],
            or [heads, channels]; ``B``, ``C``: [b, l, groups, states].
        chunk_size: the kernel's; the result does not depend on it.

    Returns:
        y: [b, l, heads, channels].

    Raises:
        NotImplementedError: for packed sequences, or states that are kept.
    """
    if initial_states is not None or seq_idx is not None or cu_seqlens is not None or return_final_states:
        raise NotImplementedError(
            "--odyssey-device cpu has no state space of packed sequences, nor of inference. Use a GPU."
        )
    dtype, (x, dt, A, B, C) = x.dtype, map(_long, (x, dt, A, B, C))
    dt = dt if dt_bias is None else dt + _long(dt_bias)
    dt = functional.softplus(dt) if dt_softplus else dt
    length, each = x.size(1), x.size(2) // B.size(2)
    passed = torch.cumsum(dt * A, dim=1).transpose(1, 2)  # [b, heads, l]
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    decay = (passed[..., :, None] - passed[..., None, :]).masked_fill(later, -torch.inf).exp()
    scores = torch.einsum("btgn,bsgn->bgts", C, B).repeat_interleave(each, dim=1)
    y = torch.einsum("bhts,bsh,bshp->bthp", scores * decay, dt, x)
    if D is not None:
        y = y + (_long(D) if D.dim() == 2 else _long(D)[:, None]) * x
    return (y if z is None else y * functional.silu(_long(z))).to(dtype)


def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    chunk_size: int,
    seq_idx: None = None,
    activation: str = "silu",
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> torch.Tensor:
    """Gate ``z``, a causal convolution of each channel, and :func:`mamba_chunk_scan_combined`.

    Args:
        zxbcdt: [b, l, 2 channels of all heads + 2 groups * states + heads], concatenated in the order of its name.
        conv1d_weight: [channels of all heads + 2 groups * states, width].

    Returns:
        [b, l, channels of all heads].
    """
    assert activation == "silu", activation
    heads = dt_bias.numel()
    inner = heads * (headdim if headdim is not None else D.size(1))
    mixed = zxbcdt.size(-1) - inner - heads
    z, xbc, dt = torch.split(zxbcdt, [inner, mixed, heads], dim=-1)
    padded = functional.pad(xbc.transpose(1, 2), (conv1d_weight.size(1) - 1, 0))
    convolved = functional.conv1d(padded, conv1d_weight.unsqueeze(1), conv1d_bias, groups=mixed)
    x, b, c = torch.split(
        functional.silu(convolved).transpose(1, 2), [inner, *[(mixed - inner) // 2] * 2], dim=-1
    )
    x, z = (torch.unflatten(one, -1, (heads, -1)) for one in (x, z))
    b, c = (torch.unflatten(one, -1, (ngroups, -1)) for one in (b, c))
    more: dict[str, Any] = {"dt_bias": dt_bias, "dt_softplus": True, "seq_idx": seq_idx}
    y = mamba_chunk_scan_combined(x, dt, A, b, c, chunk_size, D=D, z=z, **more)
    return y.flatten(-2)


def _long(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in float32 at least, in which the kernels compute."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
