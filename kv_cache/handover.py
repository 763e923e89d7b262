"""Blocks that change hands: which entries of a prompt's block tables, and who keeps them."""

from dataclasses import dataclass
from typing import NamedTuple

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
    a window group there are only the blocks that are visible from the prompt's end, if any.
    """

    start: int
    end: int
    runs: tuple[BlockRun, ...]
    holds: tuple[TransferHold, ...]
