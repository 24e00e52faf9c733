"""Ports on which several routers of one service listen: taken from everybody else first, then shared.

The kernel divides the connections of a port among all listeners that set SO_REUSEPORT and are of one user, whatever
program they are. So a controller that starts such routers takes the ports as a single listener would, which fails
where anybody listens or has done this before, and only then lets others in: its routers.
"""

import socket

from weft.addresses import family_of

from cluster.errors import StartError


class SharedPort:
    """A port that is ours, for listeners with SO_REUSEPORT; taken from other programs until `close`."""

    def __init__(self, name: str, host: str, port: int) -> None:
        """Take a port; 0: any free one.

        Args:
            name: of the setting, for the error.
            host: address that the listeners bind.
            port: on which they listen.

        Raises:
            StartError: somebody has it.
        """
        family = family_of(host)
        self._socket = socket.socket(family)
        try:
            with socket.socket(family) as exclusive:
                exclusive.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                exclusive.bind((host, port))
                exclusive.listen()  # which also fails where another one only holds the port
                exclusive.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                self._hold(exclusive.getsockname())
        except OSError as error:
            self.close()
            raise StartError(f"{name}: {port} on {host} is taken; allowed: a free port, or 0 for any") from error
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Let the port go; those who listen keep it."""
        self._socket.close()

    def _hold(self, address: tuple[str, int]) -> None:
        """Bind without listening: no connection comes here."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have just ended
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._socket.bind(address)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # else others could bind beside it
