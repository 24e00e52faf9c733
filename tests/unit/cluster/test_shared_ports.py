"""A port for several routers is taken from everybody else, and only then shared."""

import socket
from collections.abc import Iterator

import pytest

from cluster.errors import StartError
from cluster.shared_ports import SharedPort

HOST = "127.0.0.1"


def listen(port: int, *, shares: bool) -> socket.socket:
    """Listen as router/app.py does, and gRPC."""
    bound = socket.socket()
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shares))
        bound.bind((HOST, port))
        bound.listen()
    except OSError:
        bound.close()
        raise
    return bound


@pytest.fixture
def held() -> Iterator[SharedPort]:
    port = SharedPort("router.port", HOST, 0)
    yield port
    port.close()


def test_any_free_port_becomes_one_on_which_several_listen(held: SharedPort) -> None:
    with listen(held.port, shares=True), listen(held.port, shares=True):
        pass


@pytest.mark.parametrize("num_listeners", [0, 1, 2])
def test_nobody_else_gets_a_port_that_is_held(held: SharedPort, num_listeners: int) -> None:
    listeners = [listen(held.port, shares=True) for _ in range(num_listeners)]
    with pytest.raises(OSError, match="in use"):
        listen(held.port, shares=False)
    with pytest.raises(StartError, match=rf"^router\.port: {held.port} on {HOST} is taken; allowed: a free port"):
        SharedPort("router.port", HOST, held.port)
    for listener in listeners:
        listener.close()


@pytest.mark.parametrize("shares", [True, False])
def test_port_of_another_program_is_not_shared_though_that_would(shares: bool) -> None:
    with listen(0, shares=shares) as other, pytest.raises(StartError, match="is taken"):
        SharedPort("router.port", HOST, other.getsockname()[1])


def test_listeners_keep_the_port_when_it_is_let_go(held: SharedPort) -> None:
    with listen(held.port, shares=True):
        held.close()
        with pytest.raises(StartError):
            SharedPort("router.port", HOST, held.port)
        listen(held.port, shares=True).close()


def test_port_is_free_again_though_connections_have_just_ended(held: SharedPort) -> None:
    with listen(held.port, shares=True) as listener, socket.create_connection((HOST, held.port)) as client:
        accepted, _ = listener.accept()
        accepted.close()  # first: its side of the connection stays for a while
        assert client.recv(1) == b""
    held.close()
    SharedPort("router.port", HOST, held.port).close()
