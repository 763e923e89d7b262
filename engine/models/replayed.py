"""Decode steps as one call each, where the kernels can repeat what they did in one like it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch

from engine.kernels.interface import GroupBatch, Kernels, Replay, StepBatch
from engine.models.decoder import Decoder
from kv_cache.slab import KvSlab

MOST_RECORDINGS = 64
LEAST_COLUMNS = 16  # of a block table

Key = tuple[int, ...]


class ReplayedDecoder:
    """A `CausalModel` that records a step of one token a sequence when it sees one like it for
    the second time: as many sequences, and block tables about as long."""

    def __init__(self, decoder: Decoder, kernels: Kernels) -> None:
        self._decoder = decoder
        self._kernels = kernels
        self._steps: OrderedDict[Key, DecodeStep | None] = OrderedDict()  # None: seen once
        self._repeats = True

    @property
    def vocab_size(self) -> int:
        return self._decoder.vocab_size

    def forward(
        self, batch: StepBatch, slabs: Sequence[KvSlab], wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        if wanted is None and batch.num_decode == batch.num_seqs and self._repeats:
            return self._decode(batch, slabs)
        return self._decoder.forward(batch, slabs, wanted)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._decoder.logits(hidden)

    def _decode(self, batch: StepBatch, slabs: Sequence[KvSlab]) -> torch.Tensor:
        needed = max(group.block_tables.shape[1] for group in batch.groups)
        columns = max(LEAST_COLUMNS, 1 << (needed - 1).bit_length())
        key = (batch.num_seqs, columns, *(slab.data.data_ptr() for slab in slabs))
        if key not in self._steps:
            self._steps[key] = None
            if len(self._steps) > MOST_RECORDINGS:
                self._steps.popitem(last=False)
            return self._decoder.forward(batch, slabs)
        self._steps.move_to_end(key)
        step = self._steps[key]
        if step is not None:
            return step.run(batch)
        step = DecodeStep(self._decoder, batch, columns, slabs[0].layout.block_size)
        hidden = step.record(self._kernels, batch, slabs)
        self._steps[key], self._repeats = step, step.repeats
        return hidden


class DecodeStep:
    """What a step is given, always in the same place, and the recorded calls."""

    def __init__(self, decoder: Decoder, batch: StepBatch, columns: int, block_size: int) -> None:
        self._decoder = decoder
        self._residual = decoder.embed(batch.token_ids)
        groups = tuple(
            GroupBatch(group.block_tables.new_zeros(batch.num_seqs, columns), group.slots.clone())
            for group in batch.groups
        )
        self._batch = StepBatch(
            token_ids=batch.token_ids,
            positions=batch.positions.clone(),
            query_starts=batch.query_starts.clone(),
            kv_lens=batch.kv_lens.clone(),
            groups=groups,
            num_decode=batch.num_decode,
            max_query_len=1,
            max_kv_len=columns * block_size,
        )
        self._hidden = self._residual
        self._replay: Replay | None = None

    @property
    def repeats(self) -> bool:
        return self._replay is not None

    def record(self, kernels: Kernels, batch: StepBatch, slabs: Sequence[KvSlab]) -> torch.Tensor:
        self._take(batch)
        self._hidden, self._replay = kernels.record(
            lambda: self._decoder.transform(self._residual, self._batch, slabs)
        )
        return self._hidden

    def run(self, batch: StepBatch) -> torch.Tensor:
        """Overwrites what the last step like this one gave."""
        assert self._replay is not None
        self._take(batch)
        self._replay()
        return self._hidden

    def _take(self, batch: StepBatch) -> None:
        own = self._batch
        self._residual.copy_(self._decoder.embed(batch.token_ids))
        own.positions.copy_(batch.positions)
        own.kv_lens.copy_(batch.kv_lens)
        for ours, theirs in zip(own.groups, batch.groups, strict=True):
            ours.slots.copy_(theirs.slots)
            ours.block_tables[:, : theirs.block_tables.shape[1]].copy_(theirs.block_tables)
