"""Stands in for an agent that Ray's node starts and waits for; a script of its own, which imports no package.

python -I -S late_agent.py never|asked COMMAND OF THE AGENT

A local Ray asks neither agent for anything: that of the dashboard has no dashboard, and that of runtime environments
makes none. Both import for seconds while everything else waits, and then keep their memory. So the first never begins
(its ports are said to be -1, as it does itself where Ray has no dashboard installed), and the second begins in the
place of this process when somebody connects to its port. Either ends with its node, whose pipe is its standard input.

What is not as expected here, in another Ray, say, makes the agent begin at once.
"""

import os
import select
import socket
import stat
import sys
from collections.abc import Mapping, Sequence

NEVER, ASKED = "never", "asked"
"""When the agent begins."""

_UNUSED_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
_PORT, _PORT_FLAG = "runtime_env_agent_port", "--runtime-env-agent-port"
_UNUSED_PORT_FLAG = "--grpc-port"


def main(begins: str, command: Sequence[str]) -> None:
    """Wait in the place of the agent, and become it."""
    flags = dict(word.split("=", 1) for word in command if word.startswith("--") and "=" in word)
    try:
        if not stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode):
            raise OSError("nothing would tell of the node's end")
        if begins == NEVER:
            _check_waits(flags, _UNUSED_PORT_FLAG)
            for name in _UNUSED_PORTS:
                _tell_port(flags, name, -1)
            sys.stdin.read()
            return
        port = _wait_asked(flags)
        if port is None:
            return
        command = [f"{_PORT_FLAG}={port}" if word.startswith(f"{_PORT_FLAG}=") else word for word in command]
    except (OSError, KeyError) as error:
        print(f"the agent begins at once: {error!r}", file=sys.stderr)
    os.execv(command[0], list(command))


def _wait_asked(flags: Mapping[str, str]) -> int | None:
    """Return the port that somebody has connected to, closed; None when the node has ended before."""
    _check_waits(flags, _PORT_FLAG)
    with socket.create_server((flags["--node-ip-address"], 0)) as listener:
        port: int = listener.getsockname()[1]
        _tell_port(flags, _PORT, port)
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        return port if listener in ready else None


def _check_waits(flags: Mapping[str, str], port_flag: str) -> None:
    """Raise OSError where Ray's node does not wait to be told a port, which it then has given to others already."""
    if flags[port_flag] != "0":
        raise OSError(f"{port_flag} is {flags[port_flag]}; expected: 0")


def _tell_port(flags: Mapping[str, str], name: str, port: int) -> None:
    """Write the port where Ray's node looks for it, all at once."""
    path = os.path.join(flags["--session-dir"], f"{name}_{flags['--node-id']}")
    with open(f"{path}.tmp", "w") as file:
        file.write(str(port))
    os.rename(f"{path}.tmp", path)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
