"""What of a CPU's instructions the kernels are compiled for."""

import ctypes
import platform
import sys
from dataclasses import dataclass
from functools import cache

import llvmlite.binding as llvm
import torch

# Zen starts as many `vdpbf16ps` as products of fp32. A Xeon (Emerald Rapids) starts one in the time
# of four, so that what is widened in registers is multiplied twice as fast there.
_FAST_PAIRS = "znver"


@dataclass(frozen=True)
class CpuFeatures:
    """LLVM compiles every kernel for any CPU; these decide which kernels are worth it."""

    wide_registers: bool  # AVX-512: 32 registers of 16 lanes, what the product's tile fills
    bf16_dot: bool  # AVX512-BF16, and worth it: pairs of bf16 are multiplied without conversion
    bf16_tiles: bool  # AMX: registers of 16 x 64 bytes, and products of whole tiles
    narrow_registers: bool = False  # AVX2 with FMA and no more: 16 registers of 8 lanes

    @classmethod
    def of_this_machine(cls) -> "CpuFeatures":
        return _of_this_machine()

    def element(self, dtype: torch.dtype) -> str:
        """The element type that kernels are compiled for, as `language.py` names them."""
        if dtype == torch.bfloat16 and self.bf16_dot:
            return "bf16_dot"
        element = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
        return f"{element}_narrow" if self.narrow_registers else element

    def multiplies_tiles(self, dtype: torch.dtype) -> bool:
        """Whether our own matrix product works on tiles."""
        return self.bf16_tiles and dtype == torch.bfloat16


@cache
def _of_this_machine() -> CpuFeatures:
    found = llvm.get_host_cpu_features()

    def has(*names: str) -> bool:
        return all(found.get(name, False) for name in names)

    wide = has("avx512f", "avx512bw", "avx512vl")
    dot = wide and has("avx512bf16")
    tiles = dot and has("amx-tile", "amx-bf16") and _may_tile()
    return CpuFeatures(
        wide_registers=wide,
        bf16_dot=dot and (tiles or llvm.get_host_cpu_name().startswith(_FAST_PAIRS)),
        bf16_tiles=tiles,
        narrow_registers=not wide and has("avx2", "fma", "f16c"),
    )


@cache
def asks_once() -> bool:
    """Whether what is used up soon is asked for into the first cache level alone. With 48 kB that
    of a Zen 5 has room for the part of a panel in use, the next one and the rows; elsewhere it was
    not tried."""
    return bool(llvm.get_host_cpu_name() == "znver5")


@cache
def converts_halves() -> bool:
    """Whether fp16 becomes fp32 by an instruction: where there is none, LLVM calls functions that
    no library here has, and ends the process."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return not is_x86 or bool(llvm.get_host_cpu_features().get("f16c", False))


def _may_tile() -> bool:
    """Linux gives a process the tiles' registers when it asks: they make its threads' state larger
    by 8 kB. Whoever has asked and did not get them dies of their first use."""
    arch_prctl, request, tile_data = 158, 0x1023, 18
    if sys.platform != "linux":
        return False
    refused: int = ctypes.CDLL(None).syscall(arch_prctl, request, tile_data)
    return not refused
