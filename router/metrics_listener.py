"""The HTTP listener from which Prometheus reads what a router or a rank counts."""

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.registry import Collector
from weft.addresses import join_host_port

from router.errors import RouterConfigError


class MetricsListener:
    """Serves a registry over HTTP from a thread of its own."""

    def __init__(self, host: str, port: int = 0, registry: CollectorRegistry | None = None) -> None:
        """Bind and start; port 0 is any free one, and without a registry there is nothing to tell yet.

        Raises:
            RouterConfigError: the port is taken, or the address is not this machine's.
        """
        self._registry = registry or CollectorRegistry()
        try:
            self._server, self._thread = start_http_server(port, host, self._registry)
        except OSError as error:
            address = join_host_port(host, port)
            raise RouterConfigError(f"metrics cannot listen on {address}: {error.strerror}") from error
        self.address = join_host_port(host, self._server.server_port)

    def add(self, collector: Collector) -> None:
        """Serve what this collector tells too."""
        self._registry.register(collector)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
