"""The rotary table equals that of transformers for every scaling kind, and depends on positions alone."""

from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from parallel import rotary
from parallel.description import DecoderDescription
from parallel.errors import ConfigError, UnsupportedModelError
from parallel.families.fields import Fields
from parallel.families.registry import describe_config
from parallel.families.rope import read_rotary
from parallel.position_description import LongRopeScaling
from parallel.rotary import LayerRotations, RotaryTable

POSITIONS = (0, 1, 2047, 2048, 8191, 32767, 32768)
NUM_POSITIONS = 33000
CPU = torch.device("cpu")


def _config(max_positions: int = 65536, head_dim: int = 64, **rope: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 4 * head_dim,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": max_positions,
        "rope_parameters": rope,
    }


def _describe(config: dict[str, Any]) -> DecoderDescription:
    return describe_config(config, source="test")


def _original(config: dict[str, Any], positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    make = Phi3RotaryEmbedding if config["model_type"] == "phi3" else LlamaRotaryEmbedding
    embedding = make(transformers.AutoConfig.for_model(**deepcopy(config)))
    cos, sin = embedding(torch.zeros(1), torch.tensor([positions]))
    half = cos.shape[-1] // 2
    return cos[0, :, :half], sin[0, :, :half]


LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.02 * i for i in range(32)],
    "long_factor": [1.0 + 0.5 * i for i in range(32)],
    "original_max_position_embeddings": 4096,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 4096,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _phi3(**rope: Any) -> dict[str, Any]:
    """Without "original_max_position_embeddings" beside the rope."""
    return {**_config(**rope), "model_type": "phi3"}


KINDS: dict[str, dict[str, Any]] = {
    "default": _config(rope_type="default", rope_theta=10000.0),
    "default-theta": _config(rope_type="default", rope_theta=1e6, head_dim=128),
    "linear": _config(rope_type="linear", factor=4.0, rope_theta=10000.0),
    "dynamic-inside": _config(rope_type="dynamic", factor=2.0, rope_theta=10000.0),
    "yarn": _config(**YARN),
    "yarn-qwen": _config(
        **{**YARN, "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6}, head_dim=128
    ),
    "yarn-hardly": _config(**{**YARN, "factor": 1.5}),
    "yarn-attention-factor": _config(**YARN, attention_factor=1.5),
    "yarn-mscale-alone": _config(**YARN, mscale=0.7),
    "yarn-mscale-all-dim-alone": _config(**YARN, mscale_all_dim=0.7),
    "yarn-one-ramp": _config(**YARN, beta_fast=700.0, beta_slow=700.0),
    "yarn-longest-ramp": _config(**YARN, beta_fast=1000.0, beta_slow=1e-6),
    "yarn-mscale": _config(**YARN, mscale=0.7, mscale_all_dim=1.3, beta_fast=20.0, beta_slow=2.0, truncate=False),
    "yarn-zero-mscale": _config(**YARN, mscale=0, mscale_all_dim=0.7),
    "yarn-zero-mscale-all-dim": _config(**YARN, mscale=0.7, mscale_all_dim=0.0),
    "yarn-zero-ramp": _config(**YARN, beta_fast=0, beta_slow=0),
    "llama3": _config(**LLAMA3, head_dim=128),
    "llama3-narrow": _config(**{**LLAMA3, "low_freq_factor": 2.0}, head_dim=128),
    "longrope-long": _config(**LONGROPE),
    "longrope-attention-factor": _config(**LONGROPE, attention_factor=1.25),
    "longrope-shrunk": _config(**LONGROPE, factor=0.5),
    "longrope-from-one-token": _config(
        **{**LONGROPE, "original_max_position_embeddings": 1}, factor=2.0, attention_factor=1.25
    ),
    "longrope-short": _config(**{**LONGROPE, "original_max_position_embeddings": 65536}, factor=2.0),
    "phi3-default": _phi3(rope_theta=10000.0),
    "phi3-longrope": _phi3(**{**LONGROPE, "rope_type": "longrope"}),
    "phi3-su": _phi3(**{**LONGROPE, "rope_type": "su"}),
    "phi3-yarn": _phi3(**{**LONGROPE, "rope_type": "yarn"}),
    "phi3-yarn-factor": _phi3(**{**LONGROPE, "rope_type": "yarn", "factor": 4.0}),
    "phi3-yarn-attention-factor": _phi3(**{**LONGROPE, "rope_type": "yarn", "attention_factor": 1.5}),
    "phi3-original-context-inside-the-rope": _phi3(**{**LONGROPE, "original_max_position_embeddings": 8192}),
    "phi3-original-context-beside-it": {
        **_phi3(**{**LONGROPE, "rope_type": "yarn"}),
        "original_max_position_embeddings": 2048,
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_table_equals_transformers_at_far_positions(kind: str) -> None:
    config = KINDS[kind]

    cos, sin = RotaryTable(_describe(config).rotaries[0], 65536, device=CPU)(torch.tensor(POSITIONS))

    expected_cos, expected_sin = _original(config, list(POSITIONS))
    torch.testing.assert_close(cos, expected_cos, atol=1e-5, rtol=0)
    torch.testing.assert_close(sin, expected_sin, atol=1e-5, rtol=0)


@pytest.mark.parametrize("position", [0, 100, 2047, 2048, 8191, 32767, 32768])
def test_dynamic_equals_transformers_generating_token_by_token(position: int) -> None:
    config = _config(max_positions=2048, rope_type="dynamic", factor=20.0, rope_theta=10000.0)
    description = _describe(config)

    table = RotaryTable(description.rotaries[0], description.max_context, device=CPU)
    cos, sin = table(torch.tensor([position]))

    # one new token, so transformers rescales for the length that ends with it
    expected_cos, expected_sin = _original(config, [position])
    torch.testing.assert_close(cos, expected_cos, atol=1e-5, rtol=0)
    torch.testing.assert_close(sin, expected_sin, atol=1e-5, rtol=0)


def test_longrope_takes_the_short_factors_when_the_served_context_is_the_original_one() -> None:
    config = KINDS["longrope-long"]
    scaling = _describe(config).rotaries[0].scaling
    assert isinstance(scaling, LongRopeScaling)

    table = RotaryTable(_describe(config).rotaries[0], scaling.original_context, device=CPU)
    cos, _ = table(torch.tensor([0, 2047, 4095]))

    expected_cos, _ = _original(config, [0, 2047, 4095])
    torch.testing.assert_close(cos, expected_cos, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_angles_depend_on_the_position_alone(kind: str) -> None:
    table = RotaryTable(_describe(KINDS[kind]).rotaries[0], NUM_POSITIONS, device=CPU)

    together, _ = table(torch.tensor([5, 32768, 2048]))
    alone, _ = table(torch.tensor([2048]))

    assert torch.equal(together[2], alone[0])


def test_layers_of_a_kind_share_a_table_and_some_do_not_turn() -> None:
    plain, linear = (_describe(KINDS[kind]).rotaries[0] for kind in ("default", "linear"))
    rotations = LayerRotations([plain, None, linear, plain], 100, device=CPU)
    positions = torch.tensor([0, 7, 99])

    assert rotations.kind_of_layer == [0, 1, 2, 0]
    for angles, table, kind in zip(rotations(positions), rotations.angles, (plain, None, linear), strict=True):
        expected = () if kind is None else RotaryTable(kind, 100, device=CPU)(positions)
        assert len(angles) == len(table) == len(expected)
        for values, rows, expected_values in zip(angles, table, expected, strict=True):
            assert torch.equal(values, expected_values)
            assert torch.equal(rows[positions], expected_values)


TABLES = {**KINDS, "dynamic-beyond": _config(max_positions=300, rope_type="dynamic", factor=4.0, head_dim=128)}


@pytest.mark.parametrize("kind", TABLES)
def test_tables_made_in_blocks_have_the_bits_of_those_made_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    description = _describe(TABLES[kind]).rotaries[0]
    num_positions = 1000
    tables = {}
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several cut a power up, and the rest of a vector is rounded differently
    for block_rows in (64, 2000):
        monkeypatch.setattr(rotary, "_BLOCK_ROWS", block_rows)
        tables[block_rows] = RotaryTable(description, num_positions, device=CPU).angles
    torch.set_num_threads(num_threads)

    assert all(torch.equal(blocks, whole) for blocks, whole in zip(*tables.values(), strict=True))


@pytest.mark.parametrize("kind", ["default", "yarn", "dynamic-beyond"])
def test_only_the_tables_themselves_are_as_large_as_they(kind: str) -> None:
    description = _describe(TABLES[kind]).rotaries[0]
    with _Made() as made:
        table = RotaryTable(description, 1 << 16, device=CPU)

    table_bytes = table.angles[0].nbytes
    assert sorted(made.storages.values())[-2:] == [table_bytes] * 2
    assert sorted(made.storages.values())[-3] <= table_bytes // 4


class _Made(TorchDispatchMode):
    """What tensors are made while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, int] = {}
        """Number -> bytes."""
        self._kept: list[torch.Tensor] = []  # else a later one may have the same address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self._kept.append(result)
            storage = result.untyped_storage()
            self.storages[storage.data_ptr()] = storage.nbytes()
        return result


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_type": "default"}, 4096),
        ({"rope_type": "linear", "factor": 2.0}, 8192),
        ({"rope_type": "dynamic", "factor": 4.0}, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048}, 4096),
    ],
)
def test_context_is_the_scaled_one(rope: dict[str, Any], context: int) -> None:
    assert _describe(_config(max_positions=4096, **rope)).max_context == context


def test_older_layout_means_the_same_as_that_of_transformers_5() -> None:
    newer = _config(rope_type="linear", factor=4.0, rope_theta=1e5)
    older = {key: value for key, value in newer.items() if key != "rope_parameters"}
    for key in ("type", "rope_type"):
        values = {**older, "rope_theta": 1e5, "rope_scaling": {key: "linear", "factor": 4.0}}
        assert _describe(values) == _describe(newer)


def test_yarn_without_factor_takes_the_ratio_of_contexts() -> None:
    config = _config(max_positions=16384, rope_type="yarn", original_max_position_embeddings=4096)
    scaled = _describe(config).rotaries[0].scaling
    assert scaled is not None
    assert scaled.factor == 4.0  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["proportional", "xpos", ""])
def test_unknown_kind_is_refused_with_the_known_ones(kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"rope_type is '{kind}'; supported: default, linear, dynamic"):
        _describe(_config(rope_type=kind, factor=2.0))


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    "rope",
    [
        {"type": "mrope", "mrope_section": [2, 3, 3]},
        {"rope_type": "mrope", "mrope_section": [2, 3, 3]},
        {"rope_type": "default", "mrope_section": [2, 3, 3]},  # as newer versions of transformers rewrite it
    ],
)
def test_rotation_by_image_patches_is_refused_with_the_reason(name: str, rope: dict[str, Any]) -> None:
    config = {key: value for key, value in _config().items() if key != "rope_parameters"} | {name: rope}
    with pytest.raises(
        UnsupportedModelError, match="is mrope: it turns by the time, height and width of image patches"
    ):
        _describe(config)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "linear"}, "rope_parameters.factor is missing"),
        ({"rope_type": "linear", "factor": -1}, "rope_parameters.factor is -1"),
        ({"rope_type": "linear", "factor": float("nan")}, "rope_parameters.factor is nan"),
        ({"rope_type": "linear", "factor": "4"}, "rope_parameters.factor is '4'"),
        ({"rope_type": "linear", "factor": 0.5}, "rotary factor is 0.5"),
        ({"rope_theta": 0}, "rope_parameters.rope_theta is 0"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "short_factors has 1 entries"),
        ({"rope_type": "longrope", "short_factor": [1, "x"], "long_factor": [1]}, r"short_factor\[1\] is 'x'"),
        ({**LONGROPE, "original_max_position_embeddings": 1}, "original_max_position_embeddings is 1"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 1}, "low_freq_factor is 4"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 1, "beta_slow": 2}, "beta_fast is 1"),
    ],
)
def test_contradictory_parameters_are_refused(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _describe(_config(**rope))


def test_phi3_was_trained_on_4096_tokens_if_nothing_is_said() -> None:
    rope = {name: value for name, value in LONGROPE.items() if name != "original_max_position_embeddings"}
    for kind in ("su", "yarn", "longrope"):
        assert _describe(_phi3(**{**rope, "rope_type": kind})) == _describe(_phi3(**LONGROPE))


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3"])
def test_kind_that_phi3_does_not_have_is_refused(kind: str) -> None:
    supported = "rope_type is '.*'; supported: default, longrope, yarn, su"
    with pytest.raises(UnsupportedModelError, match=supported):
        _describe(_phi3(**{**LLAMA3, "rope_type": kind}))


def test_yarn_of_phi3_without_the_factors_of_longrope_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rope_parameters\.short_factor is missing"):
        _describe(_phi3(**YARN))


def test_partial_rotation_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor is 0\.5"):
        _describe({**_config(rope_type="default"), "partial_rotary_factor": 0.5})


def test_a_context_that_is_given_after_scaling_is_served() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    config = {"max_position_embeddings": 8192, "rope_scaling": rope}
    assert read_rotary(Fields(config, "test"), 64)[1] == 8192
