"""Which tensors of a checkpoint nobody reads, although the layers that they belong to are served.

A config that has lost a field (`attention_bias`) describes a model without them, which loads and speaks worse. What a
checkpoint has beside those layers is no sign of that: towers for images, layers that predict further tokens.
"""

import re
from collections.abc import Iterable

_IN_LAYER = re.compile(r"(?P<layer>(?:.*?\.)?\d+)\.(?P<rest>.+)")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_BUFFER = re.compile(r"inv_freq$|(^|\.)(attn|attention)\.(bias|masked_bias)$")
"""What older versions of `transformers` saved although it is computed: frequencies, and the mask of the attention."""


def find_unread(read: Iterable[str], stored: Iterable[str]) -> list[str]:
    """Return the tensors of the layers of which any are read that are not.

    Args:
        read: the names of what one tensor-parallel rank reads. Others may read those of other experts and heads, which
            differ by a number.
        stored: the names of all that the checkpoint has.
    """
    known = {_place(name) for name in read}
    layers = {layer for layer, _ in known if layer}
    places = {name: _place(name) for name in stored if not _BUFFER.search(name)}
    return [name for name, place in places.items() if place[0] in layers and place not in known]


def _place(name: str) -> tuple[str, str]:
    """ "model.layers.3.mlp.experts.7.up_proj.weight" -> ("model.layers.3", "mlp.experts.*.up_proj.weight")."""
    match = _IN_LAYER.fullmatch(name)
    return ("", name) if match is None else (match["layer"], _NUMBER.sub("*", match["rest"]))
