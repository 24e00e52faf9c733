"""Settings of a YAML file, as they go over a wire and through checks."""

import json
from collections.abc import Mapping
from typing import Any

from cluster.errors import ClusterConfigError


def settings_json(settings: Mapping[str, Any]) -> str:
    """Write them as JSON. Raises ClusterConfigError when they contain themselves, say."""
    try:
        return json.dumps(settings, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise ClusterConfigError(f"the settings cannot be written as JSON: {error}") from error
