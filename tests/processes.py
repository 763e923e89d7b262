"""Child processes that say one line when they are ready."""

import asyncio
import contextlib
import os
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
START_S = 150.0  # of a machine on which much else starts


@asynccontextmanager
async def python(
    *words: str, prefix: Sequence[str] = (), log: Path | None = None, **environment: str
) -> AsyncIterator[tuple[Process, str]]:
    """The process and its first line; killed at the end if it runs still. `prefix`: what it
    runs under. `log`: takes its standard error, which is to be read from the process without."""
    child = await asyncio.create_subprocess_exec(
        *prefix,
        sys.executable,
        *words,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if log is None else log.open("ab"),
    )
    try:
        assert child.stdout is not None
        async with asyncio.timeout(START_S):
            line = await child.stdout.readline()
        yield child, line.decode().strip()
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
