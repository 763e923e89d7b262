"""Reads that did not end in time, and the blocks they may still write to."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kv_cache.transfers import TransferHold
from kv_transfer.connector import Read


@dataclass(frozen=True, slots=True, eq=False)
class Unfinished:
    """A read without an end, and our blocks of it."""

    group: int
    blocks: tuple[int, ...]
    read: Read


class Quarantine:
    """Keeps the blocks of each unfinished read until its end, which nothing else frees.

    `let_go` is called on the event loop once a read has ended. Above `max_blocks` the worker
    is not healthy: what its peers left behind takes too much of its cache.
    """

    def __init__(self, max_blocks: int, let_go: Callable[[TransferHold], None]) -> None:
        self._max_blocks = max_blocks
        self._let_go = let_go
        self._reads = 0
        self._blocks = 0
        self.num_ever = 0

    @property
    def num_reads(self) -> int:
        return self._reads

    @property
    def num_blocks(self) -> int:
        return self._blocks

    @property
    def problem(self) -> str | None:
        if self._blocks <= self._max_blocks:
            return None
        return f"{self._blocks} blocks are in quarantine, at most {self._max_blocks} may be"

    def keep(self, unfinished: Sequence[Unfinished], holds: Sequence[TransferHold]) -> None:
        """`holds` are the cache's, one for each of the reads."""
        for one, hold in zip(unfinished, holds, strict=True):
            self._reads += 1
            self.num_ever += 1
            self._blocks += len(hold.blocks)
            one.read.ended.add_done_callback(partial(self._end, hold))

    def _end(self, hold: TransferHold, ended: asyncio.Future[None]) -> None:
        if not ended.cancelled():
            ended.exception()  # whatever it is, it is over
        self._reads -= 1
        self._blocks -= len(hold.blocks)
        self._let_go(hold)
