"""deploy/serve.yaml as it is, by `serve run` on this machine and nothing else: it gets ready,
answers, and leaves no process after Ctrl-C.

python -m tests.e2e.serve_run    with nobody else on port 8000
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from tests.e2e.cluster import answers_at, http, marked
from tests.e2e.hosts import ROOT
from tests.e2e.ray_hosts import FRONT, settings, wait_until
from tests.e2e.telling import say

UP_S, GONE_S = 240.0, 30.0
_MARK = "KVRELAY_SERVE_RUN"
_COMMAND = [str(Path(sys.executable).parent / "serve"), "run", "deploy/serve.yaml"]


def main() -> None:
    socket.create_server(("127.0.0.1", 8000)).close()  # nobody else answers there
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        process = _start(log, mark, folder)
        try:
            up_s = wait_until(lambda: _is_up(process, log), UP_S, log.read_text)
            say(f"{FRONT}/ready is a 200 after {up_s:.0f} s")
            body = {"prompt": "def main():", "max_tokens": 8, "ignore_eos": True}
            answer = http.post(f"{FRONT}/v1/completions", json=body, timeout=60)
            answer.raise_for_status()
            say(answer.text)
            began = time.monotonic()
            os.killpg(process.pid, signal.SIGINT)
            status = process.wait(GONE_S)
            wait_until(lambda: not marked(f"{_MARK}={mark}"), GONE_S, lambda: _left(mark))
            say(f"status {status}, and no process is left {time.monotonic() - began:.1f} s later")
        finally:
            for pid in marked(f"{_MARK}={mark}"):
                os.kill(pid, signal.SIGKILL)
            process.wait()


def _start(log: Path, mark: str, folder: str) -> subprocess.Popen[bytes]:
    """Whatever Ray runs here already has files elsewhere, and is not joined."""
    environment = {**os.environ, **settings(), "PYTHONPATH": str(ROOT), "RAY_TMPDIR": folder}
    environment[_MARK] = mark
    for name in ("RAY_ADDRESS", "KVRELAY_SECRET"):
        environment.pop(name, None)
    with log.open("wb") as file:
        return subprocess.Popen(
            _COMMAND, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
        )


def _is_up(process: subprocess.Popen[bytes], log: Path) -> bool:
    if process.poll() is not None:
        raise RuntimeError(f"it has ended\n{log.read_text()}")
    return answers_at(FRONT)


def _left(mark: str) -> str:
    commands = (Path(f"/proc/{pid}/cmdline") for pid in marked(f"{_MARK}={mark}"))
    return "\n".join(path.read_text() for path in commands)


if __name__ == "__main__":
    main()
