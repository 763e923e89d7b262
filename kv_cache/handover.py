"""Blocks that change hands: which entries of a prompt's block tables, and who keeps them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kv_cache.cache import KvCache
from kv_cache.config import blocks_of, first_visible
from kv_cache.names import BlockName
from kv_cache.sequence import SequenceBlocks
from kv_cache.transfers import TransferHold


class BlockRun(NamedTuple):
    """Entries first_entry .. first_entry + len(blocks) of a group's block table."""

    group: int
    first_entry: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeldRange:
    """The blobs of tokens start .. end, held for a transfer until `holds` are dropped.

    `start` is a block's first token; `end` is one past a block's last, or the prompt's end. Of
    a window group there are only the blocks that `first_query` sees, if any.
    """

    start: int
    end: int
    runs: tuple[BlockRun, ...]
    holds: tuple[TransferHold, ...]


def first_query(num_tokens: int, block_size: int) -> int:
    """The first position that a prompt's cache, handed over, is to serve.

    Its last token may be computed again; and the end of its last whole block is where a later
    prompt begins that shares it, for one more block of a window group at the most.
    """
    return min(num_tokens - 1, num_tokens // block_size * block_size)


def hold_range(
    cache: KvCache, blocks: SequenceBlocks, start: int, end: int, query: int
) -> HeldRange:
    """Holds what a sequence has of tokens start .. end for a reader, or for what fills it.

    Of window groups only what queries from `query` on see, which must be there.
    """
    size, runs, holds = cache.block_size, [], []
    if start < end:
        last = blocks_of(end, size)
        for g, group in enumerate(cache.config.groups):
            first = max(start // size, first_visible(query, group.window, size))
            run = tuple(blocks.tables[g][first:last])
            assert all(run), f"group {g} lacks a block that is to be held"
            if run:
                assert len(run) == last - first, f"group {g} lacks blocks at its end"
                runs.append(BlockRun(g, first, run))
                holds.append(cache.transfers.hold(g, run))
    return HeldRange(start, end, tuple(runs), tuple(holds))


def serves_from(cache: KvCache, blocks: SequenceBlocks, query: int) -> bool:
    """Whether of window groups everything that queries from `query` on see has its block."""
    return all(
        live <= first_visible(query, group.window, cache.block_size)
        for live, group in zip(blocks.first_live, cache.config.groups, strict=True)
    )


def hold_cached(
    cache: KvCache, names: Sequence[BlockName], num_tokens: int, first_token: int
) -> HeldRange:
    """Holds what is cached of a prompt from `first_token` on, for a reader that goes on from
    there; `end` is `start` where that is nothing."""
    match = cache.match(names, num_tokens)
    blocks = cache.open(match)
    end = max(first_token, match.num_cached)
    held = hold_range(cache, blocks, first_token, end, match.num_tokens)
    cache.release(blocks)
    return held
