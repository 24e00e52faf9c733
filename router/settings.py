"""What may be set of a router beyond its ports and names: a section of settings, of the router's own dataclasses.

A cluster's file has it in its section `router` (cluster/config.py), and `python -m router` takes it as JSON.
"""

import json

from pydantic import BaseModel, ConfigDict, ValidationError

from router.config import (
    AdmissionConfig,
    BreakerConfig,
    ClientConfig,
    FailoverConfig,
    LinkConfig,
    MessageBytes,
    MetricsConfig,
    NumThreads,
    PrefixPolicyConfig,
)
from router.config_faults import check_sizes, describe_faults
from router.errors import RouterConfigError


class Section(BaseModel):
    """A mapping of settings: unknown keys are refused, and nothing is coerced."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class RouterSettings(Section):
    """Settings that all routers of a service share."""

    max_message_bytes: MessageBytes = 4 << 20
    tokenizer_threads: NumThreads = 2
    admission: AdmissionConfig = AdmissionConfig()
    clients: ClientConfig = ClientConfig()
    prefix: PrefixPolicyConfig = PrefixPolicyConfig()
    breaker: BreakerConfig = BreakerConfig()
    link: LinkConfig = LinkConfig()
    failover: FailoverConfig = FailoverConfig()
    metrics: MetricsConfig = MetricsConfig()


def parse_settings(text: str) -> RouterSettings:
    """Read a JSON object. Raises RouterConfigError naming every fault by its dotted path."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise RouterConfigError(f"{text!r} is not JSON: {error}; allowed: an object of settings") from error
    if not isinstance(data, dict):
        raise RouterConfigError(f"{text!r} is a {type(data).__name__}; allowed: an object of settings")
    check_sizes(data, RouterConfigError)
    try:
        settings = RouterSettings.model_validate_json(text)
    except ValidationError as error:
        raise RouterConfigError(describe_faults(RouterSettings, error)) from error
    if settings.link.tls is not None:
        raise RouterConfigError("link.tls: given; allowed: --inner-tls-cert, --inner-tls-key and --inner-tls-ca")
    return settings
