"""Runs a model by hand-made step batches over paged slabs: what the engine's runner does, bare."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.kernels.interface import GroupBatch, StepBatch
from engine.models.interface import CausalModel, ModelDescription
from kv_cache.layout import KV_FORMATS, BlockLayout
from kv_cache.slab import KvSlab

BLOCK_SIZE = 8
FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
POISON = 3e4  # what a block without an owner is filled with: any use of it shows
POISON_BYTE = 0x47  # the same for a quantised one: a scale of 5e4 and elements of 3 and more


def poison(slab: KvSlab, data: torch.Tensor) -> None:
    """`data` are blocks of the slab."""
    if slab.layout.format.quantised:
        data.view(torch.uint8).fill_(POISON_BYTE)
    else:
        data.fill_(POISON)


@dataclass
class DrivenSequence:
    """Tokens so far, how many of them are cached, and one block table per group."""

    tokens: list[int]
    num_cached: int = 0
    tables: list[list[int]] = field(default_factory=list)


class Driver:
    """Blocks are handed out in a shuffled order, and poisoned once they are behind a window."""

    def __init__(
        self,
        model: CausalModel,
        description: ModelDescription,
        dtype: torch.dtype = torch.float32,
        num_blocks: int = 64,
        seed: int = 0,
        format: str | None = None,
    ) -> None:
        self.model = model
        self.groups = description.groups
        kv_format = KV_FORMATS[format or FORMATS[dtype]]
        layouts = [BlockLayout(g, BLOCK_SIZE, kv_format) for g in self.groups]
        device = torch.device("cpu")
        self.slabs = [KvSlab.allocate(layout, num_blocks, device) for layout in layouts]
        for slab in self.slabs:
            poison(slab, slab.data)
        generator = torch.Generator().manual_seed(seed)
        self.free = [torch.randperm(num_blocks, generator=generator).tolist() for _ in self.groups]

    def start(self, prompt: Sequence[int]) -> DrivenSequence:
        return DrivenSequence(list(prompt), tables=[[] for _ in self.groups])

    @torch.inference_mode()
    def step(
        self, work: Sequence[tuple[DrivenSequence, int]], wanted_only: bool = False
    ) -> list[torch.Tensor]:
        """Computes the next `count` tokens of each sequence; logits [count, vocab] of each.

        With `wanted_only` the model is asked for each sequence's last row alone.
        """
        work = sorted(work, key=lambda item: item[1] != 1)
        for sequence, count in work:
            self._reserve(sequence, sequence.num_cached + count)
        batch = self._batch(work)
        counts = [count for _, count in work]
        if wanted_only:
            wanted = batch.query_starts[1:].long() - 1
            hidden = self.model.forward(batch, self.slabs, wanted)
            counts = [1] * len(work)
        else:
            hidden = self.model.forward(batch, self.slabs)
        for sequence, count in work:
            sequence.num_cached += count
            self._free_behind_windows(sequence)
        return list(torch.split(self.model.logits(hidden).to(torch.float32, copy=True), counts))

    def greedy(self, prompt: Sequence[int], num_tokens: int, chunk: int) -> DrivenSequence:
        """Prefill in chunks, then decode one by one."""
        sequence = self.start(prompt)
        while len(sequence.tokens) < len(prompt) + num_tokens:
            count = min(chunk, len(sequence.tokens) - sequence.num_cached)
            (logits,) = self.step([(sequence, count)])
            if sequence.num_cached == len(sequence.tokens):
                sequence.tokens.append(int(logits[-1].argmax()))
        return sequence

    def _reserve(self, sequence: DrivenSequence, num_tokens: int) -> None:
        for table, free in zip(sequence.tables, self.free, strict=True):
            while len(table) * BLOCK_SIZE < num_tokens:
                table.append(free.pop())

    def _free_behind_windows(self, sequence: DrivenSequence) -> None:
        for group, table, free, slab in zip(
            self.groups, sequence.tables, self.free, self.slabs, strict=True
        ):
            if group.window is None:
                continue
            first_seen = max(0, sequence.num_cached - group.window + 1)
            for index in range(first_seen // BLOCK_SIZE):
                if table[index] >= 0:
                    start = table[index] * slab.block_stride
                    poison(slab, slab.data[start : start + slab.block_stride])
                    free.insert(0, table[index])
                    table[index] = -1

    def _batch(self, work: Sequence[tuple[DrivenSequence, int]]) -> StepBatch:
        spans = [range(s.num_cached, s.num_cached + count) for s, count in work]
        starts = [0]
        for span in spans:
            starts.append(starts[-1] + len(span))
        return StepBatch(
            token_ids=torch.tensor(
                [s.tokens[i] for (s, _), span in zip(work, spans, strict=True) for i in span]
            ),
            positions=torch.tensor([i for span in spans for i in span]),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            kv_lens=torch.tensor([span.stop for span in spans], dtype=torch.int32),
            groups=tuple(self._group(g, work, spans) for g in range(len(self.groups))),
            num_decode=sum(count == 1 for _, count in work),
            max_query_len=max(len(span) for span in spans),
            max_kv_len=max(span.stop for span in spans),
        )

    def _group(
        self, group: int, work: Sequence[tuple[DrivenSequence, int]], spans: Sequence[range]
    ) -> GroupBatch:
        tables = [sequence.tables[group] for sequence, _ in work]
        width = max(len(table) for table in tables)
        rows = [[max(b, 0) for b in table] + [0] * (width - len(table)) for table in tables]
        slots = [
            table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE
            for table, span in zip(tables, spans, strict=True)
            for i in span
        ]
        return GroupBatch(torch.tensor(rows, dtype=torch.int32), torch.tensor(slots))
