"""The border between a load driver and the service that it loads: gRPC and HTTP implement it. Nothing is retried."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol as Interface

from bench.errors import BenchError
from bench.load.calls import Call
from bench.load.records import Usage
from router.tls import ClientTls

Received = Callable[[int], None]
"""Called when something of an answer comes: so many tokens, now."""


class Protocol(StrEnum):
    """Ways to ask a service."""

    GRPC = "grpc"
    HTTP = "http"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Which service, and how it is asked."""

    protocol: Protocol
    address: str
    """host:port for gRPC; a URL such as http://127.0.0.1:8000 for HTTP."""
    model: str = ""
    """Name of the model; may be left out where one is served."""
    api_key: str | None = None
    tls: ClientTls | None = None
    """With it gRPC speaks TLS; HTTP does where the URL says https."""
    timeout_s: float = 300.0
    """Limit of each request."""
    temperature: float = 0.0
    top_k: int | None = None
    """None, as below: what the service has by default."""
    top_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool = True
    """Generate as many tokens as were asked for, whatever the model says."""
    target_ttft_s: float | None = None
    """Sent with each request, as is the next; None: it is not, and the service's own target counts there."""
    target_tpot_s: float | None = None

    @property
    def sampling(self) -> dict[str, float]:
        """Return what is sent of how tokens are chosen, by the names that both protocols have for it."""
        names = "temperature", "top_k", "top_p", "repetition_penalty"
        chosen = {name: getattr(self, name) for name in names}
        return {name: value for name, value in chosen.items() if value is not None}

    @property
    def targets_s(self) -> dict[str, float]:
        """Return what is sent of the two targets, by the names that both protocols have for them."""
        targets = {"target_ttft_s": self.target_ttft_s, "target_tpot_s": self.target_tpot_s}
        return {name: value for name, value in targets.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model that answers."""

    name: str
    vocab_size: int | None
    """None: HTTP does not tell."""


class Sender(Interface):
    """A connection to a service, for one event loop."""

    async def find_model(self) -> ServedModel:
        """Return the model that answers; from then on requests name it.

        Raises BenchError when there is none, or the service cannot be reached.
        """

    async def send(self, call: Call, cache_salt: str, received: Received) -> Usage:
        """Send a request and wait for its end. Raises CallError."""


def choose_model(target: Target, names: Sequence[str]) -> str:
    """Return the model that is asked for, or the only one. Raises BenchError."""
    if target.model in names:
        return target.model
    if not target.model and len(names) == 1:
        return names[0]
    wanted = f"no model {target.model!r}" if target.model else "more than one model; say which with --model"
    raise BenchError(f"{target.address} serves {wanted if names else 'no model'}: {', '.join(names) or 'none'}")
