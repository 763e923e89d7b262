"""What of a CPU's instructions the kernels are compiled for."""

from dataclasses import dataclass
from functools import cache

import llvmlite.binding as llvm
import torch


@dataclass(frozen=True)
class CpuFeatures:
    """LLVM compiles every kernel for any CPU; these decide which kernels are worth it."""

    wide_registers: bool  # AVX-512: 32 registers of 16 lanes, what the product's tile fills
    bf16_dot: bool  # AVX512-BF16: pairs of bf16 are multiplied without conversion
    bf16_tiles: bool  # AMX: oneDNN multiplies bf16 matrices several times as fast as we could

    @classmethod
    def of_this_machine(cls) -> "CpuFeatures":
        return _of_this_machine()

    def element(self, dtype: torch.dtype) -> str:
        """The element type that kernels are compiled for, as `language.py` names them."""
        if dtype == torch.bfloat16:
            return "bf16_dot" if self.bf16_dot else "bf16"
        return {torch.float32: "f32", torch.float16: "f16"}[dtype]

    def multiplies_panels(self, dtype: torch.dtype) -> bool:
        """Whether our own matrix product is the fastest for this type."""
        if dtype == torch.bfloat16:
            return self.wide_registers and self.bf16_dot and not self.bf16_tiles
        return self.wide_registers and dtype == torch.float32


@cache
def _of_this_machine() -> CpuFeatures:
    found = llvm.get_host_cpu_features()
    wide = all(found.get(name, False) for name in ("avx512f", "avx512bw", "avx512vl"))
    return CpuFeatures(
        wide_registers=wide,
        bf16_dot=wide and found.get("avx512bf16", False),
        bf16_tiles=found.get("amx-bf16", False),
    )
