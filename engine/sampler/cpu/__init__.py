"""The compiled sampler for CPUs. Loops are left to LLVM to vectorise: any CPU will do."""

from engine.sampler.cpu.sampler import CpuSampler

__all__ = ["CpuSampler"]
