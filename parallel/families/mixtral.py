"""Mixtral: Mistral with experts in every layer, of which each token takes two."""

from parallel.description import DecoderDescription, MoeDescription
from parallel.families.common import describe_common, with_experts, with_window
from parallel.families.family import LLAMA_MODULE_NAMES, Family
from parallel.families.fields import Fields
from parallel.families.rope import Rope

_ROPE = Rope(default_theta=1_000_000.0)


def describe(fields: Fields) -> DecoderDescription:
    """Read a Mixtral config; the router's jitter is noise of the training."""
    fields = fields.renamed(num_local_experts="num_experts").with_defaults(
        num_key_value_heads=8, max_position_embeddings=131_072
    )
    description = describe_common(fields, rope=_ROPE, default_eps=1e-5)
    moe = MoeDescription(
        num_experts=fields.integer("num_local_experts", 8),
        num_chosen=fields.integer("num_experts_per_tok", 2),
        intermediate_size=description.intermediate_size,
        is_normalized=True,
    )
    return with_experts(with_window(description, fields.limit("sliding_window", None)), moe)


MIXTRAL = Family(
    model_type="mixtral",
    describe=describe,
    module_names={
        **LLAMA_MODULE_NAMES,
        "mlp.router": "block_sparse_moe.gate",
        "mlp.experts.*.gate": "block_sparse_moe.experts.*.w1",
        "mlp.experts.*.up": "block_sparse_moe.experts.*.w3",
        "mlp.experts.*.down": "block_sparse_moe.experts.*.w2",
    },
)
