"""Processes that serve, started for a measurement and ended after it."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from protos.port import reserved_port

ROOT = Path(__file__).parents[1]
READY_S = 600.0  # the first start of a peer compiles its model


class ServerError(Exception):
    """A server ended or never became ready; the message ends with its last words."""


class Server:
    """Ready when made; ended by `close`, with the processes it started."""

    def __init__(self, command: list[str], environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **environment},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for_line(self, word: str) -> str:
        """The first line of its output that has the word."""
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            lines = self._log.read_text(errors="replace").splitlines()
            if found := next((line for line in lines if word in line), None):
                return found
            self._check_alive()
            time.sleep(0.05)
        raise ServerError(f"no {word!r} within {READY_S:.0f} s{self._last_words()}")

    def wait_for_port(self, port: int) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            self._check_alive()
            time.sleep(0.05)
        raise ServerError(f"port {port} was not open within {READY_S:.0f} s{self._last_words()}")

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_alive(self) -> None:
        if self.process.poll() is not None:
            raise ServerError(f"{self.process.args!r} ended{self._last_words()}")

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-30:]
        return "\n" + "\n".join(lines)


def free_port() -> int:
    """Not of those that Linux gives out: what a server starts before it listens may get it."""
    with reserved_port("127.0.0.1") as port:
        return port


def module(*words: str) -> list[str]:
    return [sys.executable, "-m", *words]


def kvrelay(*words: str) -> list[str]:
    return module("cluster.cli", *words)
