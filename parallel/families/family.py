"""What a model family is: how its config.json is read, and how its checkpoints name their tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from parallel.description import DecoderDescription
from parallel.errors import ConfigError, UnsupportedModelError
from parallel.families.fields import Fields
from parallel.families.rope import read_rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family of Hugging Face."""

    model_type: str
    describe: Callable[[Fields], DecoderDescription]
    """Reads a config; raises ConfigError or UnsupportedModelError."""
    module_names: Mapping[str, str]
    """The decoder's modules (see parallel/shard.py) -> those of the checkpoint; "layers" is the list of layers."""

    def tensor_name(self, name: str) -> str:
        """The checkpoint's name for a tensor of the decoder: "layers.3.mlp.up.weight" -> "model.layers.3.mlp..."."""
        module, _, leaf = name.rpartition(".")
        if module.startswith("layers."):
            _, index, part = module.split(".", 2)
            return f"{self.module_names['layers']}.{index}.{self.module_names[part]}.{leaf}"
        return f"{self.module_names[module]}.{leaf}"


LLAMA_MODULE_NAMES: Mapping[str, str] = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "layers": "model.layers",
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
"""The names that Llama introduced and most families kept."""


def describe_llama_like(
    fields: Fields,
    *,
    default_head_dim: int | None = None,
    sliding_windows: tuple[int | None, ...] | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> DecoderDescription:
    """Read the fields that Llama and its relatives share; what they do not share is said by the caller.

    Args:
        fields: the whole config.
        default_head_dim: when the config has no head_dim; None: the hidden size divided over the heads.
        sliding_windows: one per layer; None: no layer has one.
        qkv_bias, output_bias, mlp_bias, qk_norm: see DecoderDescription.
    """
    _refuse_unknown(fields)
    num_layers = fields.integer("num_hidden_layers")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"num_key_value_heads is {num_kv_heads}; allowed: divisors of num_attention_heads, {num_heads}"
        )
    head_dim = fields.integer("head_dim", default_head_dim or _derive_head_dim(fields))
    rotary, max_context = read_rotary(fields, head_dim)
    return DecoderDescription(
        family=fields.text("model_type"),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        max_context=max_context,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rotary=rotary,
        sliding_windows=sliding_windows or (None,) * num_layers,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
    )


def read_alternating_windows(fields: Fields) -> tuple[int | None, ...]:
    """The sliding window of each layer as Qwen's configs give it: upper layers slide, or a list says which."""
    num_layers = fields.integer("num_hidden_layers")
    window = fields.nullable_integer("sliding_window", 4096) if fields.boolean("use_sliding_window", False) else None
    kinds = fields.optional_texts("layer_types", allowed=("full_attention", "sliding_attention"))
    if kinds is None:
        first = fields.integer("max_window_layers", 28, minimum=0)
        return tuple(window if i >= first else None for i in range(num_layers))
    if window is None and "sliding_attention" in kinds:
        raise ConfigError(
            "layer_types has 'sliding_attention' but there is no window; "
            "allowed with it: use_sliding_window true and an integer sliding_window"
        )
    if len(kinds) != num_layers:
        raise ConfigError(f"layer_types has {len(kinds)} entries; allowed: num_hidden_layers, {num_layers}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _derive_head_dim(fields: Fields) -> int:
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if "head_dim" not in fields and hidden_size % num_heads:
        raise ConfigError(
            f"hidden_size is {hidden_size} without head_dim; allowed: multiples of num_attention_heads, {num_heads}"
        )
    return hidden_size // num_heads


def _refuse_unknown(fields: Fields) -> None:
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act is {activation!r}; supported: 'silu' (also called 'swish')")
    if "quantization_config" in fields:
        method = fields.nested("quantization_config").text("quant_method", "unknown")
        raise UnsupportedModelError(f"quantization_config has method {method!r}; supported: weights not quantized")
