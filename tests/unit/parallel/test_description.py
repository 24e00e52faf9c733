"""Descriptions that contradict themselves are refused, whatever family made them, with what is allowed."""

from typing import Any

import pytest

from parallel.description import (
    ClampedGate,
    DecoderDescription,
    LatentKV,
    MoeDescription,
    NormKind,
    NormPlace,
    QKNorm,
    QKNormScope,
    ResidualKind,
)
from parallel.errors import ConfigError
from parallel.position_description import (
    Alibi,
    DynamicScaling,
    LearnedPositions,
    Llama3Scaling,
    LongRopeScaling,
    RotaryDescription,
    YarnScaling,
)

ROTARY = RotaryDescription(dim=4, theta=10_000.0)
MOE: dict[str, Any] = {"num_experts": 8, "num_chosen": 2, "intermediate_size": 4}
LATENT_SIZES: dict[str, Any] = {"query_rank": None, "rank": 6, "plain_dim": 4, "rotary_dim": 4, "value_dim": 5}
LATENT: dict[str, Any] = {
    "latent_kv": LatentKV(**LATENT_SIZES, norm_eps=1e-6),
    "num_kv_heads": 1,
    "rotaries": (ROTARY,) * 3,
}
YARN: dict[str, Any] = {"factor": 2.0, "original_context": 8, "attention_factor": 1.0}
LLAMA3: dict[str, Any] = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 8}
LONGROPE: dict[str, Any] = {"original_context": 8, "attention_factor": 1.0}
QK_NORM = QKNorm(kind=NormKind.RMS, scope=QKNormScope.HEAD)


def _describe(**changes: Any) -> DecoderDescription:
    sizes: dict[str, Any] = {
        "vocab_size": 10,
        "hidden_size": 12,
        "num_layers": 3,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 12,
        "max_context": 8,
        "norm_eps": 1e-5,
        "rotaries": (None,) * 3,
        "sliding_windows": (None,) * 3,
    }
    return DecoderDescription(family="llama", **sizes | changes)


def _describe_experts(**changes: Any) -> DecoderDescription:
    return _describe(moe=MoeDescription(**MOE | changes))


@pytest.mark.parametrize(
    "changes",
    [
        dict.fromkeys(("vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "max_context"), 1),
        {"intermediate_size": 1, "sliding_windows": (None, 1, 2)},
        {"max_context": 2**31 - 1},
        {"alibi": Alibi(slopes=(0.5,) * 6)},
        {"learned_positions": LearnedPositions(num_rows=10, offset=2)},
        {"learned_positions": LearnedPositions(num_rows=20)},
        {"rotaries": (RotaryDescription(dim=8, theta=1.5), None, RotaryDescription(dim=2, theta=2.0))},
        {
            "rotaries": tuple(
                RotaryDescription(dim=4, theta=10.0, scaling=DynamicScaling(factor=factor, original_context=1))
                for factor in (1.0, 2.0, 2**31 - 1)
            )
        },
        {"residual": ResidualKind.PARALLEL, "qk_norm": QK_NORM},
        {"norm_place": NormPlace.BOTH, "residual_multiplier": 0.5},
        LATENT,
        {**LATENT, "rotaries": (ROTARY, None, ROTARY)},
        {"moe": MoeDescription(**MOE, dense_layers=frozenset({0, 2}))},
        {"moe": MoeDescription(**MOE | {"num_experts": 1, "num_chosen": 1, "intermediate_size": 1})},
        {"moe": MoeDescription(**MOE, num_groups=4, num_chosen_groups=1, shared_intermediate_size=1)},
        {"moe": MoeDescription(**MOE | {"num_chosen": 8}, num_groups=4, num_chosen_groups=4)},
    ],
    ids=str,
)
def test_what_is_allowed_is_described(changes: dict[str, Any]) -> None:
    description = _describe(**changes)
    assert all(getattr(description, name) == value for name, value in changes.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({name: 0}, f"{name} is 0; allowed: at least 1")
            for name in ("vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "max_context")
        ),
        ({"intermediate_size": 0}, "intermediate_size is 0; allowed: at least 1"),
        ({"num_layers": 0, "rotaries": (), "sliding_windows": ()}, "num_layers is 0; allowed: at least 1"),
        ({"max_context": 2**31}, "max_context is 2147483648; allowed: at most 2147483647"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0; allowed: more than 0"),
        ({"num_kv_heads": 4}, "num_kv_heads is 4; allowed: divisors of the 6 query heads"),
        ({"rotaries": (None,)}, "rotaries has 1 entries; allowed: one per layer, 3"),
        ({"sliding_windows": (None,) * 4}, "sliding_windows has 4 entries; allowed: one per layer, 3"),
        ({"sliding_windows": (None, None, 0)}, "sliding window is 0; allowed: at least 1"),
        ({"head_dim": 2, "rotaries": (None, None, ROTARY)}, "rotary dim is 4; allowed: at most head_dim, 2"),
        ({"alibi": Alibi(slopes=(0.5,))}, "alibi has 1 slopes; allowed: one per head, 6"),
        ({"learned_positions": LearnedPositions(num_rows=9, offset=2)}, "is 8; allowed: the learned positions, 7"),
        *(
            ({"residual": residual, **change}, "a parallel residual allows norms before the blocks only, and no resid")
            for residual in (ResidualKind.PARALLEL, ResidualKind.PARALLEL_ONE_NORM)
            for change in ({"norm_place": NormPlace.BOTH}, {"residual_multiplier": 0.5})
        ),
        *(
            ({"moe": MoeDescription(**MOE), **change}, "experts allow a sequential residual and a gated MLP only")
            for change in ({"residual": ResidualKind.PARALLEL}, {"is_mlp_gated": False})
        ),
        ({**LATENT, "num_kv_heads": 2}, "num_kv_heads is 2 and head_dim 8 with latent .*; allowed: 1 and 8"),
        ({**LATENT, "head_dim": 9}, "num_kv_heads is 1 and head_dim 9 with latent .*; allowed: 1 and 8"),
        (
            {**LATENT, "rotaries": (ROTARY, None, RotaryDescription(dim=2, theta=10.0))},
            "a layer rotates other dims than the 4 of the latent rotary_dim",
        ),
        *(
            ({**LATENT, **change}, "latent keys and values allow no alibi, qk_norm, qkv_clip or parallel residual")
            for change in (
                {"alibi": Alibi(slopes=(0.5,) * 6)},
                {"qk_norm": QK_NORM},
                {"qkv_clip": 1.0},
                {"residual": ResidualKind.PARALLEL},
            )
        ),
    ],
    ids=str,
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _describe(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "num_experts is 0; allowed: at least 1"),
        ({"intermediate_size": 0}, "intermediate_size is 0; allowed: at least 1"),
        ({"num_groups": 0}, "num_groups is 0; allowed: at least 1"),
        ({"num_chosen": 0}, "num_chosen is 0; allowed: 1 to 8"),
        ({"num_chosen": 9}, "num_chosen is 9; allowed: 1 to 8"),
        ({"num_chosen": 5, "num_groups": 4, "num_chosen_groups": 2}, "num_chosen is 5; allowed: 1 to 4, those to choo"),
        ({"num_chosen_groups": 0}, "num_chosen_groups is 0; allowed: 1 to 1"),
        ({"num_groups": 2, "num_chosen_groups": 3}, "num_chosen_groups is 3; allowed: 1 to 2"),
        ({"num_groups": 3}, "num_groups is 3; allowed: divisors of the 8 experts that leave at least two for each"),
        ({"num_groups": 8}, "num_groups is 8; allowed: divisors of the 8 experts that leave at least two for each"),
        ({"shared_intermediate_size": 0}, "shared_intermediate_size is 0; allowed: at least 1"),
        ({"dense_layers": frozenset({0, 1, 2})}, r"dense_layers are \[0, 1, 2\]; allowed: some, not all, of 0 to 2"),
        ({"dense_layers": frozenset({3})}, r"dense_layers are \[3\]; allowed: some, not all, of 0 to 2"),
    ],
)
def test_experts_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _describe_experts(**changes)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        *(
            (LatentKV, {**LATENT_SIZES, "norm_eps": 1e-6, name: 0}, f"latent {name} is 0; allowed: at least 1")
            for name in LATENT_SIZES
        ),
        (ClampedGate, {"alpha": 1.0, "limit": 0.0}, "limit of the gate is 0.0; allowed: more than 0"),
        (LearnedPositions, {"num_rows": 2, "offset": 2}, "position offset is 2; allowed: 0 to 1"),
        (LearnedPositions, {"num_rows": 2, "offset": -1}, "position offset is -1; allowed: 0 to 1"),
        (YarnScaling, {**YARN, "attention_factor": 0.0}, "rotary attention_factor is 0.0; allowed: more than 0"),
        (YarnScaling, {**YARN, "beta_slow": 0.0}, "rotary beta_fast is 32.0 and beta_slow 0.0; allowed: both more"),
        (YarnScaling, {**YARN, "original_context": 0}, "original context is 0; allowed: at least 1"),
        (DynamicScaling, {"factor": 2.0, "original_context": 0}, "original context is 0; allowed: at least 1"),
        (Llama3Scaling, {**LLAMA3, "factor": 0.5}, "rotary factor is 0.5; allowed: at least 1"),
        (Llama3Scaling, {**LLAMA3, "original_context": 0}, "original context is 0; allowed: at least 1"),
        (Llama3Scaling, {**LLAMA3, "low_freq_factor": 0.0}, "low_freq_factor is 0.0 and high_freq_factor 4.0"),
        (Llama3Scaling, {**LLAMA3, "low_freq_factor": 4.0}, "low_freq_factor is 4.0 and high_freq_factor 4.0"),
        (
            LongRopeScaling,
            {**LONGROPE, "original_context": 0, "short_factors": (), "long_factors": ()},
            "original context is 0; allowed: at least 1",
        ),
        (
            LongRopeScaling,
            {**LONGROPE, "short_factors": (1.0, 1.0), "long_factors": (1.0, 0.0)},
            r"rotary long_factors are \[1.0, 0.0\]; allowed: numbers more than 0",
        ),
        (RotaryDescription, {"dim": 0, "theta": 10.0}, "rotary dim is 0; allowed: an even number, at least 2"),
        (RotaryDescription, {"dim": 5, "theta": 10.0}, "rotary dim is 5; allowed: an even number, at least 2"),
        (RotaryDescription, {"dim": 4, "theta": 1.0}, "rope_theta is 1.0; allowed: more than 1"),
        (
            RotaryDescription,
            {"dim": 2, "theta": 10.0, "scaling": DynamicScaling(factor=2.0, original_context=8)},
            "rotary dim is 2 with dynamic scaling; allowed: at least 4",
        ),
        (
            RotaryDescription,
            {
                "dim": 4,
                "theta": 10.0,
                "scaling": LongRopeScaling(**LONGROPE, short_factors=(1.0, 1.0), long_factors=(1.0,)),
            },
            "rotary long_factors has 1 entries; allowed: 2, half of dim",
        ),
    ],
    ids=str,
)
def test_parts_that_cannot_be_are_refused(kind: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**values)
