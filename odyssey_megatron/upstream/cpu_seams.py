"""The seams of attention, and of what is compiled, on ``--odyssey-device cpu``: part of ``seam_table.SEAMS``."""

from __future__ import annotations

from odyssey_megatron.upstream.seams import Seam

_ATTENTION = "--odyssey-device cpu has no attention that knows context parallelism"
_PACKED = "--odyssey-device cpu has no kernel that deals packed sequences out to context-parallel ranks"

DOT_PRODUCT_ATTENTION = Seam(
    target="megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
    why=_ATTENTION,
    signatures={"0.16": "self config"},
    open=True,
    only_if="--odyssey-device cpu",
)
GATHER_FROM_SEQUENCE_PARALLEL_REGION = Seam(
    target="megatron.core.tensor_parallel.mappings:gather_from_sequence_parallel_region",
    why=_ATTENTION,
    signatures={"0.16": "input_ group"},
    open=True,
    only_if="--odyssey-device cpu",
)
GET_SLIDING_WINDOW_CAUSAL_MASK = Seam(
    target="megatron.core.transformer.utils:get_sliding_window_causal_mask",
    why=_ATTENTION,
    signatures={"0.16": "sq skv window_size"},
    only_if="--odyssey-device cpu",
)
GET_SFT_BATCH_ON_THIS_CP_RANK = Seam(
    target="megatron.core.utils:get_sft_batch_on_this_cp_rank",
    why=_PACKED,
    signatures={"0.16": None, "0.18": "batch cp_group", "0.19": None},
    only_if="--odyssey-device cpu with --context-parallel-size",
)
GET_BATCH_PER_DOCUMENT = Seam(
    target="megatron.core.utils:_get_batch_on_this_cp_rank_per_document_balancing",
    why=_PACKED,
    signatures={"0.16": None, "0.19": "batch cp_group"},
    only_if="--odyssey-device cpu with --context-parallel-size",
)
COMPILE_HELPERS = Seam(
    target="megatron.core.datasets.utils:compile_helpers",
    why="the wheel of megatron-core has the compiled helpers and no Makefile",
    signatures={"0.16": ""},
    only_if="--odyssey-device cpu",
)
FUSED_KERNELS_LOAD = Seam(
    target="megatron.legacy.fused_kernels:load",
    why="--odyssey-device cpu has no nvcc to build them with",
    signatures={"0.16": "args", "0.17": None},
    only_if="--odyssey-device cpu",
)
CPU_SEAMS = tuple(value for value in list(globals().values()) if isinstance(value, Seam))
