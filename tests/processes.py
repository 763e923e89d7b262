"""Child processes that say one line when they are ready."""

import asyncio
import contextlib
import os
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]


@asynccontextmanager
async def python(*words: str, **environment: str) -> AsyncIterator[tuple[Process, str]]:
    """The process and its first line; killed at the end if it runs still."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *words,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        async with asyncio.timeout(60):
            line = await child.stdout.readline()
        yield child, line.decode().strip()
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
