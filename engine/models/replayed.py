"""Decode steps as one call each, where the kernels can repeat what they did in one like it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine.kernels.interface import NO_SLOT, GroupBatch, Kernels, Replay, StepBatch
from engine.models.decoder import Decoder
from kv_cache.slab import KvSlab

MOST_RECORDINGS = 64
# tokens of prompts: attention has tiles of its own for few queries, compiled when they are first
# wanted
SHORT_PROMPTS = (2, 4, 8, 16, 32, 64)


class Key(NamedTuple):
    num_seqs: int
    columns: int
    slabs: tuple[tuple[int, str, int], ...]  # address, format and tokens of a block of each


def rung(num_seqs: int) -> int:
    """The recorded size that serves so many sequences: 19 sizes up to 256, and from 33 on at
    most a quarter more than there are."""
    if num_seqs <= 8:
        return 1 << (num_seqs - 1).bit_length()
    step = max(8, 1 << (num_seqs - 1).bit_length() - 3)
    return -(-num_seqs // step) * step


@dataclass(frozen=True)
class StepSizes:
    """Which steps repeat each other, and what of them is recorded. `num_seqs` gives the size
    recorded for so many sequences: those that are missing have no tokens, and cost what a row of a
    matrix product does."""

    num_seqs: Callable[[int], int]
    least_columns: int  # of a block table; they double from there
    ahead: bool  # are all recorded before the first request
    with_head: bool  # logits are computed in the recording

    def num_columns(self, needed: int) -> int:
        return max(self.least_columns, 1 << (needed - 1).bit_length())


# A CPU computes every row, and a call for one width of tables is soon recorded. To record a graph
# the device is waited for and garbage collected, and kernels do not see how wide a table is. Each
# graph would keep logits of its own, 400 MB for all sizes and a vocabulary of 128k, and save one
# launch; recordings on a CPU share their memory, of which pieces are powers of two.
EXACT = StepSizes(lambda count: count, 16, ahead=False, with_head=True)
ON_A_LADDER = StepSizes(rung, 1024, ahead=True, with_head=False)


class ReplayedDecoder:
    """A `CausalModel` that records a step of one token a sequence when it sees one like it for
    the second time: about as many sequences, and block tables about as long."""

    def __init__(self, decoder: Decoder, kernels: Kernels, sizes: StepSizes = EXACT) -> None:
        self._decoder = decoder
        self._kernels = kernels
        self._sizes = sizes
        self._steps: OrderedDict[Key, DecodeStep | None] = OrderedDict()  # None: seen once
        self._repeats = True
        self._latest: Decoded | None = None

    @property
    def vocab_size(self) -> int:
        return self._decoder.vocab_size

    def prepare(self, slabs: Sequence[KvSlab], max_num_seqs: int) -> None:
        """The largest first: the others fit into the memory that it takes."""
        if not self._sizes.ahead:
            return
        for num_tokens in SHORT_PROMPTS:
            self._decoder.forward(unwritten_prompt(num_tokens, slabs), slabs)
        for num_seqs in sorted(set(map(self._sizes.num_seqs, range(1, max_num_seqs + 1))))[::-1]:
            batch = empty_batch(num_seqs, slabs)
            self._record(self._key(batch, slabs), batch, slabs)
            if not self._repeats:
                return

    def forward(
        self, batch: StepBatch, slabs: Sequence[KvSlab], wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        if wanted is None and batch.num_decode == batch.num_seqs and self._repeats:
            return self._decode(batch, slabs)
        return self._decoder.forward(batch, slabs, wanted)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        latest, self._latest = self._latest, None  # capping overwrites its scores
        if latest is None or latest.scores is None or hidden is not latest.hidden:
            return self._decoder.logits(hidden)
        return self._decoder.capped(latest.scores)

    def _decode(self, batch: StepBatch, slabs: Sequence[KvSlab]) -> torch.Tensor:
        key = self._key(batch, slabs)
        if key not in self._steps:
            self._steps[key] = None
            if len(self._steps) > MOST_RECORDINGS:
                self._steps.popitem(last=False)
            return self._decoder.forward(batch, slabs)
        self._steps.move_to_end(key)
        step = self._steps[key]
        decoded = self._record(key, batch, slabs) if step is None else step.run(batch)
        self._latest = decoded
        return decoded.hidden

    def _key(self, batch: StepBatch, slabs: Sequence[KvSlab]) -> Key:
        """A slab may have the place of one that is gone, of another format."""
        needed = max(group.block_tables.shape[1] for group in batch.groups)
        places = tuple(
            (slab.data.data_ptr(), slab.layout.format.name, slab.layout.block_size)
            for slab in slabs
        )
        return Key(self._sizes.num_seqs(batch.num_seqs), self._sizes.num_columns(needed), places)

    def _record(self, key: Key, batch: StepBatch, slabs: Sequence[KvSlab]) -> Decoded:
        size = slabs[0].layout.block_size
        step = DecodeStep(self._decoder, batch, key.num_seqs, key.columns, size)
        decoded = step.record(self._kernels, batch, slabs, self._sizes.with_head)
        self._steps[key], self._repeats = step, step.repeats
        return decoded


def empty_batch(num_seqs: int, slabs: Sequence[KvSlab]) -> StepBatch:
    """Sequences without tokens: nothing is read or written for them."""
    like = torch.empty(0, dtype=torch.int64, device=slabs[0].data.device)
    lengths = like.new_zeros(num_seqs, dtype=torch.int32)
    group = GroupBatch(lengths[:, None], like.new_full((num_seqs,), NO_SLOT))
    return StepBatch(
        token_ids=like.new_zeros(num_seqs),
        positions=like.new_zeros(num_seqs),
        query_starts=torch.arange(num_seqs + 1, dtype=torch.int32, device=like.device),
        kv_lens=lengths,
        groups=(group,) * len(slabs),
        num_decode=num_seqs,
        max_query_len=1,
        max_kv_len=0,
    )


def unwritten_prompt(num_tokens: int, slabs: Sequence[KvSlab]) -> StepBatch:
    """Of one sequence, all at its beginning; it reads the block that nobody owns."""
    like = torch.empty(0, dtype=torch.int64, device=slabs[0].data.device)
    table = like.new_zeros(1, -(-num_tokens // slabs[0].layout.block_size), dtype=torch.int32)
    group = GroupBatch(table, like.new_full((num_tokens,), NO_SLOT))
    return StepBatch(
        token_ids=like.new_zeros(num_tokens),
        positions=like.new_zeros(num_tokens),
        query_starts=like.new_tensor([0, num_tokens], dtype=torch.int32),
        kv_lens=like.new_full((1,), num_tokens, dtype=torch.int32),
        groups=(group,) * len(slabs),
        num_decode=0,
        max_query_len=num_tokens,
        max_kv_len=num_tokens,
    )


class Decoded(NamedTuple):
    """A row for each sequence; the next step overwrites them."""

    hidden: torch.Tensor
    scores: torch.Tensor | None  # where they are recorded

    def of(self, num_seqs: int) -> Decoded:
        scores = None if self.scores is None else self.scores[:num_seqs]
        return Decoded(self.hidden[:num_seqs], scores)


class DecodeStep:
    """What a step is given, always in the same place, and the recorded calls.

    Rows beyond the step's sequences are empty: no tokens to attend to, no slot to write.
    """

    def __init__(
        self, decoder: Decoder, like: StepBatch, num_seqs: int, columns: int, block_size: int
    ) -> None:
        self._decoder = decoder
        zeros = like.positions.new_zeros
        self._residual = decoder.embed(zeros(num_seqs))
        groups = tuple(
            GroupBatch(
                group.block_tables.new_zeros(num_seqs, columns),
                group.slots.new_full((num_seqs,), NO_SLOT),
            )
            for group in like.groups
        )
        self._batch = StepBatch(
            token_ids=zeros(num_seqs),
            positions=zeros(num_seqs),
            query_starts=torch.arange(
                num_seqs + 1, dtype=torch.int32, device=like.query_starts.device
            ),
            kv_lens=like.kv_lens.new_zeros(num_seqs),
            groups=groups,
            num_decode=num_seqs,
            max_query_len=1,
            max_kv_len=columns * block_size,
        )
        self._decoded = Decoded(self._residual, None)
        self._replay: Replay | None = None

    @property
    def repeats(self) -> bool:
        return self._replay is not None

    def record(
        self, kernels: Kernels, batch: StepBatch, slabs: Sequence[KvSlab], with_head: bool
    ) -> Decoded:
        def run() -> torch.Tensor:
            """May run twice, and then it is the second result that is repeated."""
            hidden = self._decoder.transform(self._residual, self._batch, slabs)
            scores = self._decoder.scores(hidden) if with_head else None
            self._decoded = Decoded(hidden, scores)
            return hidden

        self._take(batch)
        hidden, self._replay = kernels.record(run)
        assert hidden is self._decoded.hidden
        return self._decoded.of(batch.num_seqs)

    def run(self, batch: StepBatch) -> Decoded:
        """Overwrites what the last step like this one gave."""
        assert self._replay is not None
        self._take(batch)
        self._replay()
        return self._decoded.of(batch.num_seqs)

    def _take(self, batch: StepBatch) -> None:
        own, count = self._batch, batch.num_seqs
        self._residual[:count].copy_(self._decoder.embed(batch.token_ids))
        own.positions[:count].copy_(batch.positions)
        own.kv_lens[:count].copy_(batch.kv_lens)
        if count < own.num_seqs:
            self._empty_from(count)
        for ours, theirs in zip(own.groups, batch.groups, strict=True):
            ours.slots[:count].copy_(theirs.slots)
            columns = theirs.block_tables.shape[1]
            ours.block_tables[:count, :columns].copy_(theirs.block_tables)

    def _empty_from(self, row: int) -> None:
        self._batch.kv_lens[row:].zero_()
        for group in self._batch.groups:
            group.slots[row:].fill_(NO_SLOT)
