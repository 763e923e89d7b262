"""AMX for a CPU that has none: the registers lie in memory, and loops stand for its instructions.

A plugin of pytest, `-p tests.engine.kernels.tiles_in_memory`. There is one set of registers, for
one thread, and compiled code knows where it lies: its cache must be nobody else's.
"""

from typing import Any
from unittest.mock import patch

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from engine.kernels.cpu import emit, features, matrix
from engine.kernels.cpu.emit import F32, I8, I16, I32, I64, const, pointer
from engine.kernels.cpu.features import CpuFeatures
from engine.kernels.cpu.team import TEAM

ROW_BYTES, TILE_BYTES, NUM_TILES = 64, 1024, 8
_MEMORY = np.zeros((NUM_TILES + 1) * TILE_BYTES, np.uint8)
TILES = _MEMORY.ctypes.data
SHAPE = TILES + NUM_TILES * TILE_BYTES  # what `ldtilecfg` was given; byte 48 + tile says its rows


def _rows(b: Any, tile: int) -> Any:
    return b.zext(b.load(pointer(b, const(SHAPE + 48 + tile), I8)), I64)


def _at(b: Any, start: Any, *steps: tuple[Any, Any]) -> Any:
    for index, size in steps:
        start = b.add(start, b.mul(index, size))
    return start


def _copy_row(b: Any, target: Any, source: Any) -> None:
    row = ir.ArrayType(I8, ROW_BYTES)
    b.store(b.load(pointer(b, source, row), align=1), pointer(b, target, row), align=1)


def _zero(b: Any, tile: int) -> None:
    whole = ir.ArrayType(I8, TILE_BYTES)
    b.store(ir.Constant(whole, None), pointer(b, const(TILES + tile * TILE_BYTES), whole), align=1)


def load(b: Any, tile: int, address: Any, row_bytes: Any) -> None:
    _zero(b, tile)
    start = const(TILES + tile * TILE_BYTES)
    with cgutils.for_range(b, _rows(b, tile)) as row:
        source = _at(b, address, (row.index, row_bytes))
        _copy_row(b, _at(b, start, (row.index, const(ROW_BYTES))), source)


def store(b: Any, tile: int, address: Any, row_bytes: Any) -> None:
    start = const(TILES + tile * TILE_BYTES)
    with cgutils.for_range(b, _rows(b, tile)) as row:
        target = _at(b, address, (row.index, row_bytes))
        _copy_row(b, target, _at(b, start, (row.index, const(ROW_BYTES))))


def of_tiles(b: Any, name: str, *tiles: int) -> None:
    if name == "zero":
        _zero(b, *tiles)
        return
    assert name == "dpbf16ps"
    sums, left, right = (const(TILES + tile * TILE_BYTES) for tile in tiles)
    row_bytes, lane_bytes = const(ROW_BYTES), const(4)
    with (
        cgutils.for_range(b, _rows(b, tiles[0])) as row,
        cgutils.for_range(b, const(16)) as pair,
        cgutils.for_range(b, const(16)) as column,
    ):
        x = _at(b, left, (row.index, row_bytes), (pair.index, lane_bytes))
        y = _at(b, right, (pair.index, row_bytes), (column.index, lane_bytes))
        place = _at(b, sums, (row.index, row_bytes), (column.index, lane_bytes))
        total = pointer(b, place, F32)
        for half in (const(0), const(2)):
            product = b.fmul(_bf16(b, b.add(x, half)), _bf16(b, b.add(y, half)))
            b.store(b.fadd(b.load(total), product), total)


def _bf16(b: Any, address: Any) -> Any:
    bits = b.zext(b.load(pointer(b, address, I16), align=2), I32)
    return b.bitcast(b.shl(bits, const(16, I32)), F32)


def call(b: Any, name: str, result: Any, *values: Any) -> Any:
    if name == "llvm.x86.ldtilecfg":
        _copy_row(b, const(SHAPE), b.ptrtoint(values[0], I64))
        return None
    return None if name == "llvm.x86.tilerelease" else emit.call(b, name, result, *values)


# Whoever imports this is a process of its own, and means all of it.
patch.multiple(matrix, _load=load, _store=store, _of_tiles=of_tiles, call=call).start()
patch.object(features, "_of_this_machine", lambda: CpuFeatures(True, True, True)).start()
patch.object(TEAM, "take", lambda num_workers: 0).start()
