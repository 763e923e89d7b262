"""What is between two workers and may be cut, while both of them live."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

MOST_BYTES = 1 << 16


class Wire:
    """Whoever connects to its address speaks to the worker, but for what goes by a connector."""

    def __init__(self, far: str) -> None:
        self._far = far
        self._passes = asyncio.Event()
        self._passes.set()
        self._ends: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Both ends are told so, and nobody connects any more."""
        self._server.close()
        for writer in self._ends:
            writer.transport.abort()
        self._passes.set()

    def fall_silent(self) -> None:
        """Nobody is told anything; what is said is lost."""
        self._passes.clear()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self._far.rsplit(":", 1)
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        both = {writer, far_writer}
        self._ends |= both
        await asyncio.gather(self._carry(reader, far_writer), self._carry(far_reader, writer))
        self._ends -= both

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(MOST_BYTES):
                await self._passes.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


@asynccontextmanager
async def wire(far: str) -> AsyncIterator[Wire]:
    between = Wire(far)
    await between.open()
    try:
        yield between
    finally:
        between.cut()
