"""A part's process: started, waited for, ended when its time is over."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHILD = (sys.executable, "-m", "benchmarks.gpu.child")
TAIL_LINES = 4
KILLED_S = 5.0  # until a killed process is gone


class Running:
    """Writes what the process says to a file beside its results."""

    def __init__(
        self,
        name: str,
        folder: Path,
        limit_s: float,
        smoke: bool,
        command: tuple[str, ...] = CHILD,
    ) -> None:
        self.name = name
        self._path = folder / f"{name}.log"
        self._started = time.monotonic()
        self._limit_s = limit_s
        environment = dict(os.environ)
        if smoke and not Path("/dev/nvidia0").exists():
            environment["TRITON_INTERPRET"] = "1"
        arguments = [*command, name, str(folder), str(limit_s)] + ["--smoke"] * smoke
        with self._path.open("wb") as log:
            self._process = subprocess.Popen(
                arguments,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # ended with all that it started
            )

    def wait(self) -> str:
        """How it ended, in words that begin with `done` where all went well. Nothing that it has
        started is left, which the next part would share the card with."""
        try:
            left_s = self._limit_s - (time.monotonic() - self._started)
            code = self._process.wait(max(left_s, 0.0))
        except subprocess.TimeoutExpired:
            gone = "" if self.end() else ", and it is still there"
            return f"ended after {self._limit_s:.0f} s, its time was over{gone}"
        self.end()
        took_s = time.monotonic() - self._started
        if code == 0:
            return f"done in {took_s:.0f} s"
        tail = " / ".join(self.log().strip().splitlines()[-TAIL_LINES:])
        return f"FAILED with {code} after {took_s:.0f} s: {tail}"

    def end(self) -> bool:
        """Whether it is gone: a process that hangs in a driver stays, and nobody waits for that."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(KILLED_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def log(self) -> str:
        return self._path.read_text(errors="replace")
