"""Tile shapes: how much of the work one program holds at a time. Plain arithmetic, no device.

The bounds come from a Hopper multiprocessor: 227 KiB of shared memory, 64 Ki registers.
"""

from typing import NamedTuple

MIN_DOT = 16  # the smallest side of a matrix-unit tile
STAGE_BYTES = 32 * 1024  # keys and values of one decode tile: two programs of three stages fit


class AttentionTiles(NamedTuple):
    rows: int  # (token, head) pairs of one KV head that a program holds
    tokens: int  # keys and values in one pipeline stage
    num_warps: int
    num_stages: int


def power_of_two(value: int) -> int:
    """The smallest power of two that is not below `value`."""
    return 1 << max(value - 1, 0).bit_length()


def padded(width: int) -> int:
    """The width of a tile that holds rows of `width` elements."""
    return max(MIN_DOT, power_of_two(width))


def decode_tiles(
    heads_per_kv: int, head_dim: int, value_dim: int, itemsize: int, quantised: bool = False
) -> AttentionTiles:
    """All query heads of a KV head at once, up to 64, so that each key is read once.

    `itemsize` is of the queries, which cached elements become. Of a quantised cache more stages
    hold as many bytes on their way; more tokens would take more registers than there are.
    """
    row_bytes = (padded(head_dim) + padded(value_dim)) * itemsize
    tokens = min(max(1 << (STAGE_BYTES // row_bytes).bit_length() - 1, MIN_DOT), 128)
    rows = min(padded(heads_per_kv), 64)
    return AttentionTiles(rows, tokens, num_warps=4, num_stages=5 if quantised else 3)


def prefill_tiles(
    num_rows: int, head_dim: int, value_dim: int, itemsize: int, quantised: bool = False
) -> AttentionTiles:
    """`num_rows` is what the longest sequence of the step has for one KV head."""
    width = max(padded(head_dim), padded(value_dim))
    if itemsize == 4:  # no wide matrix unit: small tiles keep the operands in registers
        return AttentionTiles(16, 16 if width > 64 else 32, num_warps=4, num_stages=2)
    if num_rows <= MIN_DOT:
        return AttentionTiles(MIN_DOT, 64, num_warps=4, num_stages=2)
    if num_rows <= 64:
        return AttentionTiles(64, 32 if width > 128 else 64, num_warps=4, num_stages=2)
    if width > 128:
        return AttentionTiles(128, 32, num_warps=8, num_stages=3)
    if head_dim < width or value_dim < width or quantised:  # masks take registers, conversions too
        return AttentionTiles(128, 64, num_warps=8, num_stages=3)
    return AttentionTiles(128, 128, num_warps=8, num_stages=2)
