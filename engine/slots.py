"""The runner's table of running sequences, and the batch of a step made from it."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels.interface import NO_SLOT, GroupBatch, StepBatch
from engine.staging import Array, Staging
from engine.step import EnteringSequence, Slice, TableUpdate

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]


class DrawnTokens(NamedTuple):
    """What a step has drawn, or is about to; slots are distinct."""

    slots: IntArray
    token_ids: torch.Tensor  # [draws] int32, on the device


def slot_bytes(max_len: int, block_size: int, num_groups: int) -> int:
    """Of one row of a `SlotTable`."""
    return 4 * (max_len + 1 + num_groups * (max_len // block_size + 1) + 3)


class SlotTable:
    """One row for each running sequence: its tokens and its block tables, on the host.

    Rows are written when a sequence enters and then only by what a step changes, so a decode
    step gathers its batch with a few vectorised reads. Knows nothing of scheduling.

    `append` makes room for a token when its draw has been issued, `fill` brings it when the host
    knows it. A step that is gathered between the two reads it from the device.
    """

    def __init__(self, num_slots: int, max_len: int, block_size: int, num_groups: int) -> None:
        self._block_size = block_size
        max_blocks = max_len // block_size + 1
        self.tokens: IntArray = np.zeros((num_slots, max_len + 1), np.int32)
        self.num_tokens: IntArray = np.zeros(num_slots, np.int32)
        self.num_known: IntArray = np.zeros(num_slots, np.int32)  # one less before `fill`
        self.num_prompt_tokens: IntArray = np.zeros(num_slots, np.int32)
        self._tables: list[IntArray] = [
            np.zeros((num_slots, max_blocks), np.int32) for _ in range(num_groups)
        ]

    @property
    def num_slots(self) -> int:
        return len(self.num_tokens)

    def enter(self, sequence: EnteringSequence) -> None:
        slot, count = sequence.slot, len(sequence.token_ids)
        self.tokens[slot, :count] = sequence.token_ids
        self.num_tokens[slot] = self.num_known[slot] = count
        self.num_prompt_tokens[slot] = sequence.num_prompt_tokens
        for rows, table in zip(self._tables, sequence.tables, strict=False):
            rows[slot, : len(table)] = table

    def update_tables(self, updates: Sequence[TableUpdate]) -> None:
        for slot, group, entry, block in updates:
            self._tables[group][slot, entry] = block

    def append(self, slots: IntArray) -> IntArray:
        """One more token for each slot, and its place; slots are distinct."""
        places = self.num_tokens[slots]
        self.num_tokens[slots] = places + 1
        return places

    def fill(self, slots: IntArray, places: IntArray, token_ids: IntArray) -> None:
        self.tokens[slots, places] = token_ids
        self.num_known[slots] = places + 1

    def history(self, slots: IntArray, with_tokens: bool) -> tuple[IntArray, IntArray]:
        """(tokens, num_tokens) of all slots, with no more columns than these need: the whole
        table may be 100 MB, too much to bring to a device in every step."""
        width = int(self.num_tokens[slots].max()) if with_tokens else 0
        return np.ascontiguousarray(self.tokens[:, :width]), self.num_tokens

    def unknown(self, slots: IntArray) -> IntArray:
        """Those of the slots whose last token is not known here yet."""
        return slots[self.num_known[slots] < self.num_tokens[slots]]

    def batch(
        self,
        slices: Sequence[Slice],
        num_decode: int,
        staging: Staging,
        drawn: DrawnTokens | None = None,
    ) -> StepBatch:
        """`drawn` has what the table does not know yet."""
        columns = list(zip(*slices, strict=True))[:4]
        slots, starts, counts, write_starts = np.array(columns, np.int64)
        query_starts = np.zeros(len(slices) + 1, np.int32)
        np.cumsum(counts, out=query_starts[1:])
        if num_decode == len(slices):
            positions, rows, writes = starts, slots, write_starts
        else:
            owner = np.repeat(np.arange(len(slices)), counts)
            positions = np.arange(query_starts[-1]) - query_starts[owner] + starts[owner]
            rows, writes = slots[owner], write_starts[owner]
        kv_lens = starts + counts
        max_kv_len = int(kv_lens.max())

        num_columns = -(-max_kv_len // self._block_size)
        blocks, offsets = np.divmod(positions, self._block_size)
        unwritten = positions < writes
        any_unwritten = bool(unwritten.any())
        arrays: list[Array] = [
            self.tokens[rows, positions].astype(np.int64),
            np.ascontiguousarray(positions),
            query_starts,
            kv_lens.astype(np.int32),
        ]
        for table in self._tables:
            places = table[rows, blocks].astype(np.int64) * self._block_size + offsets
            if any_unwritten:
                places[unwritten] = NO_SLOT
            arrays += table[slots, :num_columns], places
        unknown = positions >= self.num_known[rows]
        late = bool(unknown.any())
        if late:
            assert drawn is not None
            arrays += unknown, self.order(drawn)[rows]
        token_ids, there, starts_there, lens_there, *grouped = staging.put(arrays)
        if late:
            *grouped, mask, order = grouped
            assert drawn is not None
            token_ids = torch.where(mask, drawn.token_ids[order], token_ids)
        return StepBatch(
            token_ids=token_ids,
            positions=there,
            query_starts=starts_there,
            kv_lens=lens_there,
            groups=tuple(map(GroupBatch, grouped[::2], grouped[1::2])),
            num_decode=num_decode,
            max_query_len=int(counts.max()),
            max_kv_len=max_kv_len,
        )

    def order(self, drawn: DrawnTokens) -> LongArray:
        """For each slot, which of the draws is its; any where none is."""
        order = np.zeros(self.num_slots, np.int64)
        order[drawn.slots] = np.arange(drawn.slots.size)
        return order
