"""Which twin of the kernels serves on a device; importing one imports nothing of the others."""

import torch

from engine.errors import ConfigError
from engine.kernels.interface import Kernels

KERNEL_NAMES = ("auto", "reference", "cpu", "triton")


def load_kernels(name: str, device: torch.device) -> Kernels:
    """`auto` is triton on a GPU and cpu on a CPU."""
    if name not in KERNEL_NAMES:
        raise ConfigError("kernels", f"unknown {name!r}, must be one of {', '.join(KERNEL_NAMES)}")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError("device", f"{str(device)!r} has no kernels, must be cpu or cuda")
    if name == "auto":
        name = "triton" if device.type == "cuda" else "cpu"
    if name == "reference":
        from engine.kernels.reference import ReferenceKernels

        return ReferenceKernels()
    if name == "cpu":
        _require_device(name, device, "cpu")
        from engine.kernels.cpu.kernels import CpuKernels

        return CpuKernels()
    _require_device(name, device, "cuda")
    from engine.kernels.triton.kernels import TritonKernels

    return TritonKernels()


def _require_device(name: str, device: torch.device, wanted: str) -> None:
    if device.type != wanted:
        raise ConfigError("kernels", f"{name!r} runs on {wanted} only, the device is {device}")
