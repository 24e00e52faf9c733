"""How positions enter a model: rotary angles and their scalings, biases by distance, learned vectors."""

from dataclasses import dataclass

from parallel.errors import ConfigError

MAX_INT32 = 2**31 - 1
"""Positions and sizes that messages and kernels have room for."""


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
        require_positive("original context", self.original_context)


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
        require_positive("original context", self.original_context)
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
        require_positive("original context", self.original_context)
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
        require_positive("original context", self.original_context)
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
    is_interleaved: bool = False
    """Neighbours turn together, (0, 1), (2, 3) ...; else the first half with the second."""

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
class Alibi:
    """Attention scores fall with the distance of the key, in each head at another rate. arXiv:2108.12409."""

    slopes: tuple[float, ...]
    """Slope of each query head: a score grows by this much per position of its key."""
    scale: float = 1.0
    """Factor on slope times position."""
    is_rounded: bool = False
    """Slope and slope times position are rounded to bfloat16, as Falcon was trained with."""

    @property
    def is_by_distance(self) -> bool:
        """Whether what is added depends on how far the key is from the query alone."""
        return not self.is_rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedPositions:
    """A learned vector for each position, added to the token's."""

    num_rows: int
    """Rows of the table in the checkpoint."""
    offset: int = 0
    """Row of position 0."""

    def __post_init__(self) -> None:
        if not 0 <= self.offset < self.num_rows:
            raise ConfigError(f"position offset is {self.offset}; allowed: 0 to {self.num_rows - 1}")


def require_positive(name: str, value: int) -> None:
    """Raise ConfigError when a size is below 1."""
    if value < 1:
        raise ConfigError(f"{name} is {value}; allowed: at least 1")


def _require_factor(factor: float) -> None:
    if factor < 1:
        raise ConfigError(f"rotary factor is {factor}; allowed: at least 1")
    if factor > MAX_INT32:
        raise ConfigError(f"rotary factor is {factor}; allowed: at most {MAX_INT32}")
