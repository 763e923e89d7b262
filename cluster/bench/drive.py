"""Begins conversations when it is time for them. Knows no HTTP."""

import asyncio
from collections.abc import Awaitable, Iterator
from typing import Protocol

from cluster.bench.arrivals import Arrivals, ClosedLoop, OpenLoop
from cluster.bench.connection import Clock
from cluster.bench.workload import Conversation

# A conversation is begun so long before it is due, to have its prompt ready.
_AHEAD_S = 0.25
# Between requests to one that is not there: it says so in no time, and would be asked as often.
_AGAIN_S = 1.0
_MOST_VAIN = 10  # for each stream


class Converse(Protocol):
    """Sends nothing before it is due, and no further turn from `end_s` on. False if the server was
    not there."""

    def __call__(
        self, conversation: Conversation, due_s: float | None, end_s: float
    ) -> Awaitable[bool]: ...


async def drive(
    conversations: Iterator[Conversation],
    arrivals: Arrivals,
    converse: Converse,
    clock: Clock,
    *,
    duration_s: float | None = None,
    seed: int = 0,
) -> bool:
    """Returns when all that was begun has ended; after `duration_s` nothing new begins. False if
    a closed loop ended before its time, since the server had gone."""
    start_s = clock() if isinstance(arrivals, ClosedLoop) else clock() + _AHEAD_S
    end_s = float("inf") if duration_s is None else start_s + duration_s
    if isinstance(arrivals, ClosedLoop):
        return await _closed(conversations, arrivals.concurrency, converse, clock, end_s)
    async with asyncio.TaskGroup() as under_way:
        for conversation, at_s in _timed(conversations, arrivals, seed):
            due_s = start_s + at_s
            if max(due_s, clock()) >= end_s:  # at a rate that cannot be kept it is late
                break
            await asyncio.sleep(due_s - _AHEAD_S - clock())
            under_way.create_task(_awaited(converse(conversation, due_s, end_s)))
    return True


async def _closed(
    conversations: Iterator[Conversation],
    concurrency: int,
    converse: Converse,
    clock: Clock,
    end_s: float,
) -> bool:
    most_vain, num_vain = _MOST_VAIN * concurrency, 0  # of all, in a row

    async def work() -> None:
        nonlocal num_vain
        while clock() < end_s and num_vain < most_vain:
            conversation = next(conversations, None)
            if conversation is None:
                return
            if await converse(conversation, None, end_s):
                num_vain = 0
            else:
                num_vain += 1
                await asyncio.sleep(_AGAIN_S)

    async with asyncio.TaskGroup() as workers:
        for _ in range(concurrency):
            workers.create_task(work())
    return num_vain < most_vain


def _timed(
    conversations: Iterator[Conversation], arrivals: Arrivals, seed: int
) -> Iterator[tuple[Conversation, float]]:
    if isinstance(arrivals, OpenLoop):
        yield from zip(conversations, arrivals.times(seed), strict=False)
        return
    assert not isinstance(arrivals, ClosedLoop)
    for conversation in conversations:
        assert conversation.at_s is not None
        yield conversation, conversation.at_s / arrivals.speed


async def _awaited(awaitable: Awaitable[bool]) -> None:
    await awaitable
