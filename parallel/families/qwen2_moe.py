"""Qwen 1.5 and 2 MoE: Qwen 2 with small experts, and a shared one whose part in the sum is gated."""

from dataclasses import replace

from parallel.description import DecoderDescription, MoeDescription
from parallel.families.common import describe_common, read_dense_layers, read_layer_types, windows_of, with_experts
from parallel.families.family import LLAMA_MODULE_NAMES, QWEN_EXPERT_NAMES, Family
from parallel.families.fields import Fields


def describe(fields: Fields) -> DecoderDescription:
    """Read a Qwen2 MoE config."""
    fields = fields.with_defaults(max_position_embeddings=32_768)
    moe = MoeDescription(
        num_experts=fields.integer("num_experts", 60),
        num_chosen=fields.integer("num_experts_per_tok", 4),
        intermediate_size=fields.integer("moe_intermediate_size", 1408),
        is_normalized=fields.boolean("norm_topk_prob", False),
        shared_intermediate_size=fields.integer("shared_expert_intermediate_size", 5632),
        is_shared_gated=True,
        dense_layers=read_dense_layers(fields),
    )
    description = replace(
        describe_common(fields),
        sliding_windows=_read_windows(fields),
        qkv_bias=fields.boolean("qkv_bias", True),
    )
    return with_experts(description, moe)


def _read_windows(fields: Fields) -> tuple[int | None, ...]:
    """Where windows are used and no list says where, every other one of the lower layers slides."""
    num_layers = fields.integer("num_hidden_layers")
    is_used = fields.boolean("use_sliding_window", False)
    num_windowed = fields.integer("max_window_layers", 28, minimum=0) if is_used else 0
    kinds = read_layer_types(fields) or tuple(
        "full_attention" if i % 2 or i >= num_windowed else "sliding_attention" for i in range(num_layers)
    )
    return windows_of(kinds, fields.limit("sliding_window", 4096) if is_used else None)


QWEN2_MOE = Family(
    model_type="qwen2_moe",
    describe=describe,
    module_names={
        **LLAMA_MODULE_NAMES,
        **QWEN_EXPERT_NAMES,
        **{f"mlp.shared.{part}": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
        "mlp.shared_gate": "mlp.shared_expert_gate",
    },
)
