"""What a run was taken on."""

import platform
from importlib.metadata import PackageNotFoundError, version

import torch


def describe() -> dict[str, str]:
    facts = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "transformers"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "none"
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts["device"] = properties.name
        facts["multiprocessors"] = str(properties.multi_processor_count)
        facts["memory"] = f"{properties.total_memory / (1 << 30):.0f} GiB"
    else:
        facts["device"] = "none, kernels interpreted"
    return facts
