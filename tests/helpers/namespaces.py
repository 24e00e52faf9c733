"""Several hosts on one machine, for a test: each has its own network, processes, home folder and ssh server.

Nothing of the machine's own network is touched: hosts hang on a bridge that lies in a namespace of its own.
"""

import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

SUBNET = "10.97.0"
_START_TIMEOUT_S = 10.0
_BRIDGE = "weft-net"


def require_namespaces() -> None:
    """Skip the test where hosts cannot be made, and say what is missing."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to make namespaces")
    for tool in ("sshd", "ssh", "ssh-keygen", "rsync", "ip", "unshare", "nsenter", "flock"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool} (Debian packages openssh-server, rsync, iproute2, procps)")
    try:
        _run("ip", "netns", "add", "weft-probe")
        _run("ip", "netns", "exec", "weft-probe", "unshare", "--pid", "--fork", "--mount-proc", "--uts", "true")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"may not make namespaces: {error.stderr.strip()}")
    finally:
        subprocess.run(["ip", "netns", "del", "weft-probe"], capture_output=True)


class Bridge:
    """The network between the hosts. Close it after them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _run("ip", "netns", "add", _BRIDGE)
        _inside(_BRIDGE, "ip", "link", "add", "bridge", "type", "bridge")
        _inside(_BRIDGE, "ip", "addr", "add", f"{SUBNET}.254/24", "dev", "bridge")
        _inside(_BRIDGE, "ip", "link", "set", "bridge", "up")
        self.private_key = folder / "key"
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.private_key))

    def close(self) -> None:
        """Take the network away."""
        _run("ip", "netns", "del", _BRIDGE)


class Host:
    """One machine with a running ssh server, into which root may log in with the bridge's key."""

    def __init__(self, bridge: Bridge, number: int) -> None:
        """Boot it. Its address ends in the number."""
        self.address = f"{SUBNET}.{number}"
        self.home = bridge.folder / f"h{number}"
        self._network = f"weft-h{number}"
        self._process: subprocess.Popen[bytes] | None = None
        self._join(bridge, number)
        self._boot(bridge)

    def run(self, *command: str, timeout_s: float = 60.0, **environment: str) -> str:
        """Run a command on the host as root; return what it prints."""
        return _run(*self.command(*command, **environment), timeout_s=timeout_s)

    def command(self, *command: str, **environment: str) -> list[str]:
        """Return what runs a command on the host, for Popen."""
        assert self._process is not None
        init = _only_child(self._process.pid)
        settings = [f"HOME={self.home}", *(f"{name}={value}" for name, value in environment.items())]
        return ["nsenter", f"--target={init}", "--all", "env", *settings, *command]

    def kill(self) -> None:
        """Cut its cable and switch it off: nobody hears from it again."""
        if self._process is None:
            return
        _inside(self._network, "ip", "link", "set", "eth0", "down")
        self._process.kill()  # its first process dies with it, and with that one everything on the host
        self._process.wait()
        self._process = None

    def close(self) -> None:
        """Switch it off and take it away."""
        self.kill()
        _run("ip", "netns", "del", self._network)

    def _join(self, bridge: Bridge, number: int) -> None:
        _run("ip", "netns", "add", self._network)
        cable = f"weft{number}"
        _inside(_BRIDGE, "ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", self._network)
        _inside(_BRIDGE, "ip", "link", "set", cable, "master", "bridge", "up")
        for change in (
            ("addr", "add", f"{self.address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
            ("route", "add", "default", "via", f"{SUBNET}.254"),  # by which Ray finds the host's own address
        ):
            _inside(self._network, "ip", *change)

    def _boot(self, bridge: Bridge) -> None:
        self.home.mkdir()
        (self.home / ".bashrc").touch()
        (self.home / "authorized_keys").write_text(bridge.private_key.with_suffix(".pub").read_text())
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.home / "host_key"))
        users = [
            line for line in Path("/etc/passwd").read_text().splitlines() if not line.startswith(("root:", "sshd:"))
        ]
        users += [f"root:x:0:0:root:{self.home}:/bin/bash", "sshd:x:65533:65534::/run/sshd:/usr/sbin/nologin"]
        (self.home / "passwd").write_text("\n".join(users) + "\n")
        (self.home / "sshd_config").write_text(
            f"HostKey {self.home}/host_key\nAuthorizedKeysFile {self.home}/authorized_keys\nPidFile none\n"
            "StrictModes no\nUsePAM no\nPermitRootLogin yes\nAcceptEnv RAY_*\n"
        )
        Path("/tmp/ray").mkdir(exist_ok=True)  # a place to mount on; the host has a /tmp/ray of its own
        script = f"""
            set -e
            mount -t tmpfs tmpfs /run && mkdir /run/sshd
            mount -t tmpfs tmpfs /tmp/ray
            mount -t tmpfs -o size=512m tmpfs /dev/shm
            mount --bind {self.home}/passwd /etc/passwd
            hostname {self._network}
            exec {shutil.which("sshd")} -D -f {self.home}/sshd_config -E {self.home}/sshd.log
        """
        unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--uts"]
        self._process = subprocess.Popen(["ip", "netns", "exec", self._network, *unshare, "bash", "-c", script])
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while subprocess.run(
            ["ip", "netns", "exec", _BRIDGE, "bash", "-c", f"exec 3<>/dev/tcp/{self.address}/22"], capture_output=True
        ).returncode:
            assert time.monotonic() < deadline_s, f"no sshd: {(self.home / 'sshd.log').read_text()}"
            assert self._process.poll() is None, f"{self._network} did not boot"
            time.sleep(0.05)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Three machines with nothing but ssh, and the operator's, who has the key to them."""

    machines: list[Host]
    operator: Host
    private_key: Path


def _only_child(pid: int) -> int:
    """`unshare --fork` stays outside; its child is the first process of the host."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def _inside(network: str, *command: str) -> str:
    return _run("ip", "netns", "exec", network, *command)


def _run(*command: str, timeout_s: float = 30.0) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    result.check_returncode()
    return result.stdout
