"""Command R7B and Command A: Command R with sliding windows in most layers; those that see everything do not rotate."""

from dataclasses import replace

from parallel.description import DecoderDescription
from parallel.families.cohere import describe_side_by_side
from parallel.families.common import periodic_layer_types, read_layer_types, windows_of
from parallel.families.family import LLAMA_MODULE_NAMES, Family
from parallel.families.fields import Fields
from parallel.families.rope import Rope

_ROPE = Rope(is_interleaved=True)


def describe(fields: Fields) -> DecoderDescription:
    """Read a Command R7B config."""
    description = describe_side_by_side(fields, _ROPE)
    kinds = read_layer_types(fields) or periodic_layer_types(
        description.num_layers, fields.integer("sliding_window_pattern", 4)
    )
    windows = windows_of(kinds, fields.limit("sliding_window", 4096))
    rotaries = tuple(
        None if window is None else rotary for window, rotary in zip(windows, description.rotaries, strict=True)
    )
    return replace(description, sliding_windows=windows, rotaries=rotaries)


COHERE2 = Family(model_type="cohere2", describe=describe, module_names=LLAMA_MODULE_NAMES)
