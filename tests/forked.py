"""Processes forked from one that has imported all that they run, which takes most of a start.

What is forked runs a module's `main`, and is talked to, killed, stopped and waited for as if it
had been started by itself. Nothing of ours has a thread before the fork.
"""

import asyncio
import atexit
import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.processes import ROOT, START_S


class Origin(NamedTuple):
    """What is forked from: a process with these modules, which read this when they are imported."""

    imported: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()


# torch most of all; not nixl, which must find its environment when it is loaded
ENGINE = Origin(
    (
        "cluster.cli",
        "cluster.commands.worker",
        "decode_worker.worker",
        "engine.compile_ahead",
        "engine.engine",
        "engine.grammar.table",
        "engine.kernels.cpu.kernels",
        "engine.sampler.cpu",
        "kv_transfer.collective_connector",
        "encodings.idna",  # and what else uvicorn loads when it begins
        "uvicorn.lifespan.off",
        "uvicorn.protocols.websockets.auto",
    )
)
BEFORE_IMPORTS = {
    "OPENBLAS_NUM_THREADS": "1",  # or numpy starts threads
    "GRPC_VERBOSITY": "ERROR",  # as our command has it
}
MOST_BYTES = 1 << 16  # of a request


class Forked:
    """As asyncio's `Process` is used, with pipes to its standard input and output."""

    def __init__(self, stdout: asyncio.StreamReader, stdin: asyncio.StreamWriter) -> None:
        self.stdout, self.stdin = stdout, stdin
        self.pid = 0
        self.returncode: int | None = None

    async def follow(self, news: socket.socket) -> None:
        """Returns when it runs."""
        reader, self._news = await asyncio.open_unix_connection(sock=news)
        self.pid = int(await reader.readline())
        self._end = asyncio.ensure_future(self._follow_end(reader))

    async def _follow_end(self, reader: asyncio.StreamReader) -> int:
        self.returncode = int(await reader.readline())
        self._news.close()
        return self.returncode

    async def wait(self) -> int:
        return await asyncio.shield(self._end)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@asynccontextmanager
async def forked(
    module: str,
    *words: str,
    log: Path | None = None,
    environment: Mapping[str, str] | None = None,
    origin: Origin = ENGINE,
) -> AsyncIterator[Forked]:
    """`python -m module` with these words; killed at the end if it runs still. `log`: takes its
    standard error."""
    ours, theirs = socket.socketpair()
    news, says = socket.socketpair()
    request = json.dumps([module, words, dict(environment or {})]).encode()
    with theirs, says, contextlib.ExitStack() as stack:
        errors = sys.__stderr__ if log is None else stack.enter_context(log.open("ab"))
        assert errors is not None
        given = [theirs.fileno(), errors.fileno(), says.fileno()]
        socket.send_fds(_socket_of(origin), [request], given)
    child = Forked(*await asyncio.open_unix_connection(sock=ours))
    await child.follow(news)
    try:
        yield child
    finally:
        child.kill()
        await child.wait()
        child.stdin.close()


def run_forked(
    module: str, *words: str, environment: Mapping[str, str], origin: Origin
) -> "subprocess.CompletedProcess[str]":
    """As `subprocess.run` does it."""

    async def run() -> "subprocess.CompletedProcess[str]":
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            start = forked(module, *words, log=log, environment=environment, origin=origin)
            async with start as child:
                said = (await child.stdout.read()).decode()
                status = await child.wait()
            return subprocess.CompletedProcess([module, *words], status, said, log.read_text())

    return asyncio.run(run())


async def first_line(child: Forked, log: Path) -> str:
    """Of its standard output; `log` is what it says where there is none."""
    async with asyncio.timeout(START_S):
        line = await child.stdout.readline()
    assert line, log.read_text()
    return line.decode().strip()


@cache
def _socket_of(origin: Origin) -> socket.socket:
    """To the process that forks them, one for all tests of ours."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.Popen(
            [sys.executable, "-m", "tests.forked", str(theirs.fileno()), *origin.imported],
            cwd=ROOT,
            env={**os.environ, **BEFORE_IMPORTS, **dict(origin.environment)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    atexit.register(ours.close)
    return ours


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    if "numba" in sys.modules:
        from numba.core.registry import cpu_target

        cpu_target.typing_context.refresh()  # what numba loads when it compiles first
        cpu_target.target_context.refresh()
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would be missing in who is forked"
    gc.freeze()  # so that pages stay shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for who watches
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, MOST_BYTES, 3)
        if not request:
            return
        if not os.fork():
            requests.close()
            _watch(*json.loads(request), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _watch(
    module: str, words: list[str], environment: dict[str, str], pipe: int, err: int, news: int
) -> None:
    """Says the process's number, and how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if not pid:
        for number, descriptor in enumerate((pipe, pipe, err)):
            os.dup2(descriptor, number)
        for descriptor in (pipe, err, news):
            os.close(descriptor)
        os.environ.update(environment)
        sys.argv = [module, *words]
        sys.exit(importlib.import_module(module).main())
    os.close(pipe)
    os.close(err)
    os.write(news, b"%d\n" % pid)
    _, status = os.waitpid(pid, 0)
    os.write(news, b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


if __name__ == "__main__":
    main()
