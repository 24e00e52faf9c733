"""One line of JSON in the router's log for each request that ended: what the metrics say of all, for each."""

import logging

import msgspec

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)  # whatever --log-level says of all else: a setting asks for these lines


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How one request went. The tokens of those with the result `met` add up to the goodput."""

    request_id: str
    """Empty where the client sent none and the router had no reason to make one."""
    model: str
    """Empty: the request names no model that is served."""
    tenant: str
    outcome: str
    result: str | None
    """met, ttft_missed, tpot_missed or failed, by its targets; None: its client ended it, or never began it well."""
    prompt_tokens: int
    """0 where another choice of the same prompt counts it, as are `cached_tokens`."""
    cached_tokens: int
    generation_tokens: int
    ttft_s: float | None
    """From its arrival to its first token; None: there was none."""
    tpot_s: float | None
    """Mean time of each further token; None with fewer than two."""
    e2e_s: float
    """From its arrival to its end."""
    target_ttft_s: float
    """The request's own, or else the model's, or the router's."""
    target_tpot_s: float


def log_request(record: RequestRecord) -> None:
    """Write the line; times are as exact as they were compared."""
    logger.info("request ended: %s", msgspec.json.encode(record).decode())
