"""Which kernels a CPU gets, by what it says of itself."""

from collections.abc import Iterator
from unittest.mock import patch

import llvmlite.binding as llvm
import pytest
import torch

from engine.kernels.cpu import features
from engine.kernels.cpu.features import CpuFeatures

AVX2 = ("avx2", "fma", "f16c")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512vl")
BF16 = (*AVX512, "avx512bf16")
AMX = (*BF16, "amx-tile", "amx-bf16")


@pytest.fixture
def anew() -> Iterator[None]:
    """What is found is not kept."""
    features._of_this_machine.cache_clear()
    yield
    features._of_this_machine.cache_clear()


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize(
    ("name", "has", "expected", "bf16"),
    [
        ("haswell", AVX2, CpuFeatures(False, False, False, True), "bf16_narrow"),
        ("icelake-server", AVX512, CpuFeatures(True, False, False), "bf16"),
        ("znver5", BF16, CpuFeatures(True, True, False), "bf16_dot"),
        # Such a CPU multiplies fp32 twice as fast as pairs.
        ("emeraldrapids", BF16, CpuFeatures(True, False, False), "bf16"),
        ("emeraldrapids", AMX, CpuFeatures(True, True, True), "bf16_dot"),
        ("x86-64", (), CpuFeatures(False, False, False), "bf16"),
    ],
)
def test_a_cpu_gets_what_is_fastest_there(
    name: str, has: tuple[str, ...], expected: CpuFeatures, bf16: str
) -> None:
    with (
        patch.object(llvm, "get_host_cpu_name", lambda: name),
        patch.object(llvm, "get_host_cpu_features", lambda: dict.fromkeys(has, True)),
        patch.object(features, "_may_tile", lambda: True),
    ):
        found = CpuFeatures.of_this_machine()
    assert found == expected
    assert found.element(torch.bfloat16) == bf16
