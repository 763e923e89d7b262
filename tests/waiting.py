"""Until something holds that nobody tells of."""

import asyncio
from collections.abc import Callable

MOST_S = 60.0


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(MOST_S):
        while not holds():
            await asyncio.sleep(0.001)
