"""How the keys and values of a block lie in memory, on the wire and on disk.

A *block* is `block_size` consecutive tokens. A *group* is the set of layers with the same
reach and the same planes. A *blob* is one group's share of a block: one contiguous run

    [kv_head][layer][plane][token][width]        padded to a multiple of 4 KiB

with every head's share aligned to 128 bytes and the scales of a quantised format at the end
of the share. Heads are outermost, so a tensor-parallel rank's heads are one run of bytes.
"""

from dataclasses import dataclass
from functools import cached_property

BLOB_ALIGN_BYTES = 4096
HEAD_ALIGN_BYTES = 128


class LayoutError(ValueError):
    """A block layout that cannot exist; the message names the field."""


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class KvFormat:
    """How one element of a plane is stored.

    A quantised format keeps a scale, fp32, for each token, head, layer and plane: an element is
    what is stored times its row's scale. `largest` is the largest that can be stored.
    """

    name: str
    element_bits: int
    scale_bytes: int = 0
    largest: float | None = None

    @property
    def quantised(self) -> bool:
        return self.scale_bytes > 0

    def plane_bytes(self, num_elements: int) -> int:
        return num_elements * self.element_bits // 8


KV_FORMATS = {
    f.name: f
    for f in (
        KvFormat("fp32", 32),
        KvFormat("bf16", 16),
        KvFormat("fp16", 16),
        KvFormat("fp8_e4m3", 8, scale_bytes=4, largest=448.0),
        KvFormat("fp8_e5m2", 8, scale_bytes=4, largest=57344.0),
        KvFormat("int8", 8, scale_bytes=4, largest=127.0),
        KvFormat("int4", 4, scale_bytes=4, largest=7.0),
    )
}


@dataclass(frozen=True)
class KvGroup:
    """Layers that share one block table: the same reach, the same planes.

    `window` is the number of tokens a query sees, itself included; None sees everything.
    A full-attention group is prefix-closed: a block is only kept while its parent is.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    widths: tuple[int, ...]  # elements per token and head of each plane, usually (K, V)
    window: int | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise LayoutError("layers: a group needs at least one layer")
        if self.num_kv_heads < 1:
            raise LayoutError(f"num_kv_heads: {self.num_kv_heads}, must be at least 1")
        if not self.widths or min(self.widths) < 1:
            raise LayoutError(f"widths: {self.widths}, every plane needs a positive width")
        if self.window is not None and self.window < 1:
            raise LayoutError(f"window: {self.window}, must be at least 1")

    def window_blocks(self, block_size: int) -> int | None:
        """Blocks of a hit that a query after it can still see; None means all of them."""
        return None if self.window is None else -(-(self.window - 1) // block_size)


@dataclass(frozen=True)
class BlockLayout:
    """Sizes and byte offsets of one group's blobs."""

    group: KvGroup
    block_size: int
    format: KvFormat

    def __post_init__(self) -> None:
        size = self.block_size
        if size < 8 or size & (size - 1):
            raise LayoutError(f"block_size: {size}, must be a power of two, at least 8")

    @property
    def num_layers(self) -> int:
        return len(self.group.layers)

    @cached_property
    def plane_offsets(self) -> tuple[int, ...]:
        """Byte offset of each plane inside a layer, and the layer's size as the last entry."""
        offsets = [0]
        for width in self.group.widths:
            offsets.append(offsets[-1] + self.format.plane_bytes(width * self.block_size))
        return tuple(offsets)

    @property
    def layer_bytes(self) -> int:
        return self.plane_offsets[-1]

    @property
    def scales_offset(self) -> int:
        """Byte offset of the scales [layer][plane][token] inside a head's share."""
        return self.num_layers * self.layer_bytes

    @cached_property
    def head_bytes(self) -> int:
        scales = self.num_layers * len(self.group.widths) * self.block_size
        return round_up(self.scales_offset + scales * self.format.scale_bytes, HEAD_ALIGN_BYTES)

    @cached_property
    def blob_bytes(self) -> int:
        return round_up(self.group.num_kv_heads * self.head_bytes, BLOB_ALIGN_BYTES)

    @property
    def token_bytes(self) -> float:
        """Bytes of cache that one token takes in this group, padding included."""
        return self.blob_bytes / self.block_size

    def offset(self, head: int, layer: int, plane: int, token: int) -> int:
        """Byte offset inside a blob; `layer` counts inside the group."""
        row_bytes = self.format.plane_bytes(self.group.widths[plane])
        return (
            head * self.head_bytes
            + layer * self.layer_bytes
            + self.plane_offsets[plane]
            + token * row_bytes
        )

    def scale_offset(self, head: int, layer: int, plane: int, token: int) -> int:
        """Byte offset inside a blob of a row's scale."""
        row = (layer * len(self.group.widths) + plane) * self.block_size + token
        return head * self.head_bytes + self.scales_offset + row * self.format.scale_bytes

    def rank_run(self, rank: int, num_ranks: int) -> tuple[int, int]:
        """(offset, size) in bytes of a tensor-parallel rank's heads inside a whole blob."""
        heads = self.group.num_kv_heads
        if heads % num_ranks:
            raise LayoutError(f"num_ranks: {num_ranks} does not divide {heads} KV heads")
        size = heads // num_ranks * self.head_bytes
        return rank * size, size
