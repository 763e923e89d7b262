"""Reading what clients send: on the event loop where it is short, beside it where others would wait
for its end."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

# Reading and tokenising this much takes a millisecond or two.
_SHORT_BYTES = 8 << 10

T = TypeVar("T")


async def off_loop(work: Callable[[], T], num_bytes: int) -> T:
    """`num_bytes`: what `work` has to read."""
    if num_bytes <= _SHORT_BYTES:
        return work()
    return await asyncio.to_thread(work)
