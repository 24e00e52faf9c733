"""DeepSeek V2 Lite: DeepSeek V3's attention over latents, with experts chosen by softmax, without groups."""

from parallel.description import DecoderDescription, MoeDescription
from parallel.families.common import refuse_other, with_experts
from parallel.families.deepseek_v3 import LATENT_FUSIONS, LATENT_NAMES, describe_latents
from parallel.families.family import Family
from parallel.families.fields import Fields


def describe(fields: Fields) -> DecoderDescription:
    """Read a DeepSeek V2 config."""
    refuse_other(
        fields, topk_method="greedy", scoring_func="softmax", norm_topk_prob=False, moe_layer_freq=1, mlp_bias=False
    )
    inner_size = fields.integer("moe_intermediate_size", 1407)
    moe = MoeDescription(
        num_experts=fields.integer("n_routed_experts", 64),
        num_chosen=fields.integer("num_experts_per_tok"),
        intermediate_size=inner_size,
        weight_multiplier=fields.number("routed_scaling_factor", 1.0),
        shared_intermediate_size=inner_size * fields.integer("n_shared_experts", 2),
        dense_layers=frozenset(range(fields.integer("first_k_dense_replace", 0, minimum=0))),
    )
    fields = fields.without("rope_interleave")  # always
    return with_experts(describe_latents(fields.with_defaults(max_position_embeddings=2048)), moe)


DEEPSEEK_V2 = Family(model_type="deepseek_v2", describe=describe, module_names=LATENT_NAMES, fusions=LATENT_FUSIONS)
