"""What one sequence holds of the cache, and how its block tables change."""

from dataclasses import dataclass
from typing import NamedTuple


class TableChange(NamedTuple):
    """`block` becomes number `entry` in the sequence's table of `group`; 0 where it was freed."""

    group: int
    entry: int
    block: int


class CopyOnWrite(NamedTuple):
    """Number `entry` in the table of `group` is `target` now; its bytes are still in `source`."""

    group: int
    entry: int
    source: int
    target: int


@dataclass(slots=True, eq=False)
class SequenceBlocks:
    """The blocks one sequence holds a reference to; only `KvCache` changes it.

    The caller reads `tables` (and copies what it sends elsewhere: they change in place),
    `num_named`, and two thresholds that spare it calls in the steady state of decoding:
    `extend` does nothing up to `capacity` tokens, `advance` nothing below `next_advance`.

    Invariants: an entry of the first `num_named` is the block that the prefix tree has under
    that name, or 0. Entries before `first_live` of a group are 0, all later ones are not.
    """

    tables: tuple[list[int], ...]  # one for each group; 0 behind the window
    first_live: list[int]  # for each group; stays 0 without a window
    num_named: int
    priority: int
    capacity: int  # tokens that every group has room for
    next_advance: int = 0  # tokens computed
    may_share: bool = False  # the block written next may be another's too
