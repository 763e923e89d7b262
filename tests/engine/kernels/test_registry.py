import platform
import subprocess
import sys
from contextlib import nullcontext

import llvmlite.binding as llvm
import pytest
import torch

from engine.errors import ConfigError
from engine.kernels.cpu import features
from engine.kernels.registry import check_format, kernel_name, load_kernels

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


@pytest.mark.parametrize(
    ("capability", "served"), [((8, 6), False), ((8, 9), True), ((9, 0), True)]
)
def test_a_gpu_that_cannot_convert_a_format_is_told(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], served: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for format in ("bf16", "fp8_e5m2", "int8"):
        check_format("triton", torch.float16, format, CUDA)
    with nullcontext() if served else pytest.raises(ConfigError, match="this one has 8.6"):
        check_format("triton", torch.float16, "fp8_e4m3", CUDA)


@pytest.mark.parametrize("converts", [False, True])
def test_a_cpu_that_cannot_convert_fp16_is_told(
    monkeypatch: pytest.MonkeyPatch, converts: bool
) -> None:
    """It would end the process, when the first request has come."""
    monkeypatch.setattr(features, "converts_halves", lambda: converts)
    check_format("cpu", torch.float32, "int8", CPU)
    check_format("cpu", torch.bfloat16, "bf16", CPU)
    check_format("reference", torch.float16, "fp8_e4m3", CPU)
    for dtype, format, field in (
        (torch.float16, "fp16", "dtype"),
        (torch.float16, "int8", "dtype"),
        (torch.bfloat16, "fp8_e4m3", "kv_cache_dtype"),
        (torch.float32, "fp8_e5m2", "kv_cache_dtype"),
    ):
        with nullcontext() if converts else pytest.raises(ConfigError, match=f"^{field}: .*F16C"):
            check_format("cpu", dtype, format, CPU)


@pytest.mark.parametrize(
    ("machine", "has", "expected"),
    [("x86_64", {"f16c": True}, True), ("x86_64", {"sse4.2": True}, False), ("aarch64", {}, True)],
)
def test_which_cpu_converts_fp16(
    monkeypatch: pytest.MonkeyPatch, machine: str, has: dict[str, bool], expected: bool
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: has)
    assert features.converts_halves.__wrapped__() is expected


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
