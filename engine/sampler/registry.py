"""Which twin of the sampler serves; importing one imports nothing of the others."""

import torch

from engine.kernels.registry import KERNEL_NAMES
from engine.sampler.interface import Sampler
from engine.sampler.table import SamplingTable


def load_sampler(name: str, device: torch.device, table: SamplingTable) -> Sampler:
    """`name` is the kernels' (engine.kernels.registry has checked that it fits the device)."""
    assert name in KERNEL_NAMES
    if name == "reference":
        from engine.sampler.reference import ReferenceSampler

        return ReferenceSampler(table)
    if name == "triton" or device.type == "cuda":
        from engine.sampler.triton import TritonSampler

        return TritonSampler(table)
    from engine.sampler.cpu.sampler import CpuSampler

    return CpuSampler(table)
