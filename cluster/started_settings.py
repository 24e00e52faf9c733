"""What a service was started with, as its controller is given it: in JSON, not as values of one version of the code.

Ray keeps it for all lives of the controller, and later ones may run other code.
"""

from dataclasses import replace
from typing import Any

import msgspec

from cluster.config import ClusterSpec, build_spec
from cluster.errors import ClusterConfigError


class _Started(msgspec.Struct, kw_only=True):
    file: dict[str, Any]
    """As the user gave them."""
    checked: dict[str, Any]
    """The same with absolute paths, as preflight.py found them."""


def encode_spec(spec: ClusterSpec) -> bytes:
    """Return the settings of a spec, but for the keys of its models' hashes, which each life makes anew."""
    router = spec.file.router.model_copy(update={"tls": spec.router.tls, "api_keys": spec.router.api_keys})
    checked = spec.file.model_copy(
        update={
            "models": tuple(model.section for model in spec.models),
            "router": router,
            "ray": spec.file.ray.model_copy(update={"spare_s": spec.spare_s}),
        }
    )
    return msgspec.json.encode(
        _Started(file=spec.file.model_dump(mode="json"), checked=checked.model_dump(mode="json"))
    )


def decode_spec(data: bytes) -> ClusterSpec:
    """Return the spec. Raises ClusterConfigError where this code does not take the settings, or did not write them."""
    try:
        started = msgspec.json.decode(data, type=_Started)
    except (TypeError, msgspec.DecodeError) as error:
        raise ClusterConfigError(f"no settings that this version can read: {error}") from error
    return replace(build_spec(started.checked), file=build_spec(started.file).file)
