"""A process that calls a kernel, and says how often it was found on the disk, and whether Numba
has loaded what it can compile with. The cache is the user's, as XDG_CACHE_HOME has it."""

import sys
import tempfile

import numba
import torch
from numba.core.registry import cpu_target

from engine.kernels.cpu.activations import gated_activation
from engine.kernels.cpu.compiled import compiled
from engine.kernels.cpu.kernels import CpuKernels
from engine.kernels.interface import Activation


def main() -> None:
    numba.config.CACHE_DIR, tempfile.tempdir = "", None
    out = CpuKernels().gated_activation(torch.full((2, 4), 3.0), Activation.SILU)
    assert abs(out[0, 0].item() - 8.5732) < 1e-3
    hits = compiled(gated_activation, "f32").cache_hits
    sys.stdout.write(f"{hits} {bool(cpu_target.target_context._registries)}\n")


if __name__ == "__main__":
    main()
