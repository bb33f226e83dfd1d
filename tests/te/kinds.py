"""The enumerations of ``transformer_engine_torch``, and classes that are only named."""

from __future__ import annotations

import enum
from typing import Any

import torch


class DType(enum.IntEnum):
    """Element types, by the extension's names."""

    kByte = 0
    kInt32 = 1
    kFloat32 = 2
    kFloat16 = 3
    kBFloat16 = 4
    kFloat8E4M3 = 5
    kFloat8E5M2 = 6
    kFloat4E2M1 = 7
    kFloat64 = 8


TORCH = {
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat64: torch.float64,
}


def _names(name: str, members: str) -> Any:
    return enum.IntEnum(name, members, start=0)


FP8FwdTensors = _names(
    "FP8FwdTensors",
    "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT GEMM3_INPUT GEMM3_WEIGHT "
    "GEMM3_OUTPUT",
)
FP8BwdTensors = _names(
    "FP8BwdTensors", "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3"
)
Float8BlockScaleTensorFormat = _names("Float8BlockScaleTensorFormat", "GEMM_READY COMPACT")
CommOverlapType = _names("CommOverlapType", "RS AG")
CommOverlapAlgo = _names("CommOverlapAlgo", "NONE")


class _Named(type):
    """The class of enumerations whose members are told apart, and no more."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class NVTE_Fused_Attn_Backend(metaclass=_Named): ...


class NVTE_QKV_Layout(metaclass=_Named): ...


class NVTE_QKV_Format(metaclass=_Named): ...


class NVTE_Bias_Type(metaclass=_Named): ...


class NVTE_Mask_Type(metaclass=_Named): ...


class NVTE_Softmax_Type(metaclass=_Named): ...


class CommOverlapCore:
    """Of --tp-comm-overlap, which is left out; TE's modules name its classes in their signatures."""


CommOverlapBase = CommOverlap = CommOverlapP2P = CommOverlapHelper = CommOverlapCore
