"""The HTTP listener from which Prometheus reads what a router or a rank counts."""

import threading
from collections.abc import Iterable
from contextlib import suppress
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.registry import Collector
from weft.addresses import family_of, join_host_port

from router.errors import RouterConfigError

IDLE_TIMEOUT_S = 10.0
"""A connection from which nothing comes for so long is closed: each has a thread."""


class MetricsListener:
    """Serves a registry over HTTP from threads of its own."""

    def __init__(self, host: str, port: int = 0, registry: CollectorRegistry | None = None) -> None:
        """Bind and start; port 0 is any free one, and without a registry there is nothing to tell yet.

        Raises:
            RouterConfigError: the port is taken, or the address is not this machine's.
        """
        self._registry = registry or CollectorRegistry()
        try:
            self._server = _Server(host, port)
        except OSError as error:
            address = join_host_port(host, port)
            raise RouterConfigError(f"metrics cannot listen on {address}: {error.strerror}") from error
        self._server.set_app(_answering_head(make_wsgi_app(self._registry)))
        self.address = join_host_port(host, self._server.server_port)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def add(self, collector: Collector) -> None:
        """Serve what this collector tells too."""
        self._registry.register(collector)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _answering_head(app: WSGIApplication) -> WSGIApplication:
    """Answer HEAD too, by which some clients look whether there is a page: Prometheus' application refuses it, with a
    body that is not allowed there."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "HEAD":
            return app(environ, start_response)
        body = app(environ | {"REQUEST_METHOD": "GET"}, start_response)
        return (part[:0] for part in body)  # a list would be counted, and told as the page's length

    return answer


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        self.address_family = family_of(host)
        super().__init__((host, port), _Handler)


class _Handler(WSGIRequestHandler):
    timeout = IDLE_TIMEOUT_S

    def handle(self) -> None:
        with suppress(TimeoutError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        pass
