"""The parent's side of `child.py`."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.forked import Forked, forked
from tests.kv_transfer.pools import GROUPS

ROOT = Path(__file__).parents[2]
ANSWER_S = 60.0


class ChildError(Exception):
    """A TransferError of the child; `kind` is its class."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class ChildHandle:
    def __init__(self, process: Forked | Process) -> None:
        self.process = process
        self.incarnation = 0
        self.metadata = b""

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    async def ask(self, method: str, *arguments: Any) -> Any:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write((json.dumps([method, *arguments]) + "\n").encode())
        line = await asyncio.wait_for(self.process.stdout.readline(), ANSWER_S)
        if not line:
            raise AssertionError(f"the child ended: {await self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise ChildError(answer["error"], answer["message"])
        return answer["result"]

    async def connect(self, other: "ChildHandle") -> int:
        peer: int = await self.ask("connect", other.incarnation, other.metadata.hex())
        return peer

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def stopped(self) -> None:
        """Until the child is stopped, by us or by itself."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        async with asyncio.timeout(ANSWER_S):
            while stat.read_text().rpartition(")")[2].split()[0] != "T":
                await asyncio.sleep(0.002)


@asynccontextmanager
async def child(
    name: str,
    seed: int | None = None,
    *,
    groups: tuple[tuple[int, int], ...] = GROUPS,
    secret: str = "",
    memory: str = "cpu",
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> AsyncIterator[ChildHandle]:
    """With its connector open. Killed at the end, with a process that it runs under."""
    words = json.dumps([name, groups, seed, secret, memory])
    module = "tests.kv_transfer.child"
    start = (
        _under(prefix, module, words) if prefix else forked(module, words, environment=environment)
    )
    async with start as process:
        handle = ChildHandle(process)
        handle.incarnation, metadata = await handle.ask("open")
        handle.metadata = bytes.fromhex(metadata)
        yield handle


@asynccontextmanager
async def _under(prefix: Sequence[str], module: str, words: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *(*prefix, sys.executable, "-m", module, words),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
