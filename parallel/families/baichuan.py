"""Baichuan 1 and 2: Llama with fused queries, keys and values; the 13B models have ALiBi in place of rotation.

Their configs have no field for that, nor for the head of Baichuan 2, whose rows are of unit length: the first is known
by `max_position_embeddings`, which only the 7B models have, the second by the vocabulary of Baichuan 2, or by a field
of its training that models made from it have too.
"""

from dataclasses import replace

from parallel.description import DecoderDescription
from parallel.families.common import describe_common
from parallel.families.family import LLAMA_MODULE_NAMES, Family
from parallel.families.fields import Fields
from parallel.families.layout import stacked_qkv
from parallel.families.rope import WHOLE_HEADS
from parallel.families.slopes import alibi_slopes
from parallel.position_description import Alibi

_VOCAB_SIZE_2 = 125_696


def describe(fields: Fields) -> DecoderDescription:
    """Read a Baichuan config."""
    has_alibi = "max_position_embeddings" not in fields
    fields = fields.renamed(max_position_embeddings="model_max_length").with_defaults(max_position_embeddings=4096)
    description = describe_common(fields, rope=None if has_alibi else WHOLE_HEADS)
    return replace(
        description,
        alibi=Alibi(slopes=alibi_slopes(description.num_heads)) if has_alibi else None,
        is_head_normalized=description.vocab_size == _VOCAB_SIZE_2 or "z_loss_weight" in fields,
    )


BAICHUAN = Family(
    model_type="baichuan",
    describe=describe,
    module_names={**LLAMA_MODULE_NAMES, **{f"attention.{part}": "self_attn.W_pack" for part in "qkv"}},
    fusions={"self_attn.W_pack": stacked_qkv},
)
