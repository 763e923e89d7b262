"""The end of a front: all that is under way has its time, is failed, and is waited for."""

import asyncio

import pytest

from cluster.under_way import UnderWay
from engine.errors import EngineError, UnavailableError

STOPPING = UnavailableError("stopping")


class Answer:
    """One that goes on until it is finished or failed, and a while longer."""

    def __init__(self, under_way: UnderWay) -> None:
        self.failed: list[EngineError] = []
        self.over = asyncio.Event()
        self.gone = asyncio.Event()
        self.task = asyncio.create_task(self._write(under_way))

    async def _write(self, under_way: UnderWay) -> None:
        with under_way.answering(self.failed.append):
            await self.over.wait()
        self.gone.set()


async def begun(under_way: UnderWay, number: int) -> list[Answer]:
    answers = [Answer(under_way) for _ in range(number)]
    await asyncio.sleep(0)
    return answers


async def test_the_last_one_s_end_is_waited_for() -> None:
    under_way = UnderWay()
    first, last = await begun(under_way, 2)
    ending = asyncio.create_task(under_way.end(60.0, STOPPING))
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError, match="stopping"):
        under_way.check_goes_on()
    first.over.set()
    await first.task
    await asyncio.sleep(0)
    assert not ending.done()
    last.over.set()
    await asyncio.wait_for(ending, 30)
    assert last.gone.is_set()
    assert first.failed == last.failed == [], "they had time enough"


async def test_what_is_failed_is_waited_for_as_well() -> None:
    under_way = UnderWay()
    answers = await begun(under_way, 2)
    ending = asyncio.create_task(under_way.end(0.0, STOPPING))
    while not all(one.failed for one in answers):
        await asyncio.sleep(0)
    for one in answers:
        assert one.failed == [STOPPING]
        await asyncio.sleep(0)
        assert not ending.done()
        one.over.set()
        await one.task
    await asyncio.wait_for(ending, 30)
