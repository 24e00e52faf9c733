"""Qwen 3 MoE: Qwen 3 with many small experts; a window, where it is used, is in all layers."""

from dataclasses import replace

from parallel.description import DecoderDescription, MoeDescription
from parallel.families.common import QK_RMS_NORM, describe_common, read_dense_layers, with_experts, with_window
from parallel.families.family import LLAMA_MODULE_NAMES, QWEN_EXPERT_NAMES, Family
from parallel.families.fields import Fields


def describe(fields: Fields) -> DecoderDescription:
    """Read a Qwen3 MoE config."""
    fields = fields.renamed(num_experts="num_local_experts").with_defaults(
        num_key_value_heads=4, max_position_embeddings=32_768
    )
    attention_bias = fields.boolean("attention_bias", False)
    window = fields.limit("sliding_window", 4096) if fields.boolean("use_sliding_window", False) else None
    moe = MoeDescription(
        num_experts=fields.integer("num_experts", 128),
        num_chosen=fields.integer("num_experts_per_tok", 8),
        intermediate_size=fields.integer("moe_intermediate_size", 768),
        is_normalized=fields.boolean("norm_topk_prob", False),
        dense_layers=read_dense_layers(fields),
    )
    description = replace(
        with_window(describe_common(fields), window),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=QK_RMS_NORM,
    )
    return with_experts(description, moe)


QWEN3_MOE = Family(model_type="qwen3_moe", describe=describe, module_names={**LLAMA_MODULE_NAMES, **QWEN_EXPERT_NAMES})
