"""What a decoder looks like: a family reads it from a config.json, and one decoder is built from it.

Knows shapes and options; how they are split over ranks is said in shard.py, tensor names in families/.
"""

from dataclasses import dataclass
from enum import StrEnum

from parallel.errors import ConfigError


class NormKind(StrEnum):
    """How activations are brought to unit size, and what the weight is."""

    RMS = "rms"
    """By the root mean square, times a weight. arXiv:1910.07467."""
    RMS_PLUS_ONE = "rms_plus_one"
    """The same, times 1 + the weight that is stored."""
    LAYER = "layer"
    """Mean taken away, by the standard deviation, times a weight, plus a bias. arXiv:1607.06450."""
    LAYER_WITHOUT_BIAS = "layer_without_bias"
    """The same without the bias."""


class NormPlace(StrEnum):
    """Where a layer norms: what a block (attention, MLP) reads, what it adds to the residual stream, or both."""

    BEFORE = "before"
    AFTER = "after"
    BOTH = "both"


class ResidualKind(StrEnum):
    """How attention and MLP follow each other."""

    SEQUENTIAL = "sequential"
    """The MLP reads what the attention has added to."""
    PARALLEL = "parallel"
    """Both read the same stream, each through a norm of its own."""
    PARALLEL_ONE_NORM = "parallel_one_norm"
    """Both read the same normed stream."""


class QKNormScope(StrEnum):
    """What is normed together in queries and keys."""

    HEAD = "head"
    """Each head by itself, all heads with the same weight [H]."""
    OWN_HEAD = "own_head"
    """Each head by itself, with weights of its own: [N, H]."""
    ALL_HEADS = "all_heads"
    """All heads of a token as one vector: [N * H]."""


class Activation(StrEnum):
    """The nonlinear function of an MLP."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    """GELU by the approximation with tanh: arXiv:1606.08415, section 2."""
    RELU = "relu"


class RouterScore(StrEnum):
    """How a router's logits become the weights of the experts that it chooses."""

    SOFTMAX = "softmax"
    """Softmax over all experts, in float32; the highest are chosen."""
    SOFTMAX_OF_CHOSEN = "softmax_of_chosen"
    """The highest logits are chosen; softmax over those."""
    SIGMOID = "sigmoid"
    """Sigmoid of each; logits in float32, whatever the dtype of the weights. arXiv:2412.19437, section 2.1.2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedGate:
    """(up + 1) * gate * sigmoid(alpha * gate), gate at most `limit`, up within plus and minus `limit`, as in gpt-oss.

    Gate and up are one matrix whose rows alternate: gate, up, gate, up ...
    """

    alpha: float
    limit: float

    def __post_init__(self) -> None:
        if self.limit <= 0:
            raise ConfigError(f"limit of the gate is {self.limit}; allowed: more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeDescription:
    """Experts in place of the MLP: a router chooses some for each token, whose results are added with weights."""

    num_experts: int
    num_chosen: int
    """Experts of each token."""
    intermediate_size: int
    """Inner size of each expert."""
    score: RouterScore = RouterScore.SOFTMAX
    is_normalized: bool = False
    """The weights of a token are divided by their sum."""
    weight_multiplier: float = 1.0
    num_groups: int = 1
    """Neighbouring experts form so many groups of equal size ..."""
    num_chosen_groups: int = 1
    """... and a token chooses from those so many whose two best experts score highest together."""
    router_bias: bool = False
    choice_bias: bool = False
    """A learned number per expert is added to its score to choose, but not to its weight."""
    expert_bias: bool = False
    """On all matrices of an expert."""
    clamped_gate: ClampedGate | None = None
    """In place of the model's activation."""
    shared_intermediate_size: int | None = None
    """Inner size of an MLP that every token passes besides, without biases; None: there is none."""
    is_shared_gated: bool = False
    """What it gives is multiplied by the sigmoid of one more logit."""
    dense_layers: frozenset[int] = frozenset()
    """Layers that have the plain MLP."""

    def __post_init__(self) -> None:
        for name in ("num_experts", "intermediate_size", "num_groups"):
            _require_positive(name, getattr(self, name))
        if not 1 <= self.num_chosen_groups <= self.num_groups:
            raise ConfigError(f"num_chosen_groups is {self.num_chosen_groups}; allowed: 1 to {self.num_groups}")
        if self.num_groups > 1 and (self.num_experts % self.num_groups or self.num_experts < 2 * self.num_groups):
            raise ConfigError(
                f"num_groups is {self.num_groups}; allowed: divisors of the {self.num_experts} experts that leave at "
                "least two for each"
            )
        num_eligible = self.num_experts // self.num_groups * self.num_chosen_groups
        if not 1 <= self.num_chosen <= num_eligible:
            raise ConfigError(f"num_chosen is {self.num_chosen}; allowed: 1 to {num_eligible}, those to choose from")
        if self.shared_intermediate_size is not None:
            _require_positive("shared_intermediate_size", self.shared_intermediate_size)


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
    """One per query head: a score grows by this much per position of its key."""
    scale: float = 1.0
    """Multiplies slope times position."""
    is_rounded: bool = False
    """Slope and slope times position are rounded to bfloat16, as Falcon was trained with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedPositions:
    """A learned vector for each position, added to the token's."""

    num_rows: int
    """Of the table in the checkpoint."""
    offset: int = 0
    """Row of position 0."""

    def __post_init__(self) -> None:
        if not 0 <= self.offset < self.num_rows:
            raise ConfigError(f"position offset is {self.offset}; allowed: 0 to {self.num_rows - 1}")


@dataclass(frozen=True, slots=True, kw_only=True)
class QKNorm:
    """The norm over queries and keys, before rotation."""

    kind: NormKind
    scope: QKNormScope


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentKV:
    """Keys and values of all heads are made from one small vector per token, the latent; only that and one rotated key
    for all heads are cached. Multi-head latent attention: arXiv:2405.04434, section 2.1."""

    query_rank: int | None
    """Queries are made from a vector of this size, normed; None: from what the attention reads."""
    rank: int
    """Size of the latent, which is normed."""
    plain_dim: int
    """Leading dims of each query and key head, not rotated."""
    rotary_dim: int
    """The dims after them, rotated; those of the key are the same in all heads."""
    value_dim: int
    """Of each value head."""
    norm_eps: float
    """Of both norms."""

    def __post_init__(self) -> None:
        for name in ("rank", "plain_dim", "rotary_dim", "value_dim"):
            _require_positive(f"latent {name}", getattr(self, name))
        if self.query_rank is not None:
            _require_positive("latent query_rank", self.query_rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderDescription:
    """A decoder-only transformer; what is not said is as in Llama: RMSNorm before each block, a gated SiLU MLP.

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
    norm: NormKind = NormKind.RMS
    """Of all norms but those of queries and keys."""
    norm_place: NormPlace = NormPlace.BEFORE
    residual: ResidualKind = ResidualKind.SEQUENTIAL
    residual_multiplier: float = 1.0
    """Of what each block adds to the residual stream."""

    rotaries: tuple[RotaryDescription | None, ...]
    """One per layer; None: the layer does not rotate."""
    alibi: Alibi | None = None
    learned_positions: LearnedPositions | None = None
    sliding_windows: tuple[int | None, ...]
    """One per layer: a token sees itself and this many - 1 before it; None: all before it."""
    attention_scale: float | None = None
    """Multiplies the scores; None: 1 / sqrt(head_dim)."""
    attention_soft_cap: float | None = None
    """Scores become cap * tanh(score / cap)."""
    has_attention_sinks: bool = False
    """Each head has a learned score that takes part in every softmax and stands for no token: arXiv:2309.17453."""
    latent_kv: LatentKV | None = None
    """With it, head_dim is that of queries, num_kv_heads is 1, and the biases are of the projections to latents."""
    qkv_bias: bool = False
    qkv_clip: float | None = None
    """Queries, keys and values are kept within plus and minus this."""
    qk_norm: QKNorm | None = None
    output_bias: bool = False
    """Bias of the attention's output projection."""

    activation: Activation = Activation.SILU
    is_mlp_gated: bool = True
    """down(activation(gate(x)) * up(x)); else down(activation(up(x)))."""
    mlp_bias: bool = False
    moe: MoeDescription | None = None
    """Experts in place of the MLP, in all layers but its `dense_layers`; gated."""

    embedding_multiplier: float = 1.0
    """Rounded to the dtype of the weights before it is used."""
    embedding_norm: bool = False
    tie_embeddings: bool = False
    """The head is the embedding, transposed."""
    head_bias: bool = False
    is_head_normalized: bool = False
    """The head's rows are brought to unit length after loading."""
    logit_multiplier: float = 1.0
    logit_soft_cap: float | None = None
    """Logits become cap * tanh(logit / cap)."""

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
        for name in ("rotaries", "sliding_windows"):
            if len(getattr(self, name)) != self.num_layers:
                raise ConfigError(
                    f"{name} has {len(getattr(self, name))} entries; allowed: one per layer, {self.num_layers}"
                )
        for rotary in self.rotaries:
            if rotary is not None and rotary.dim > self.head_dim:
                raise ConfigError(f"rotary dim is {rotary.dim}; allowed: at most head_dim, {self.head_dim}")
        for window in self.sliding_windows:
            if window is not None:
                _require_positive("sliding window", window)
        self._check_positions()
        self._check_latent()
        if self.residual is not ResidualKind.SEQUENTIAL and (
            self.norm_place is not NormPlace.BEFORE or self.residual_multiplier != 1.0
        ):
            raise ConfigError("a parallel residual allows norms before the blocks only, and no residual multiplier")
        if self.moe is not None:
            self._check_experts(self.moe)

    @property
    def has_dense_layers(self) -> bool:
        """Whether any layer has the plain MLP."""
        return self.moe is None or bool(self.moe.dense_layers)

    def moe_of_layer(self, layer: int) -> MoeDescription | None:
        """The experts of a layer; None: it has the plain MLP."""
        return None if self.moe is None or layer in self.moe.dense_layers else self.moe

    def _check_experts(self, moe: MoeDescription) -> None:
        if self.residual is not ResidualKind.SEQUENTIAL or not self.is_mlp_gated:
            raise ConfigError("experts allow a sequential residual and a gated MLP only")
        if not moe.dense_layers < set(range(self.num_layers)):
            raise ConfigError(
                f"dense_layers are {sorted(moe.dense_layers)}; allowed: some, not all, of 0 to {self.num_layers - 1}"
            )

    def _check_positions(self) -> None:
        if self.alibi is not None and len(self.alibi.slopes) != self.num_heads:
            raise ConfigError(f"alibi has {len(self.alibi.slopes)} slopes; allowed: one per head, {self.num_heads}")
        positions = self.learned_positions
        if positions is not None and self.max_context > positions.num_rows - positions.offset:
            raise ConfigError(
                f"max_context is {self.max_context}; allowed: the learned positions, "
                f"{positions.num_rows - positions.offset}"
            )

    def _check_latent(self) -> None:
        latent = self.latent_kv
        if latent is None:
            return
        if self.num_kv_heads != 1 or self.head_dim != latent.plain_dim + latent.rotary_dim:
            raise ConfigError(
                f"num_kv_heads is {self.num_kv_heads} and head_dim {self.head_dim} with latent keys and values; "
                f"allowed: 1 and {latent.plain_dim + latent.rotary_dim}"
            )
        if any(rotary is not None and rotary.dim != latent.rotary_dim for rotary in self.rotaries):
            raise ConfigError(f"a layer rotates other dims than the {latent.rotary_dim} of the latent rotary_dim")
        others = (self.alibi, self.qk_norm, self.qkv_clip)
        if any(other is not None for other in others) or self.residual is not ResidualKind.SEQUENTIAL:
            raise ConfigError("latent keys and values allow no alibi, qk_norm, qkv_clip or parallel residual")


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} is {value}; allowed: at least 1")


def _require_factor(factor: float) -> None:
    if factor < 1:
        raise ConfigError(f"rotary factor is {factor}; allowed: at least 1")
