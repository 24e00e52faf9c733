"""What a decoder looks like: a family reads it from a config.json, and one decoder is built from it.

Knows shapes and options; how they are split over ranks is said in shard.py, tensor names in families/.
"""

from dataclasses import dataclass

from parallel.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Positions are divided by `factor`: linear interpolation, arXiv:2306.15595."""

    factor: float

    def __post_init__(self) -> None:
        _require_factor(self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScaling:
    """The base grows with the length of the sequence once that passes `original_context` ("dynamic NTK")."""

    factor: float
    original_context: int

    def __post_init__(self) -> None:
        _require_factor(self.factor)
        _require_positive("original context", self.original_context)


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Slow dimensions are interpolated, fast ones kept, with a ramp between: YaRN, arXiv:2309.00071."""

    factor: float
    original_context: int
    attention_factor: float
    """Multiplies cos and sin."""
    beta_fast: float = 32.0
    """Dimensions that turn more often than this over the original context are kept."""
    beta_slow: float = 1.0
    """Dimensions that turn less often than this over the original context are interpolated."""
    truncate: bool = True
    """Round the ends of the ramp outward to whole dimensions."""

    def __post_init__(self) -> None:
        _require_factor(self.factor)
        _require_positive("original context", self.original_context)
        if self.attention_factor <= 0:
            raise ConfigError(f"rotary attention_factor is {self.attention_factor}; allowed: more than 0")
        if self.beta_slow <= 0 or self.beta_fast < self.beta_slow:
            raise ConfigError(
                f"rotary beta_fast is {self.beta_fast} and beta_slow {self.beta_slow}; "
                "allowed: both more than 0, beta_fast at least beta_slow"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """One searched divisor for each dimension, in a short and a long set: LongRoPE, arXiv:2402.13753."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_context: int
    attention_factor: float
    """Multiplies cos and sin."""

    def __post_init__(self) -> None:
        _require_positive("original context", self.original_context)
        for name in ("short_factors", "long_factors"):
            if any(factor <= 0 for factor in getattr(self, name)):
                raise ConfigError(f"rotary {name} are {list(getattr(self, name))}; allowed: numbers more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Long waves are divided by `factor`, short ones kept, with a ramp between, as in Llama 3.1."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def __post_init__(self) -> None:
        _require_factor(self.factor)
        _require_positive("original context", self.original_context)
        if self.low_freq_factor <= 0 or self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"rotary low_freq_factor is {self.low_freq_factor} and high_freq_factor {self.high_freq_factor}; "
                "allowed: 0 < low_freq_factor < high_freq_factor"
            )


RotaryScaling = LinearScaling | DynamicScaling | YarnScaling | LongRopeScaling | Llama3Scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryDescription:
    """Rotary position embedding: which dims of a head turn, and how fast. arXiv:2104.09864."""

    dim: int
    """Leading dims of each head that are rotated."""
    theta: float
    scaling: RotaryScaling | None = None

    def __post_init__(self) -> None:
        if self.dim < 2 or self.dim % 2:
            raise ConfigError(f"rotary dim is {self.dim}; allowed: an even number, at least 2")
        if self.theta <= 1:
            raise ConfigError(f"rope_theta is {self.theta}; allowed: more than 1")
        if isinstance(self.scaling, LongRopeScaling):
            for name in ("short_factors", "long_factors"):
                num_factors = len(getattr(self.scaling, name))
                if num_factors != self.dim // 2:
                    raise ConfigError(f"rotary {name} has {num_factors} entries; allowed: {self.dim // 2}, half of dim")
        if isinstance(self.scaling, DynamicScaling) and self.dim < 4:
            raise ConfigError(f"rotary dim is {self.dim} with dynamic scaling; allowed: at least 4")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderDescription:
    """A decoder-only transformer with RMSNorm before attention and MLP, and a gated SiLU MLP.

    Whole-model sizes; every rank has the same description.
    """

    family: str
    """The model_type of the config that it was read from."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Inner size of the MLP."""
    max_context: int
    """Longest prompt plus output that the model was made for."""
    norm_eps: float
    rotary: RotaryDescription
    sliding_windows: tuple[int | None, ...]
    """One per layer: a token sees itself and this many - 1 before it; None: all before it."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Bias of the attention's output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each query and key head before rotation."""
    tie_embeddings: bool = False
    """The head is the embedding, transposed."""

    def __post_init__(self) -> None:
        for name in (
            *("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads"),
            *("head_dim", "intermediate_size", "max_context"),
        ):
            _require_positive(name, getattr(self, name))
        if self.norm_eps <= 0:
            raise ConfigError(f"norm_eps is {self.norm_eps}; allowed: more than 0")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_kv_heads is {self.num_kv_heads}; allowed: divisors of the {self.num_heads} query heads"
            )
        if self.rotary.dim > self.head_dim:
            raise ConfigError(f"rotary dim is {self.rotary.dim}; allowed: at most head_dim, {self.head_dim}")
        if len(self.sliding_windows) != self.num_layers:
            raise ConfigError(
                f"sliding_windows has {len(self.sliding_windows)} entries; allowed: one per layer, {self.num_layers}"
            )
        for window in self.sliding_windows:
            if window is not None:
                _require_positive("sliding window", window)


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} is {value}; allowed: at least 1")


def _require_factor(factor: float) -> None:
    if factor < 1:
        raise ConfigError(f"rotary factor is {factor}; allowed: at least 1")
