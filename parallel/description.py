"""What a decoder looks like: a family reads it from a config.json, and one decoder is built from it.

Knows shapes and options; how they are split over ranks is said in shard.py, tensor names in families/.
"""

from dataclasses import dataclass
from enum import StrEnum

from parallel.errors import ConfigError
from parallel.position_description import MAX_INT32, Alibi, LearnedPositions, RotaryDescription, require_positive


class NormKind(StrEnum):
    """How activations are brought to unit size, and what the weight is."""

    RMS = "rms"
    """Divided by the root mean square, times a weight. arXiv:1910.07467."""
    RMS_PLUS_ONE = "rms_plus_one"
    """The same, times 1 + the weight that is stored."""
    LAYER = "layer"
    """Mean taken away, by the standard deviation, times a weight, plus a bias. arXiv:1607.06450."""
    LAYER_WITHOUT_BIAS = "layer_without_bias"
    """LAYER without the bias."""


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
    """Attention and MLP read the same stream, each through a norm of its own."""
    PARALLEL_ONE_NORM = "parallel_one_norm"
    """Attention and MLP read the same normed stream."""


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
    """Whether all matrices of an expert have a bias."""
    clamped_gate: ClampedGate | None = None
    """Activation of the experts in place of the model's."""
    shared_intermediate_size: int | None = None
    """Inner size of an MLP that every token passes besides, without biases; None: there is none."""
    is_shared_gated: bool = False
    """What it gives is multiplied by the sigmoid of one more logit."""
    dense_layers: frozenset[int] = frozenset()
    """Layers that have the plain MLP."""

    def __post_init__(self) -> None:
        for name in ("num_experts", "intermediate_size", "num_groups"):
            require_positive(name, getattr(self, name))
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
            require_positive("shared_intermediate_size", self.shared_intermediate_size)


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
    """Dims of each value head."""
    norm_eps: float
    """Epsilon of the norms of queries and of the latent."""

    def __post_init__(self) -> None:
        for name in ("rank", "plain_dim", "rotary_dim", "value_dim"):
            require_positive(f"latent {name}", getattr(self, name))
        if self.query_rank is not None:
            require_positive("latent query_rank", self.query_rank)


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
    """Kind of all norms but those of queries and keys."""
    norm_place: NormPlace = NormPlace.BEFORE
    residual: ResidualKind = ResidualKind.SEQUENTIAL
    residual_multiplier: float = 1.0
    """Factor on what each block adds to the residual stream."""

    rotaries: tuple[RotaryDescription | None, ...]
    """Rotation of each layer; None: the layer does not rotate."""
    alibi: Alibi | None = None
    learned_positions: LearnedPositions | None = None
    sliding_windows: tuple[int | None, ...]
    """Window of each layer: a token sees itself and this many - 1 before it; None: all before it."""
    attention_scale: float | None = None
    """Factor on the scores; None: 1 / sqrt(head_dim)."""
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
    """Whether the attention's output projection has a bias."""

    activation: Activation = Activation.SILU
    is_mlp_gated: bool = True
    """down(activation(gate(x)) * up(x)); else down(activation(up(x)))."""
    mlp_bias: bool = False
    moe: MoeDescription | None = None
    """Experts in place of the MLP, in all layers but its `dense_layers`; gated."""

    embedding_multiplier: float = 1.0
    """Factor on the embedding, rounded to the dtype of the weights before it is used."""
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
            require_positive(name, getattr(self, name))
        if self.max_context > MAX_INT32:
            raise ConfigError(f"max_context is {self.max_context}; allowed: at most {MAX_INT32}")
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
                require_positive("sliding window", window)
        self._check_positions()
        self._check_latent()
        if self.residual is not ResidualKind.SEQUENTIAL and (
            self.norm_place is not NormPlace.BEFORE or self.residual_multiplier != 1.0
        ):
            raise ConfigError("a parallel residual allows norms before the blocks only, and no residual multiplier")
        if self.moe is not None:
            self._check_experts(self.moe)

    @property
    def seen_flops(self) -> int:
        """Multiplications and additions in a layer for each token that a token sees: scores and sums of all heads."""
        latent = self.latent_kv
        width = 2 * self.head_dim if latent is None else 2 * latent.rank + latent.rotary_dim
        return 2 * self.num_heads * width

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
