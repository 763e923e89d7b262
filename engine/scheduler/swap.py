"""Host memory for the blocks of preempted sequences."""

from collections.abc import Sequence as Seq

from engine.scheduler.sequence import Sequence
from engine.step import HostCopy


class SwapSpace:
    """Which host blocks are free in each group, and which copies fill and empty them.

    Holds no bytes itself. Copies to the host run before those from it and before everything
    else in a step, so both sides of a copy may be handed out again at once; but in a step that
    has copies from the host, nothing is taken out after them.
    """

    def __init__(self, num_blocks: Seq[int]) -> None:
        self.num_blocks = tuple(num_blocks)
        self._free = [list(range(n - 1, -1, -1)) for n in num_blocks]

    @property
    def num_used(self) -> tuple[int, ...]:
        return tuple(n - len(f) for n, f in zip(self.num_blocks, self._free, strict=True))

    def take_out(self, sequence: Sequence, block_size: int) -> list[HostCopy] | None:
        """Gives every computed block of the sequence a place; None where one has none, and
        when there is nothing to take out."""
        assert sequence.blocks is not None
        if sequence.num_computed == 0:
            return None
        entries = -(-sequence.num_computed // block_size)
        needs = [
            {i: block for i, block in enumerate(table[:entries]) if block}
            for table in sequence.blocks.tables
        ]
        if any(len(need) > len(free) for need, free in zip(needs, self._free, strict=True)):
            return None
        copies = []
        for group, (need, free) in enumerate(zip(needs, self._free, strict=True)):
            places = {entry: free.pop() for entry in need}
            sequence.host_blocks.append(places)
            copies += [HostCopy(group, need[entry], place) for entry, place in places.items()]
        return copies

    def bring_back(self, sequence: Sequence, first_entry: int) -> list[HostCopy]:
        """Copies into the tables from `first_entry` on; what lies before was found cached."""
        assert sequence.blocks is not None
        copies = [
            HostCopy(group, table[entry], place)
            for group, (table, places) in enumerate(
                zip(sequence.blocks.tables, sequence.host_blocks, strict=True)
            )
            for entry, place in places.items()
            if entry >= first_entry and table[entry]
        ]
        self.forget(sequence)
        return copies

    def forget(self, sequence: Sequence) -> None:
        for free, places in zip(self._free, sequence.host_blocks, strict=False):
            free.extend(places.values())
        sequence.host_blocks.clear()
