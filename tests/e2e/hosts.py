"""Hosts inside this one: each has its own processes, network, files under /tmp and name, and
shares nothing but one cable with the others. Needs root, unshare, nsenter and ip.

A host lives as long as its first process: when that ends the kernel ends all others in it, and
takes down its mounts and its interfaces. Nothing is left on the machine.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).parents[2]
NETWORK = "198.18.5"  # for tests between networks, by RFC 2544
HOME = "/tmp/home"
# The first process of a host: whoever loses their parent becomes its child, and is reaped by
# the kernel since it ignores SIGCHLD.
_FIRST = rf"""
mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm && mkdir {HOME} && hostname "$0"
sed '/^root:/s|:[^:]*:\([^:]*\)$|:{HOME}:\1|' /etc/passwd > /tmp/passwd
mount --bind /tmp/passwd /etc/passwd
ip link set lo up && echo up && exec env --ignore-signal=CHLD sleep infinity
"""
_APART = ["--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "--mount-proc", "--kill-child"]


class Host:
    """Ends when closed, with all that runs in it."""

    def __init__(self, name: str) -> None:
        self.name = name
        # Also if whoever made it is killed.
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", *_APART, "sh", "-c", _FIRST, name]
        self._unshare = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._unshare.stdout is not None
        assert self._unshare.stdout.readline() == "up\n", f"{name}: no namespaces; are you root?"
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children")
        self.pid = int(children.read_text())

    def words(self, *command: str, **environment: str) -> list[str]:
        """What runs the command there."""
        there = {"HOME": HOME, **environment}
        said = [f"{name}={value}" for name, value in there.items()]
        return ["nsenter", "-t", str(self.pid), "-a", f"--wd={ROOT}", "env", *said, *command]

    def run(self, *command: str, timeout_s: float = 60, **environment: str) -> str:
        """What it said; CalledProcessError if it failed."""
        words = self.words(*command, **environment)
        done = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s
        )
        if done.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(command)}: {done.stdout}")
        return done.stdout

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        words = self.words(*command, **environment)
        pipe = subprocess.PIPE
        return subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True)

    def write(self, path: str, text: str, mode: str = "600") -> None:
        script = f'mkdir -p "$(dirname {path})" && cat > {path} && chmod {mode} {path}'
        subprocess.run(self.words("sh", "-c", script), input=text, text=True, check=True)

    def close(self) -> None:
        self._unshare.kill()  # and its child with it
        self._unshare.wait()


class Lan:
    """Hosts on one switch, which can lose sight of one of them without that one's noticing."""

    def __init__(self, names: Sequence[str]) -> None:
        self._switch = Host("switch")
        self.hosts: list[Host] = []
        try:
            self._on_switch("add", "lan", "type", "bridge")
            self._on_switch("set", "lan", "up")
            for number, name in enumerate(names, 1):
                self._plug_in(Host(name), number)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def address(self, host: Host) -> str:
        return f"{NETWORK}.{self.hosts.index(host) + 1}"

    def cut(self, host: Host) -> None:
        """Its interface stays up, and what is sent to it or by it is lost."""
        self._on_switch("set", self._port(host), "nomaster")

    def mend(self, host: Host) -> None:
        self._on_switch("set", self._port(host), "master", "lan")

    def close(self) -> None:
        for host in (*self.hosts, self._switch):
            host.close()

    def _plug_in(self, host: Host, number: int) -> None:
        self.hosts.append(host)
        port = self._port(host)
        link = ["ip", "link", "add", port, "type", "veth", "peer", "name", "eth0"]
        # From the switch's network, but with this machine's numbers of processes.
        inside = ["nsenter", "-t", str(self._switch.pid), "--net"]
        subprocess.run([*inside, *link, "netns", str(host.pid)], check=True)
        self._on_switch("set", port, "master", "lan", "up")
        host.run("ip", "address", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        # Nobody is there; Ray takes the address that leads out of the network for the node's.
        host.run("ip", "route", "add", "default", "via", f"{NETWORK}.254")

    def _port(self, host: Host) -> str:
        return f"port{self.hosts.index(host) + 1}"

    def _on_switch(self, *words: str) -> None:
        self._switch.run("ip", "link", *words)
