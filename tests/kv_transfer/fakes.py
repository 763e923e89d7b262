"""Small stand-ins for an engine's memory and its prompts, with every event under a test's hand."""

import asyncio
from collections import deque
from collections.abc import Sequence

from kv_cache.handover import BlockRun, HeldRange
from kv_cache.transfers import TransferHold
from kv_transfer.errors import TransferError
from kv_transfer.source import ReadyChunk, ReadyEnd
from protos.handoff_pb2 import Ask

BLOCK = 8


class Memory:
    """Blocks of one group as small numbers; a test sees at once which were written."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [0] * num_blocks

    def checksum(self, group: int, block: int) -> int:
        return self.blocks[block]


class FakeRead:
    """Copies when it is told to, or at once."""

    def __init__(self, pool: "FakePeerPool", pairs: Sequence[tuple[int, int]]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.num_bytes = len(pairs)
        self.wanted = True
        self._pool = pool
        self._pairs = pairs

    def give_up(self) -> None:
        self.wanted = False

    def finish(self) -> None:
        for remote, local in self._pairs:
            self._pool.ours.blocks[local] = self._pool.theirs.blocks[remote]
        self.ended.set_result(None)

    def fail(self, error: TransferError | None = None) -> None:
        self.ended.set_exception(error or TransferError("the wire was cut"))


class FakePeerPool:
    """A peer's memory; with `by_hand`, reads wait in `reads` for the test."""

    transport = "fake"

    def __init__(self, ours: Memory, theirs: Memory, by_hand: bool = False) -> None:
        self.ours, self.theirs = ours, theirs
        self.reads: list[FakeRead] = []
        self.disconnected = False
        self._by_hand = by_hand

    def read(
        self, group: int, remote_blocks: Sequence[int], local_blocks: Sequence[int]
    ) -> FakeRead:
        read = FakeRead(self, list(zip(remote_blocks, local_blocks, strict=True)))
        self.reads.append(read)
        if not self._by_hand:
            read.finish()
        return read

    def disconnect(self) -> None:
        self.disconnected = True


class FakeStream:
    """News as a test puts it."""

    def __init__(self) -> None:
        self.closed = False
        self._news: deque[ReadyChunk | ReadyEnd | Exception] = deque()
        self._event = asyncio.Event()

    def put(self, *news: ReadyChunk | ReadyEnd | Exception) -> None:
        self._news.extend(news)
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()

    def take(self) -> ReadyChunk | ReadyEnd | None:
        if not self._news:
            self._event.clear()
            return None
        news = self._news.popleft()
        if isinstance(news, Exception):
            raise news
        return news

    def close(self) -> None:
        self.closed = True


class FakeSource:
    """An engine whose prompts are streams that the test fills."""

    def __init__(self) -> None:
        self._num_turns = 0
        self.streams: list[FakeStream] = []
        self.asks: list[Ask] = []
        self.dropped: list[TransferHold] = []
        self.asked = asyncio.Event()

    def open(self, ask: Ask) -> FakeStream:
        self.asks.append(ask)
        self.streams.append(FakeStream())
        self.asked.set()
        return self.streams[-1]

    def next_turn(self) -> int:
        self._num_turns += 1
        return self._num_turns

    def predict_s(self) -> float:
        return 0.1

    def turn_s(self) -> float:
        return 0.1

    def drop(self, holds: Sequence[TransferHold]) -> None:
        self.dropped += holds


def chunk(start: int, end: int, blocks: Sequence[int]) -> ReadyChunk:
    run = BlockRun(0, start // BLOCK, tuple(blocks))
    return ReadyChunk(HeldRange(start, end, (run,), (TransferHold(0, tuple(blocks)),)))


def target(start: int, end: int, blocks: Sequence[int]) -> HeldRange:
    return HeldRange(start, end, (BlockRun(0, start // BLOCK, tuple(blocks)),), ())
