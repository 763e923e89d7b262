"""An engine under measure in a process of its own, spoken to in JSON lines."""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]
ANSWER_S = 600.0  # the first start of a peer compiles its model


class ChildError(Exception):
    """The engine under measure died or went silent; the message ends with its last words."""


class Child:
    """Started when made; answers one order at a time; ends with `close`.

    Between orders it is stopped, with the processes it started: an engine that waits may spin,
    and the other one has its turn.
    """

    def __init__(self, command: list[str], environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        self._log_file = log.open("wb")
        self._pending = b""
        self.started = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log_file,
            start_new_session=True,
        )
        self.info = self._answer()
        self._signal(signal.SIGSTOP)

    @property
    def session(self) -> int:
        return self._process.pid

    def ask(self, workload: str, seed: int) -> dict[str, Any]:
        assert self._process.stdin
        self._signal(signal.SIGCONT)
        order = json.dumps({"workload": workload, "seed": seed}) + "\n"
        self._process.stdin.write(order.encode())
        self._process.stdin.flush()
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        assert self._process.stdin
        self._signal(signal.SIGCONT)
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._kill()
        self._log_file.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        deadline = time.monotonic() + ANSWER_S
        while b"\n" not in self._pending:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._process.stdout], [], [], left)[0]:
                self._fail(f"said nothing for {ANSWER_S:.0f} s")
            data = os.read(self._process.stdout.fileno(), 1 << 20)
            if not data:
                self._fail("ended")
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _fail(self, what: str) -> NoReturn:
        self._kill()
        tail = self._log.read_text(errors="replace").splitlines()[-30:]
        raise ChildError(f"{self._process.args!r} {what}\n" + "\n".join(tail))

    def _signal(self, number: signal.Signals) -> None:
        """To the process and those it started, which share its session."""
        os.killpg(self._process.pid, number)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
