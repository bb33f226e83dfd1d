"""The seams of hybrid models (``pretrain_mamba.py``, ``pretrain_hybrid.py``): which layers a stack is made of."""

from __future__ import annotations

from odyssey_megatron.upstream.seams import Seam

_WHY = "model chunks of any length that begin anywhere in a hybrid pattern"
_HYBRID = "a hybrid pattern"

ALLOCATE_LAYERS = Seam(
    target="megatron.core.ssm.mamba_hybrid_layer_allocation:allocate_layers",
    why=_WHY,
    signatures={
        "0.16": "total_layers_count target_attention_ratio target_mlp_ratio override_pattern",
        "0.17": None,
    },
    only_if=_HYBRID,
)
SELECT_PIPELINE_SEGMENT_OF_0_17 = Seam(
    target="megatron.core.ssm.mamba_hybrid_layer_allocation:select_pipeline_segment",
    why=_WHY,
    signatures={
        "0.16": None,
        "0.17": "main_pattern pp_group vp_stage first_stage_layers last_stage_layers",
        "0.18": None,
    },
    only_if=_HYBRID,
)
SELECT_PIPELINE_SEGMENT = Seam(
    target="megatron.core.models.hybrid.hybrid_layer_allocation:select_pipeline_segment",
    why=_WHY,
    signatures={
        "0.16": None,
        "0.18": "main_pattern pp_group vp_stage first_stage_layers last_stage_layers",
        "0.19": "main_pattern pp_group vp_stage first_stage_layers last_stage_layers tp_group dp_cp_group",
    },
    only_if=_HYBRID,
)

HYBRID_SEAMS = ALLOCATE_LAYERS, SELECT_PIPELINE_SEGMENT_OF_0_17, SELECT_PIPELINE_SEGMENT
