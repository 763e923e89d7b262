"""Which twin of the kernels serves on a device; importing one imports nothing of the others."""

import torch

from engine.errors import ConfigError
from engine.kernels.interface import Kernels

KERNEL_NAMES = ("auto", "reference", "cpu", "triton")
E4M3_CAPABILITY = (8, 9)  # what converts it


def kernel_name(name: str, device: torch.device) -> str:
    """The twin that `name` means on a device; `auto` is triton on a GPU and cpu on a CPU."""
    if name not in KERNEL_NAMES:
        raise ConfigError("kernels", f"unknown {name!r}, must be one of {', '.join(KERNEL_NAMES)}")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError("device", f"{str(device)!r} has no kernels, must be cpu or cuda")
    if name == "auto":
        return "triton" if device.type == "cuda" else "cpu"
    wanted = {"cpu": "cpu", "triton": "cuda"}.get(name, device.type)
    if device.type != wanted:
        raise ConfigError("kernels", f"{name!r} runs on {wanted} only, the device is {device}")
    return name


def check_format(name: str, dtype: torch.dtype, kv_format: str, device: torch.device) -> None:
    """ConfigError for a type or a format of the cache that a twin, by its own name, cannot serve
    there."""
    if name == "cpu":
        _check_halves(dtype, kv_format)
    if (name, kv_format) == ("triton", "fp8_e4m3"):
        found = torch.cuda.get_device_capability(device)
        if found < E4M3_CAPABILITY:
            raise ConfigError(
                "kv_cache_dtype",
                f"{kv_format!r} needs a GPU of capability 8.9, this one has"
                f" {'.'.join(map(str, found))}; fp8_e5m2 and int8 do not",
            )


def _check_halves(dtype: torch.dtype, kv_format: str) -> None:
    """What is read by way of fp16, as fp8 is, needs a CPU that converts it."""
    from engine.kernels.cpu.features import converts_halves

    lacking = "needs a CPU with F16C, which this one does not have"
    if dtype == torch.float16 and not converts_halves():
        raise ConfigError("dtype", f"'float16' {lacking}; bfloat16 and float32 do not")
    if kv_format.startswith("fp8") and not converts_halves():
        raise ConfigError("kv_cache_dtype", f"{kv_format!r} {lacking}; int8 does not")


def load_kernels(name: str, device: torch.device) -> Kernels:
    match kernel_name(name, device):
        case "cpu":
            from engine.kernels.cpu.kernels import CpuKernels

            return CpuKernels()
        case "triton":
            from engine.kernels.triton.kernels import TritonKernels

            return TritonKernels.for_device(device)
        case _:
            from engine.kernels.reference import ReferenceKernels

            return ReferenceKernels()
