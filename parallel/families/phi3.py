"""Phi 3, 3.5 and 4: Llama with one matrix for queries, keys and values, and one for both sides of the MLP's gate."""

from parallel.description import DecoderDescription
from parallel.families.common import describe_common, with_window
from parallel.families.family import LLAMA_MODULE_NAMES, Family
from parallel.families.fields import Fields
from parallel.families.layout import stacked_gate_up, stacked_qkv
from parallel.families.rope import Rope

_ROPE = Rope(
    default_partial=1.0,
    kinds={"default": "default", "longrope": "longrope", "yarn": "longrope", "su": "longrope"},  # its early names
)


def describe(fields: Fields) -> DecoderDescription:
    """Read a Phi 3 config; Phi 4 mini rotates heads in part."""
    fields = fields.with_defaults(original_max_position_embeddings=4096, max_position_embeddings=4096)
    description = describe_common(fields, rope=_ROPE, default_eps=1e-5)
    return with_window(description, fields.limit("sliding_window", None))


PHI3 = Family(
    model_type="phi3",
    describe=describe,
    module_names={
        **LLAMA_MODULE_NAMES,
        **{f"attention.{part}": "self_attn.qkv_proj" for part in "qkv"},
        **{f"mlp.{part}": "mlp.gate_up_proj" for part in ("gate", "up")},
    },
    fusions={"self_attn.qkv_proj": stacked_qkv, "mlp.gate_up_proj": stacked_gate_up},
)
