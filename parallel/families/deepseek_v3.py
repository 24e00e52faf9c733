"""DeepSeek V3 and R1: attention over latents, sigmoid routing in groups, a shared expert; unpacks fp8 tiles."""

from dataclasses import replace

from parallel.description import DecoderDescription, LatentKV, MoeDescription, RouterScore
from parallel.families.common import accept_packing, describe_common, refuse_other, with_experts
from parallel.families.family import LLAMA_MODULE_NAMES, QWEN_EXPERT_NAMES, Family
from parallel.families.fields import Fields
from parallel.families.layout import Fusion
from parallel.families.rope import Rope, rope_parameters, yarn_mscale
from parallel.position_description import RotaryDescription

_LATENT_EPS = 1e-6
"""Epsilon of the norms of latents, whatever the config says of the other norms."""


def describe(fields: Fields) -> DecoderDescription:
    """Read a DeepSeek V3 config. Layers past num_hidden_layers, which predict further tokens, are left unread."""
    fields = accept_packing(fields, fmt="e4m3", weight_block_size=[128, 128])
    refuse_other(fields, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    return with_experts(describe_latents(fields), _read_experts(fields))


def describe_latents(fields: Fields) -> DecoderDescription:
    """Read everything but the experts, which DeepSeek V2 has alike."""
    latent = LatentKV(
        query_rank=fields.nullable_integer("q_lora_rank", 1536),
        rank=fields.integer("kv_lora_rank", 512),
        plain_dim=fields.integer("qk_nope_head_dim", 128),
        rotary_dim=fields.integer("qk_rope_head_dim", 64),
        value_dim=fields.integer("v_head_dim", 128),
        norm_eps=_LATENT_EPS,
    )
    head_dim = latent.plain_dim + latent.rotary_dim
    rope = Rope(is_interleaved=fields.nullable_boolean("rope_interleave", True))
    # a head is, to the rotation, what of it is rotated
    sizes = fields.without("num_key_value_heads", "head_dim").with_defaults(
        head_dim=latent.rotary_dim, max_position_embeddings=4096
    )
    description = describe_common(sizes, rope=rope)
    attention_bias = fields.boolean("attention_bias", False)
    return replace(
        description,
        latent_kv=latent,
        num_kv_heads=1,
        head_dim=head_dim,
        attention_scale=head_dim**-0.5 * _scale_multiplier(fields, description.rotaries[0]),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
    )


def _read_experts(fields: Fields) -> MoeDescription:
    inner_size = fields.integer("moe_intermediate_size", 2048)
    return MoeDescription(
        num_experts=fields.integer("n_routed_experts", 256),
        num_chosen=fields.integer("num_experts_per_tok", 8),
        intermediate_size=inner_size,
        score=RouterScore.SIGMOID,
        is_normalized=fields.nullable_boolean("norm_topk_prob", True),
        weight_multiplier=fields.number("routed_scaling_factor", 2.5),
        num_groups=fields.integer("n_group", 8),
        num_chosen_groups=fields.integer("topk_group", 4),
        choice_bias=True,
        shared_intermediate_size=inner_size * fields.integer("n_shared_experts", 1),
        dense_layers=frozenset(range(fields.integer("first_k_dense_replace", 3, minimum=0))),
    )


def _scale_multiplier(fields: Fields, rotary: RotaryDescription | None) -> float:
    """Scaling makes queries and keys longer as YaRN does, here also where they are not rotated: by multiplying their
    product."""
    rope = rope_parameters(fields)
    mscale = rope.nonzero_number("mscale_all_dim")
    if mscale is None or rotary is None or rotary.scaling is None:
        return 1.0
    return yarn_mscale(rope.number("factor"), mscale) ** 2


def _heads_of_latents(description: DecoderDescription) -> Fusion:
    """Return the fusion that has for each head what makes its key, then what makes its value."""
    latent = description.latent_kv
    assert latent is not None, "described above"
    rows = {"k_up": latent.plain_dim, "v_up": latent.value_dim}
    return Fusion(num_groups=description.num_heads, part_rows=rows)


LATENT_NAMES = {
    **LLAMA_MODULE_NAMES,
    **QWEN_EXPERT_NAMES,
    "mlp.router.choice_bias": "mlp.gate.e_score_correction_bias",
    **{f"mlp.shared.{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_down_norm": "self_attn.q_a_layernorm",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_down_norm": "self_attn.kv_a_layernorm",
    "attention.k_up": "self_attn.kv_b_proj",
    "attention.v_up": "self_attn.kv_b_proj",
    "attention.q": "self_attn.q_proj",
    "attention.q_up": "self_attn.q_b_proj",
}

LATENT_FUSIONS = {"self_attn.kv_b_proj": _heads_of_latents}

DEEPSEEK_V3 = Family(model_type="deepseek_v3", describe=describe, module_names=LATENT_NAMES, fusions=LATENT_FUSIONS)
