"""gpt-oss: attention sinks, a sliding window in every other layer, experts with a clamped gate; unpacks MXFP4."""

from dataclasses import replace

from parallel.description import ClampedGate, DecoderDescription, MoeDescription, RouterScore
from parallel.families.common import (
    accept_packing,
    describe_common,
    periodic_layer_types,
    read_layer_types,
    windows_of,
    with_experts,
)
from parallel.families.family import LLAMA_MODULE_NAMES, Family
from parallel.families.fields import Fields
from parallel.families.rope import Rope

_ROPE = Rope(default_theta=150_000.0)
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


def describe(fields: Fields) -> DecoderDescription:
    """Read a gpt-oss config."""
    fields = accept_packing(fields).with_defaults(
        head_dim=64, num_key_value_heads=8, max_position_embeddings=131_072, rope_parameters=_YARN
    )
    has_bias = fields.boolean("attention_bias", True)
    kinds = read_layer_types(fields) or periodic_layer_types(fields.integer("num_hidden_layers"), 2)
    description = replace(
        describe_common(fields, rope=_ROPE, default_eps=1e-5),
        sliding_windows=windows_of(kinds, fields.limit("sliding_window", 128)),
        has_attention_sinks=True,
        qkv_bias=has_bias,
        output_bias=has_bias,
    )
    gate = ClampedGate(alpha=fields.number("swiglu_alpha", 1.702), limit=fields.number("swiglu_limit", 7.0))
    moe = MoeDescription(
        num_experts=fields.integer("num_local_experts", 128),
        num_chosen=fields.integer("num_experts_per_tok", 4),
        intermediate_size=description.intermediate_size,
        score=RouterScore.SOFTMAX_OF_CHOSEN,
        router_bias=True,
        expert_bias=True,
        clamped_gate=gate,
    )
    return with_experts(description, moe)


GPT_OSS = Family(
    model_type="gpt_oss",
    describe=describe,
    module_names={
        **LLAMA_MODULE_NAMES,
        "attention.sinks": "self_attn.sinks",
        "mlp.router": "mlp.router",
        "mlp.experts.*.gate_up.weight": "mlp.experts.gate_up_proj",
        "mlp.experts.*.gate_up.bias": "mlp.experts.gate_up_proj_bias",
        "mlp.experts.*.down.weight": "mlp.experts.down_proj",
        "mlp.experts.*.down.bias": "mlp.experts.down_proj_bias",
    },
    transposed=frozenset({"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}),
)
