"""The model families that Weft knows, by the model_type of their config.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallel.description import DecoderDescription
from parallel.errors import ConfigError, UnsupportedModelError
from parallel.families.baichuan import BAICHUAN
from parallel.families.bloom import BLOOM
from parallel.families.cohere import COHERE
from parallel.families.cohere2 import COHERE2
from parallel.families.deepseek_v2 import DEEPSEEK_V2
from parallel.families.deepseek_v3 import DEEPSEEK_V3
from parallel.families.falcon import FALCON
from parallel.families.family import Family
from parallel.families.fields import Fields, read_json_object
from parallel.families.gemma import GEMMA
from parallel.families.gemma2 import GEMMA2
from parallel.families.gemma3 import GEMMA3, GEMMA3_TEXT
from parallel.families.glm4 import GLM4
from parallel.families.gpt2 import GPT2
from parallel.families.gpt_neox import GPT_NEOX
from parallel.families.gpt_oss import GPT_OSS
from parallel.families.gptj import GPTJ
from parallel.families.granite import GRANITE
from parallel.families.internlm2 import INTERNLM2
from parallel.families.llama import LLAMA
from parallel.families.mistral import MINISTRAL, MISTRAL
from parallel.families.mixtral import MIXTRAL
from parallel.families.mpt import MPT
from parallel.families.olmo2 import OLMO2
from parallel.families.opt import OPT
from parallel.families.phi import PHI
from parallel.families.phi3 import PHI3
from parallel.families.qwen2 import QWEN2
from parallel.families.qwen2_moe import QWEN2_MOE
from parallel.families.qwen3 import QWEN3
from parallel.families.qwen3_moe import QWEN3_MOE
from parallel.families.stablelm import STABLELM
from parallel.families.starcoder2 import STARCODER2

_ALL = (
    LLAMA,
    MISTRAL,
    MINISTRAL,
    QWEN2,
    QWEN3,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GEMMA3_TEXT,
    PHI,
    PHI3,
    GPT2,
    GPT_NEOX,
    GPTJ,
    OPT,
    BLOOM,
    MPT,
    FALCON,
    STARCODER2,
    STABLELM,
    COHERE,
    COHERE2,
    OLMO2,
    GRANITE,
    GLM4,
    INTERNLM2,
    BAICHUAN,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GPT_OSS,
)

FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _ALL}


def describe_model(folder: Path) -> DecoderDescription:
    """Read the config.json of a model folder.

    Raises:
        ConfigError: the file is missing, unreadable or contradicts itself.
        UnsupportedModelError: its family, or something that it asks for, is not known.
    """
    file = folder / "config.json"
    return describe_config(read_json_object(file), source=str(file))


def describe_config(config: Mapping[str, Any], *, source: str) -> DecoderDescription:
    """Read a config that is already parsed; `source` begins the message of every error, as in `describe_model`."""
    try:
        return _find_family(Fields(config)).describe(Fields(config))
    except (ConfigError, UnsupportedModelError) as error:
        raise type(error)(f"{source}: {error}") from error


def family_of(description: DecoderDescription) -> Family:
    """The family that read a description, with the names that checkpoints of this model have."""
    return FAMILIES[description.family].named_for(description)


def _find_family(fields: Fields) -> Family:
    model_type = fields.text("model_type")
    family = FAMILIES.get(model_type)
    if family is None:
        raise UnsupportedModelError(f"model_type is {model_type!r}; supported: {', '.join(sorted(FAMILIES))}")
    return family
