import subprocess
import sys

import pytest
import torch

from engine.errors import ConfigError
from engine.kernels.registry import check_format, kernel_name, load_kernels
from kv_cache.layout import KV_FORMATS

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("name", ["reference", "cpu", "auto"])
def test_a_twin_is_what_it_is_called(name: str) -> None:
    assert load_kernels(name, CPU).name == kernel_name(name, CPU)


def test_auto_follows_the_device() -> None:
    assert kernel_name("auto", CPU) == "cpu"
    assert kernel_name("auto", CUDA) == "triton"
    assert kernel_name("reference", CUDA) == "reference"


@pytest.mark.parametrize(
    ("name", "device", "field", "hint"),
    [
        ("trion", CPU, "kernels", "auto, reference, cpu, triton"),
        ("triton", CPU, "kernels", "cuda only"),
        ("cpu", CUDA, "kernels", "cpu only"),
        ("auto", torch.device("meta"), "device", "cpu or cuda"),
    ],
)
def test_what_cannot_be_is_named(name: str, device: torch.device, field: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint) as caught:
        load_kernels(name, device)
    assert caught.value.field == field


@pytest.mark.parametrize("format", sorted({*KV_FORMATS} - {"int4"}))
def test_a_format_without_kernels_is_named(format: str) -> None:
    check_format("reference", format)
    for name in ("cpu", "triton"):
        if not KV_FORMATS[format].quantised:
            check_format(name, format)
            continue
        with pytest.raises(ConfigError, match=f"{format}.*{name}") as caught:
            check_format(name, format)
        assert caught.value.field == "kv_cache_dtype"


def test_choosing_one_imports_nothing_of_the_others() -> None:
    code = (
        "import sys, torch; from engine.kernels.registry import kernel_name, load_kernels; "
        "before = {'numba', 'triton'} & set(sys.modules); "
        "load_kernels('reference', torch.device('cpu')); "
        "print(sorted(m for m in sys.modules if m.startswith('engine.kernels.')), "
        "sorted(({'numba', 'triton'} & set(sys.modules)) - before))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = ["engine.kernels.interface", "engine.kernels.reference", "engine.kernels.registry"]
    assert run.stdout.strip() == f"{modules} []"
