"""Random steps over a random cache, for the tests of every twin of the kernels.

What a kernel may never read is NaN: blocks in no table, other layers, padding of blobs. What it
may read and must mask is large and finite: rows behind the last token of a block, and block 0,
which table entries out of reach point to.
"""

from dataclasses import dataclass, replace
from itertools import islice

import torch

from engine.kernels.interface import (
    NO_SLOT,
    AttentionSpec,
    GroupBatch,
    HeadNorm,
    Kernels,
    Rotary,
    StepBatch,
)
from kv_cache.layout import KV_FORMATS, BlockLayout, KvGroup
from kv_cache.slab import KvSlab

FORMAT_OF_DTYPE = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
QUANTISED = ("fp8_e4m3", "fp8_e5m2", "int8")
MASKED_VALUE = 500.0  # would show in any result that it leaked into

Place = tuple[int, int]  # a block, and a token of it


@dataclass(frozen=True, eq=False)
class AttentionCase:
    """A step whose keys and values are in the slab already, and the dense truth beside it."""

    spec: AttentionSpec
    slab: KvSlab
    layer: int
    batch: StepBatch
    group: GroupBatch
    q: torch.Tensor  # [tokens, heads, head_dim]
    keys: tuple[torch.Tensor, ...]  # of each sequence, [kv_len, kv_heads, head_dim]
    values: tuple[torch.Tensor, ...]
    sinks: torch.Tensor | None = None

    def to(self, device: torch.device) -> "AttentionCase":
        """The dense truth stays behind."""
        group = GroupBatch(self.group.block_tables.to(device), self.group.slots.to(device))
        batch = replace(
            self.batch,
            token_ids=self.batch.token_ids.to(device),
            positions=self.batch.positions.to(device),
            query_starts=self.batch.query_starts.to(device),
            kv_lens=self.batch.kv_lens.to(device),
            groups=(group,),
        )
        slab = KvSlab(self.slab.layout, self.slab.data.to(device))
        sinks = None if self.sinks is None else self.sinks.to(device)
        q = self.q.to(device)
        return replace(self, slab=slab, batch=batch, group=group, q=q, sinks=sinks)

    def with_sinks(self) -> "AttentionCase":
        """From one that weighs nothing to one that weighs nearly all."""
        return replace(self, sinks=torch.linspace(-20, 12, self.spec.num_heads))


@dataclass(frozen=True, eq=False)
class RotateCase:
    """What `rotate_and_write` gets of a step, for layer 1; every fourth token has no slot."""

    spec: AttentionSpec
    qkv: torch.Tensor
    positions: torch.Tensor
    rotary: Rotary
    norm: HeadNorm | None
    slots: torch.Tensor

    def to(self, device: torch.device) -> "RotateCase":
        norm = self.norm
        if norm is not None:
            norm = HeadNorm(norm.q_weight.to(device), norm.k_weight.to(device), norm.eps)
        return RotateCase(
            self.spec,
            self.qkv.to(device),
            self.positions.to(device),
            Rotary(self.rotary.cos.to(device), self.rotary.sin.to(device)),
            norm,
            self.slots.to(device),
        )

    def run(self, kernels: Kernels, slab: KvSlab) -> torch.Tensor:
        return kernels.rotate_and_write(
            self.qkv, self.positions, self.rotary, self.norm, self.spec, slab, 1, self.slots
        )


def make_spec(
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    value_dim: int | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> AttentionSpec:
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=head_dim if value_dim is None else value_dim,
        scale=head_dim**-0.5,
        window=window,
        soft_cap=soft_cap,
    )


def make_slab(
    spec: AttentionSpec,
    num_blocks: int,
    block_size: int = 16,
    num_layers: int = 3,
    dtype: torch.dtype = torch.float32,
    format: str | None = None,
) -> KvSlab:
    """All NaN; of int8 the scales are. The format is the dtype's unless it is given."""
    widths = (spec.head_dim, spec.value_dim)
    group = KvGroup(tuple(range(num_layers)), spec.num_kv_heads, widths, spec.window)
    layout = BlockLayout(group, block_size, KV_FORMATS[format or FORMAT_OF_DTYPE[dtype]])
    slab = KvSlab.allocate(layout, num_blocks, torch.device("cpu"))
    if layout.format.quantised:
        slab.data.view(torch.uint8).fill_(0xFF)
    else:
        slab.data.fill_(torch.nan)
    return slab


def row(slab: KvSlab, layer: int, plane: int, head: int, block: int, token: int) -> torch.Tensor:
    """One token's keys or values of one head, straight from the layout's byte offsets."""
    layout = slab.layout
    start = block * layout.blob_bytes + layout.offset(head, layer, plane, token)
    start //= slab.data.itemsize
    return slab.data[start : start + layout.group.widths[plane]]


def scale(slab: KvSlab, layer: int, plane: int, head: int, block: int, token: int) -> torch.Tensor:
    """The scale of that row, [1]."""
    layout = slab.layout
    start = block * layout.blob_bytes + layout.scale_offset(head, layer, plane, token)
    return slab.scales[start // 4 : start // 4 + 1]


def put(
    slab: KvSlab, layer: int, plane: int, head: int, places: list[Place], values: torch.Tensor
) -> torch.Tensor:
    """Stores rows [tokens, width] by torch's own conversions; gives what is read again."""
    format = slab.layout.format
    if format.largest is None:
        stored = again = values.to(slab.data.dtype)
    else:
        steps = values.float().abs().amax(1, keepdim=True) / format.largest
        stored = values.float() / steps
        if format.name == "int8":
            stored = stored.round()
        stored = stored.clamp(-format.largest, format.largest).to(slab.data.dtype)
        for place, step in zip(places, steps, strict=True):
            scale(slab, layer, plane, head, *place).copy_(step)
        again = stored.float() * steps
    for place, values_there in zip(places, stored, strict=True):
        row(slab, layer, plane, head, *place).copy_(values_there)
    return again


def attention_case(
    spec: AttentionSpec,
    lengths: list[tuple[int, int]],  # (query_len, kv_len) of each sequence, any order
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    format: str | None = None,
) -> AttentionCase:
    rng = torch.Generator().manual_seed(seed)
    lengths = sorted(lengths, key=lambda pair: pair[0] != 1)
    tables = _random_tables([kv_len for _, kv_len in lengths], block_size, rng)
    num_blocks = 2 * sum(len(table) for table in tables) + 5
    slab = make_slab(spec, num_blocks, block_size, dtype=dtype, format=format)
    layer = 1
    for head in range(spec.num_kv_heads):
        for plane, width in enumerate(slab.layout.group.widths):
            masked = torch.full((block_size, width), MASKED_VALUE)
            put(slab, layer, plane, head, [(0, token) for token in range(block_size)], masked)
    blobs = slab.data.view(torch.uint8).view(num_blocks, -1)
    blobs[[block for table in tables for block in table]] = blobs[0].clone()
    keys, values = [], []
    for (_, kv_len), table in zip(lengths, tables, strict=True):
        k = torch.randn(kv_len, spec.num_kv_heads, spec.head_dim, generator=rng).to(dtype)
        v = torch.randn(kv_len, spec.num_kv_heads, spec.value_dim, generator=rng).to(dtype)
        keys.append(_filled(slab, layer, 0, table, k))
        values.append(_filled(slab, layer, 1, table, v))
    batch, group = step_batch(lengths, tables, block_size, spec.window)
    q = torch.randn(batch.num_tokens, spec.num_heads, spec.head_dim, generator=rng).to(dtype)
    return AttentionCase(spec, slab, layer, batch, group, q, tuple(keys), tuple(values))


def step_batch(
    lengths: list[tuple[int, int]],
    tables: list[list[int]],
    block_size: int,
    window: int | None = None,
) -> tuple[StepBatch, GroupBatch]:
    """Blocks wholly behind every query's window are freed: their table entry is 0."""
    width = max([len(table) for table in tables] + [1]) + 2
    padded = torch.zeros(len(tables), width, dtype=torch.int32)
    positions: list[int] = []
    slots: list[int] = []
    for s, ((query_len, kv_len), table) in enumerate(zip(lengths, tables, strict=True)):
        first = kv_len - query_len
        behind = 0 if window is None else max(0, first - window + 1) // block_size
        padded[s, behind : len(table)] = torch.tensor(table[behind:], dtype=torch.int32)
        positions += range(first, kv_len)
        slots += [
            table[i // block_size] * block_size + i % block_size for i in range(first, kv_len)
        ]
    group = GroupBatch(padded, torch.tensor(slots, dtype=torch.int64))
    query_lens = [query_len for query_len, _ in lengths]
    kv_lens = [kv_len for _, kv_len in lengths]
    batch = StepBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        query_starts=torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0).int(),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
        groups=(group,),
        num_decode=sum(query_len == 1 for query_len in query_lens),
        max_query_len=max(query_lens),
        max_kv_len=max(kv_lens),
    )
    return batch, group


def rotate_case(
    spec: AttentionSpec,
    half: int,
    normed: bool,
    num_slots: int,
    num_tokens: int = 13,
    dtype: torch.dtype = torch.float32,
) -> RotateCase:
    width = (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    width += spec.num_kv_heads * spec.value_dim
    angles = torch.rand(200, half) * 6.3
    weights = torch.randn(2, spec.head_dim)
    return RotateCase(
        spec,
        torch.randn(num_tokens, width).to(dtype),
        torch.randint(0, 200, (num_tokens,)),
        Rotary(angles.cos(), angles.sin()),
        HeadNorm(weights[0], weights[1], 1e-6) if normed else None,
        random_slots(num_tokens, num_slots),
    )


def write_by_turns(
    kernels: Kernels,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec,
    slab: KvSlab,
    slots: torch.Tensor,
) -> None:
    """To layer 1, every other token by `write_kv` and those between by `rotate_and_write`, which
    turns them by no angle."""
    kernels.write_kv(k[::2].contiguous(), v[::2].contiguous(), slab, 1, slots[::2].contiguous())
    qkv = torch.cat([rows[1::2].flatten(1) for rows in (q, k, v)], 1)
    still = torch.zeros(len(qkv), spec.head_dim // 2, device=q.device)
    positions = torch.arange(len(qkv), device=q.device)
    rotary, between = Rotary(still.cos(), still), slots[1::2].contiguous()
    turned = kernels.rotate_and_write(qkv, positions, rotary, None, spec, slab, 1, between)
    assert torch.equal(turned, q[1::2])


def random_slots(num_tokens: int, num_slots: int, seed: int = 0) -> torch.Tensor:
    """Distinct slots in random order, every fourth of them NO_SLOT."""
    rng = torch.Generator().manual_seed(seed)
    slots = torch.randperm(num_slots, generator=rng)[:num_tokens]
    slots[2::4] = NO_SLOT
    return slots


def _random_tables(kv_lens: list[int], block_size: int, rng: torch.Generator) -> list[list[int]]:
    counts = [-(-kv_len // block_size) for kv_len in kv_lens]
    order = torch.randperm(2 * sum(counts) + 4, generator=rng) + 1
    blocks = iter(order.tolist())
    return [list(islice(blocks, count)) for count in counts]


def _filled(
    slab: KvSlab, layer: int, plane: int, table: list[int], rows: torch.Tensor
) -> torch.Tensor:
    """What is read again of rows [kv_len, kv_heads, width]."""
    size = slab.layout.block_size
    places = [(table[i // size], i % size) for i in range(len(rows))]
    heads = [put(slab, layer, plane, h, places, rows[:, h]) for h in range(rows.shape[1])]
    return torch.stack(heads, 1)
