"""What most families read from a config.json in the same way: sizes, activation, positions, windows."""

from collections.abc import Sequence
from dataclasses import replace

from parallel.description import Activation, DecoderDescription, MoeDescription, NormKind, QKNorm, QKNormScope
from parallel.errors import ConfigError, UnsupportedModelError
from parallel.families.fields import Fields
from parallel.families.rope import WHOLE_HEADS, Rope, read_rotary

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}
"""Activations by the names that configs have for them."""

PACKED_WEIGHTS = {"deepseek_v3": "fp8", "gpt_oss": "mxfp4"}
"""Families whose quantized weights are unpacked when they are read, and from what."""

QK_RMS_NORM = QKNorm(kind=NormKind.RMS, scope=QKNormScope.HEAD)


def describe_common(
    fields: Fields, *, rope: Rope | None = WHOLE_HEADS, eps_name: str = "rms_norm_eps", default_eps: float = 1e-6
) -> DecoderDescription:
    """Read sizes, norm epsilon, activation, rotation and tying; what else a family has, it replaces in the result.

    Args:
        fields: the config, its fields under the names that Llama has for them (`Fields.renamed`), and what the family
            has by default (`Fields.with_defaults`).
        rope: how heads are rotated; None: they are not.
        eps_name, default_eps: the epsilon of the norms.
    """
    _refuse_quantized(fields)
    refuse_other(fields, is_causal=True)
    num_layers = fields.integer("num_hidden_layers")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"num_key_value_heads is {num_kv_heads}; allowed: divisors of num_attention_heads, {num_heads}"
        )
    hidden_size = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", _derive_head_dim(fields))
    if rope is None:
        rotary, max_context = None, fields.integer("max_position_embeddings")
    else:
        rotary, max_context = read_rotary(fields, head_dim, rope)
    return DecoderDescription(
        family=fields.text("model_type"),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        max_context=max_context,
        norm_eps=fields.number(eps_name, default_eps),
        rotaries=(rotary,) * num_layers,
        sliding_windows=(None,) * num_layers,
        activation=_read_activation(fields),
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
    )


def _read_activation(fields: Fields) -> Activation:
    name = fields.text("hidden_act", "silu")
    activation = _ACTIVATIONS.get(name)
    if activation is None:
        raise UnsupportedModelError(f"hidden_act is {name!r}; supported: {', '.join(_ACTIVATIONS)}")
    return activation


def with_window(description: DecoderDescription, window: int | None) -> DecoderDescription:
    """Return the description with one sliding window in all layers."""
    return replace(description, sliding_windows=(window,) * description.num_layers)


def read_layer_types(fields: Fields) -> tuple[str, ...] | None:
    """The kind of attention of each layer, where the config lists it."""
    kinds = fields.optional_texts("layer_types", allowed=("full_attention", "sliding_attention"))
    num_layers = fields.integer("num_hidden_layers")
    if kinds is not None and len(kinds) != num_layers:
        raise ConfigError(f"layer_types has {len(kinds)} entries; allowed: num_hidden_layers, {num_layers}")
    return kinds


def periodic_layer_types(num_layers: int, period: int) -> tuple[str, ...]:
    """Return the types of layers of which each `period`th sees everything, and the others slide."""
    return tuple("sliding_attention" if (i + 1) % period else "full_attention" for i in range(num_layers))


def windows_of(kinds: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    """The window of each layer. Raises ConfigError when layers slide but there is no window."""
    if window is None and "sliding_attention" in kinds:
        raise ConfigError(
            "layer_types has 'sliding_attention' but there is no window; "
            "allowed with it: use_sliding_window true and an integer sliding_window"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def read_upper_windows(fields: Fields) -> tuple[int | None, ...]:
    """The sliding window of each layer as Qwen's configs give it: upper layers slide, or a list says which."""
    window = fields.limit("sliding_window", 4096) if fields.boolean("use_sliding_window", False) else None
    kinds = read_layer_types(fields)
    if kinds is not None:
        return windows_of(kinds, window)
    first = fields.integer("max_window_layers", 28, minimum=0)
    return tuple(window if i >= first else None for i in range(fields.integer("num_hidden_layers")))


def with_experts(description: DecoderDescription, moe: MoeDescription) -> DecoderDescription:
    """Return the description with experts in all layers but `moe.dense_layers`, of which those that the model does not
    have are left out; the same as it is where all layers are dense.
    """
    dense_layers = moe.dense_layers & frozenset(range(description.num_layers))
    if len(dense_layers) == description.num_layers:
        return description
    return replace(description, moe=replace(moe, dense_layers=dense_layers))


def read_dense_layers(fields: Fields) -> frozenset[int]:
    """The layers without experts, as Qwen's configs give them: a list, and all but every nth."""
    step = fields.integer("decoder_sparse_step", 1)
    every_nth = (i for i in range(fields.integer("num_hidden_layers")) if (i + 1) % step)
    return frozenset((*fields.integers("mlp_only_layers"), *every_nth))


def refuse_other(fields: Fields, **supported: object) -> None:
    """Raise UnsupportedModelError when one of these fields is there and has another value than this."""
    for name, value in supported.items():
        seen = fields.value(name)
        if seen is not None and seen != value:
            raise UnsupportedModelError(f"{name} is {seen!r}; supported in this family: {value!r}")


def _derive_head_dim(fields: Fields) -> int:
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if "head_dim" not in fields and hidden_size % num_heads:
        raise ConfigError(
            f"hidden_size is {hidden_size} without head_dim; allowed: multiples of num_attention_heads, {num_heads}"
        )
    return hidden_size // num_heads


def accept_packing(fields: Fields, **options: object) -> Fields:
    """The config as of a model with plain weights, where those that it says are packed are unpacked at loading.

    Raises UnsupportedModelError when they are packed by another method than the family's, or with other options.
    """
    if "quantization_config" not in fields:
        return fields
    packing = fields.nested("quantization_config")
    if packing.text("quant_method", "unknown") != PACKED_WEIGHTS[fields.text("model_type")]:
        _refuse_quantized(fields)
    refuse_other(packing, **options)
    return fields.without("quantization_config")


def _refuse_quantized(fields: Fields) -> None:
    if "quantization_config" in fields:
        method = fields.nested("quantization_config").text("quant_method", "unknown")
        packed = ", ".join(f"{method!r} in {family}" for family, method in PACKED_WEIGHTS.items())
        raise UnsupportedModelError(
            f"quantization_config has method {method!r}; supported: weights not quantized, or {packed}"
        )
