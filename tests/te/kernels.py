"""What Transformer Engine's Python modules call of their compiled extension, ``transformer_engine_torch``, in torch.

Only what training in 16, 32 and 64 bits calls. Names, arguments and results are those of Transformer Engine 2.11
(transformer_engine/pytorch/csrc/extensions/pybind.cpp, gemm.cpp, normalization.cpp, softmax.cpp). Its kernels have no
float64; these have, so that runs can be compared to the last digits. Whatever is missing is an error by its name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tests.te.kinds import TORCH, DType, NVTE_Fused_Attn_Backend

Tensors = list[list[torch.Tensor]]


def get_fused_attn_backend(*args: Any) -> Any:
    """cuDNN's attention: there is none, so that TE takes its own unfused one."""
    return NVTE_Fused_Attn_Backend.NVTE_No_Backend


def get_cudnn_version() -> int:
    return 0


def get_cublasLt_version() -> int:
    return 0


def get_num_cublas_streams() -> int:
    return 1


# -- products ---------------------------------------------------------------------------------------------------------


def generic_gemm(
    A: torch.Tensor,
    transa: bool,
    B: torch.Tensor,
    transb: bool,
    D: torch.Tensor | None,
    quantizer: Any,
    D_dtype: DType | None,
    bias: torch.Tensor | None,
    bias_dtype: DType,
    gelu: bool,
    gelu_in: torch.Tensor | None,
    grad: bool,
    workspace: torch.Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: torch.Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, None, torch.Tensor | None]:
    """op(B) @ op(A), as TE's row-major tensors have it.

    Args:
        A: [m, k], or [..., m] if not ``transa``; of a forward the weight [out, in]. Leading dimensions are one.
        B: [..., k], or [..., n] if ``transb``.

    Returns:
        The product, [..., m] or [n, m]; with ``grad`` and a ``bias`` the sum of B's rows; None; ``extra_output``.
    """
    if quantizer is not None or gelu or comm_overlap is not None:
        raise NotImplementedError("no kernel on the CPU for fp8, a fused GELU or --tp-comm-overlap")
    rows, others = B.reshape(-1, B.shape[-1]), A.reshape(-1, A.shape[-1])
    wide = torch.promote_types(A.dtype, torch.float32)
    product = alpha * ((rows.t() if transb else rows).to(wide) @ (others.t() if transa else others).to(wide))
    bias_grad = None
    if bias is not None and grad:
        bias_grad = rows.to(wide).sum(dim=0).to(bias.dtype)
    elif bias is not None:
        product = product + bias.to(wide)
    if D is None:  # no view of the product: autograd would know
        shape = product.shape if transb else (*B.shape[:-1], product.shape[-1])
        D = torch.empty(shape, dtype=TORCH[D_dtype] if D_dtype is not None else A.dtype)
    D.copy_(D + product.reshape(D.shape) if accumulate else product.reshape(D.shape))
    return D, bias_grad, None, extra_output


def te_general_grouped_gemm(
    A: Sequence[torch.Tensor],
    transa: bool,
    B: Sequence[torch.Tensor],
    transb: bool,
    D: Sequence[torch.Tensor],
    D_dtype: DType,
    m_splits: Sequence[int],
    bias: Sequence[torch.Tensor],
    bias_dtype: DType,
    single_output: bool,
    pre_gelu_out: Sequence[torch.Tensor],
    grad: bool,
    workspace: Sequence[torch.Tensor],
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> Sequence[torch.Tensor]:
    """One :func:`generic_gemm` for each expert; with ``single_output`` their rows follow one another in one tensor."""
    outputs = torch.split(D[0], list(m_splits)) if single_output else D
    for a, b, out, one in zip(A, B, outputs, bias, strict=True):
        if b.numel() == 0:
            if transb and not accumulate:
                out.zero_()
            if grad and one.numel():
                one.zero_()
            continue
        with_bias = one if one.numel() and not grad else None
        generic_gemm(
            a, transa, b, transb, out, None, D_dtype, with_bias, bias_dtype, False, None, False, workspace[0], 0,
            accumulate, use_split_accumulator,
        )  # fmt: skip
        if grad and one.numel():
            one.copy_(b.sum(dim=0))
    return bias


@torch.no_grad()
def wgrad_gemm_accum(input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """Apex's: add the product of ``grad_output`` [rows, out] and ``input`` [rows, in] to ``main_grad`` [out, in]."""
    wide = torch.promote_types(main_grad.dtype, torch.float32)
    main_grad.add_(grad_output.to(wide).t() @ input.to(wide))


# -- norms ------------------------------------------------------------------------------------------------------------


def _gamma(weight: torch.Tensor, zero_centered: bool, wide: torch.dtype) -> torch.Tensor:
    return weight.to(wide) + (1.0 if zero_centered else 0.0)


def _normed(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    out: torch.Tensor | None,
    otype: Any,
    zero_centered: bool,
    mean: torch.Tensor | None,
    squares: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = squares.dtype
    scale = torch.rsqrt(squares + eps)
    made = (input.to(wide) - (0.0 if mean is None else mean)) * scale * _gamma(weight, zero_centered, wide)
    made = made if bias is None else made + bias.to(wide)
    if out is None:
        return made.to(TORCH.get(otype, input.dtype)), scale.squeeze(-1)
    return out.copy_(made), scale.squeeze(-1)


def layernorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    ln_out: torch.Tensor | None,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``input`` [rows, columns] -> the norm of each row, the rows' means and the reciprocals of their deviations."""
    wide = torch.promote_types(input.dtype, torch.float32)
    mean = input.to(wide).mean(dim=-1, keepdim=True)
    squares = (input.to(wide) - mean).square().mean(dim=-1, keepdim=True)
    out, scale = _normed(input, weight, bias, eps, ln_out, otype, zero_centered_gamma, mean, squares)
    return out, mean.squeeze(-1), scale


def rmsnorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    ln_out: torch.Tensor | None,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """As :func:`layernorm_fwd`, without means."""
    squares = input.to(torch.promote_types(input.dtype, torch.float32)).square().mean(dim=-1, keepdim=True)
    out, scale = _normed(input, weight, None, eps, ln_out, otype, zero_centered_gamma, None, squares)
    return out, None, scale


def layernorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    mu: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of the input, the weight and the bias."""
    wide = rsigma.dtype
    normed = (x.to(wide) - mu[..., None]) * rsigma[..., None]
    inner = dz.to(wide) * _gamma(gamma, zero_centered_gamma, wide)
    centered = inner - inner.mean(dim=-1, keepdim=True)
    dx = rsigma[..., None] * (centered - normed * (inner * normed).mean(dim=-1, keepdim=True))
    rows = tuple(range(dz.dim() - 1))
    dgamma, dbeta = (dz.to(wide) * normed).sum(dim=rows), dz.to(wide).sum(dim=rows)
    return dx.to(x.dtype), dgamma.to(gamma.dtype), dbeta.to(gamma.dtype)


def rmsnorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of the input and the weight."""
    wide = rsigma.dtype
    normed = x.to(wide) * rsigma[..., None]
    inner = dz.to(wide) * _gamma(gamma, zero_centered_gamma, wide)
    dx = rsigma[..., None] * (inner - normed * (inner * normed).mean(dim=-1, keepdim=True))
    dgamma = (dz.to(wide) * normed).sum(dim=tuple(range(dz.dim() - 1)))
    return dx.to(x.dtype), dgamma.to(gamma.dtype)


# -- softmax ----------------------------------------------------------------------------------------------------------


def _softmax(scores: torch.Tensor, scale: Any, hidden: torch.Tensor | None = None) -> torch.Tensor:
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32)) * float(scale)
    if hidden is not None:
        wide = wide.masked_fill(hidden, -math.inf)
    return torch.nan_to_num(torch.softmax(wide, dim=-1), nan=0.0).to(scores.dtype)


def scaled_softmax_forward(input: torch.Tensor, scale_factor: Any) -> torch.Tensor:
    """The softmax of ``input`` [..., queries, keys] times a factor."""
    return _softmax(input, scale_factor)


def scaled_masked_softmax_forward(input: torch.Tensor, mask: torch.Tensor, scale_factor: Any) -> torch.Tensor:
    """The same without what ``mask`` is True for."""
    return _softmax(input, scale_factor, mask.bool())


def scaled_upper_triang_masked_softmax_forward(input: torch.Tensor, scale_factor: Any) -> torch.Tensor:
    """The same without later keys."""
    return scaled_aligned_causal_masked_softmax_forward(input, scale_factor)


def scaled_aligned_causal_masked_softmax_forward(input: torch.Tensor, scale_factor: Any) -> torch.Tensor:
    """The same where the last query is beside the last key."""
    queries, keys = input.shape[-2:]
    later = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    return _softmax(input, scale_factor, later)


def scaled_softmax_backward(
    output_grad: torch.Tensor, softmax: torch.Tensor, scale_factor: Any
) -> torch.Tensor:
    """The gradient of the input of any of these."""
    wide = torch.promote_types(softmax.dtype, torch.float32)
    weighted = softmax.to(wide) * output_grad.to(wide)
    inner = weighted - softmax.to(wide) * weighted.sum(dim=-1, keepdim=True)
    return (float(scale_factor) * inner).to(output_grad.dtype)


scaled_masked_softmax_backward = scaled_softmax_backward
scaled_upper_triang_masked_softmax_backward = scaled_softmax_backward
scaled_aligned_causal_masked_softmax_backward = scaled_softmax_backward


# -- rotary embeddings ------------------------------------------------------------------------------------------------


def _rotated(t: torch.Tensor, freqs: torch.Tensor, sign: float, interleaved: bool) -> torch.Tensor:
    """``t`` [positions, ..., d] with its first numbers turned by ``freqs`` [positions, 1, 1, of them]."""
    count = freqs.shape[-1]
    wide = torch.promote_types(t.dtype, torch.float32)
    turned, rest = t[..., :count].to(wide), t[..., count:]
    if interleaved:
        half = torch.stack((-turned[..., 1::2], turned[..., 0::2]), dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        half = torch.cat((-second, first), dim=-1)
    angles = freqs.to(wide)
    made = turned * angles.cos() + sign * half * angles.sin()
    return torch.cat((made.to(t.dtype), rest), dim=-1)


def _rope(
    t: torch.Tensor, freqs: torch.Tensor, layout: str, interleaved: bool, ends: Any, sign: float
) -> torch.Tensor:
    if layout == "NVTE_SBHD":
        return _rotated(t, freqs[: len(t)], sign, interleaved)
    if layout == "NVTE_THD":  # packed sequences, each from its first position
        sequences = torch.split(t.unsqueeze(1), torch.diff(ends).tolist())
        made = [_rotated(one, freqs[: len(one)], sign, interleaved) for one in sequences]
        return torch.cat(made).squeeze(1)
    raise NotImplementedError(f"no rotary embeddings of {layout}")


def fused_rope_forward(
    input: torch.Tensor,
    freqs: torch.Tensor,
    start_positions: None,
    qkv_format: str,
    interleaved: bool,
    cu_seqlens: torch.Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> torch.Tensor:
    """``input`` [s, b, h, d] turned by its positions' angles ``freqs`` [s, 1, 1, d']; or, packed, [t, h, d]."""
    if start_positions is not None or cp_size > 1:
        raise NotImplementedError("no rotary embeddings of parts of sequences")
    return _rope(input, freqs, qkv_format, interleaved, cu_seqlens, 1.0)


def fused_rope_backward(
    output_grads: torch.Tensor,
    freqs: torch.Tensor,
    start_positions: None,
    qkv_format: str,
    interleaved: bool,
    cu_seqlens: torch.Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> torch.Tensor:
    """The gradient of the input: angles of either half are the same, so it is turned back."""
    return _rope(output_grads, freqs, qkv_format, interleaved, cu_seqlens, -1.0)


# -- several tensors at once -------------------------------------------------------------------------------------------


def multi_tensor_scale(chunk_size: int, noop_flag: torch.Tensor, lists: Tensors, scale: float) -> None:
    """The second list becomes the first, times ``scale``; ``noop_flag`` says whether a number was not finite."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)
        if not bool(torch.isfinite(source).all()):
            noop_flag.fill_(1)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, lists: Tensors, per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm over all tensors, [1]; with ``per_tensor`` that of each, too."""
    each = torch.stack([one.float().norm() for one in lists[0]]) if lists[0] else torch.zeros(0)
    return each.norm().reshape(1), each if per_tensor else torch.zeros(0)


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: torch.Tensor,
    lists: Tensors,
    *hyper: Any,
) -> None:
    """A step of Adam on (gradients, parameters, first moments, second moments[, float32 copies of the parameters]);
    ``hyper`` are the last arguments of :func:`_stepped`.
    """
    if noop_flag.item():
        return
    for gradient, parameter, exp_avg, exp_avg_sq, *main in zip(*lists, strict=True):
        weight = main[0] if main else parameter
        weight.copy_(_stepped(weight, gradient, exp_avg, exp_avg_sq, *hyper))
        if main:
            parameter.copy_(weight)


def multi_tensor_adam_param_remainder(
    chunk_size: int,
    noop_flag: torch.Tensor,
    lists: Tensors,
    *hyper: Any,
) -> None:
    """The same for bfloat16 parameters whose float32 copies are they and the 16 bits below, int16, the fifth list."""
    if noop_flag.item():
        return
    for gradient, parameter, exp_avg, exp_avg_sq, below in zip(*lists, strict=True):
        low, high = below.to(torch.int32), parameter.view(torch.int16).to(torch.int32)
        high = torch.where(low < 0, high - 1, high)  # the parameter is rounded
        weight = ((high << 16) | (low & 0xFFFF)).view(torch.float32)
        bits = _stepped(weight, gradient, exp_avg, exp_avg_sq, *hyper).view(torch.int32)
        low = ((bits & 0xFFFF) ^ 0x8000) - 0x8000
        high = torch.where(low < 0, (bits >> 16) + 1, bits >> 16)
        parameter.copy_(high.to(torch.int16).view(torch.bfloat16))
        below.copy_(low)


def _stepped(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> torch.Tensor:
    """The weight after a step; the moments are changed in place. ``mode`` 1 decays weights apart from gradients."""
    first, second = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    wide = torch.promote_types(weight.dtype, torch.float32)
    w, g = weight.to(wide), gradient.to(wide)
    g = g if mode else g + weight_decay * w
    exp_avg.copy_(beta1 * exp_avg.to(wide) + (1 - beta1) * g)
    exp_avg_sq.copy_(beta2 * exp_avg_sq.to(wide) + (1 - beta2) * g * g)
    update = exp_avg.to(wide) / first / ((exp_avg_sq.to(wide) / second).sqrt() + epsilon)
    return w - lr * (update + weight_decay * w if mode else update)
