"""How far a run is, on one line of a terminal."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TextIO

from cluster.bench.answer import Tally
from cluster.bench.connection import Clock

_EVERY_S = 0.25
_BAR = 24


def line(tally: Tally, share: float | None, chunks_per_s: float) -> str:
    done = 0 if share is None else round(_BAR * min(1.0, share))
    bar = "" if share is None else f"[{'#' * done}{'.' * (_BAR - done)}] "
    failed = f", {tally.num_failed:,} FAILED" if tally.num_failed else ""
    under_way = tally.num_sent - tally.num_ended
    return (
        f"{bar}{tally.num_ended:,} answered{failed}, {under_way:,} under way, "
        f"{chunks_per_s:,.0f} chunks/s"
    )


@asynccontextmanager
async def shown(
    tally: Tally,
    stream: TextIO,
    clock: Clock,
    num_requests: int | None,
    duration_s: float | None,
) -> AsyncIterator[None]:
    """Shows nothing where there is no terminal."""
    if not stream.isatty():
        yield
        return
    showing = asyncio.create_task(_show(tally, stream, clock, num_requests, duration_s))
    try:
        yield
    finally:
        showing.cancel()
        _write(stream, "\r\x1b[K")


async def _show(
    tally: Tally,
    stream: TextIO,
    clock: Clock,
    num_requests: int | None,
    duration_s: float | None,
) -> None:
    start_s = before_s = clock()
    num_before = 0
    while True:
        await asyncio.sleep(_EVERY_S)
        now = clock()
        shares = [
            *([tally.num_ended / num_requests] if num_requests else []),
            *([(now - start_s) / duration_s] if duration_s else []),
        ]
        rate = (tally.num_chunks - num_before) / (now - before_s)
        before_s, num_before = now, tally.num_chunks
        told = line(tally, max(shares, default=None), rate)
        _write(stream, "\r" + told[: _columns(stream)] + "\x1b[K")


def _columns(stream: TextIO) -> int | None:
    """That a line may have: of a longer one each would begin where the last part of the one before
    stands, and fill the screen."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except OSError:
        return None
    return columns - 1 if columns > 1 else None


def _write(stream: TextIO, text: str) -> None:
    """Dropped where the terminal has gone: what was measured is worth more."""
    with suppress(OSError):
        stream.write(text)
        stream.flush()
