"""Other processes' pages, and all of them as one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from cluster.metrics.server import PATH
from protos.address import Address
from protos.errors import PlaneError

_MAX_BYTES = 8 << 20
_HEAD_END = b"\r\n\r\n"
_CHUNK = 1 << 16


async def scrape(address: str, timeout_s: float) -> bytes | None:
    """A page, None if it did not come in time or is none."""
    try:
        async with asyncio.timeout(timeout_s):
            answer = await _get(Address.parse(address))
    except (TimeoutError, OSError, PlaneError):
        return None
    head, end, body = answer.partition(_HEAD_END)
    is_page = end and head.startswith(b"HTTP/1.1 200 ") and body.startswith(b"# HELP ")
    return body if is_page else None


async def _get(address: Address) -> bytes:
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        request = f"GET {PATH} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
        writer.write(request.encode())
        chunks, num_bytes = [], 0
        while chunk := await reader.read(_CHUNK):
            num_bytes += len(chunk)
            if num_bytes > _MAX_BYTES:
                raise OSError(f"the page of {address} is larger than {_MAX_BYTES} bytes")
            chunks.append(chunk)
        return b"".join(chunks)
    finally:
        writer.close()


def merge(pages: Iterable[bytes]) -> bytes:
    """Each metric's samples together, as the format wants them; the first page's words about it
    count."""
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for page in pages:
        name, is_new = b"", False
        for line in page.splitlines():
            if line.startswith(b"# HELP "):
                name = line.split(b" ", 3)[2]
                is_new = name not in heads
                if is_new:
                    heads[name], samples[name] = [line], []
            elif line.startswith(b"# TYPE "):
                if is_new:
                    heads[name].append(line)
            elif line and name:
                samples[name].append(line)
    lines = [line for name in heads for line in (*heads[name], *samples[name])]
    return b"\n".join([*lines, b""])
