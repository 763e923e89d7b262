"""What two processes cost that are linked and have nothing to do."""

import asyncio
import time

import pytest

from tests.kv_transfer.children import ChildHandle, child

MOST = 0.03  # of a core, both together
WINDOW_S = 0.5
PATIENCE_S = 30.0


@pytest.mark.parametrize("name", ["nixl", "socket"])
async def test_an_idle_pair_takes_less_than_three_percent_of_a_core(name: str) -> None:
    """Of processor time, of which a busy machine gives no more, and in some window: what else was
    begun before may have its end in another."""
    async with child(name, 1) as holder, child(name) as reader:
        peer = await reader.connect(holder)
        await reader.ask("read", peer, 0, [1, 2], [3, 4])
        shares: list[float] = []
        deadline = time.monotonic() + PATIENCE_S
        while not shares or (min(shares) >= MOST and time.monotonic() < deadline):
            shares.append(await share(holder, reader))
        assert min(shares) < MOST, shares


async def share(*pair: ChildHandle) -> float:
    """Of a core, for a while."""
    began, before = time.monotonic(), [await one.ask("cpu_s") for one in pair]
    await asyncio.sleep(WINDOW_S)
    spent_s = sum([await one.ask("cpu_s") for one in pair]) - sum(before)
    return float(spent_s) / (time.monotonic() - began)
