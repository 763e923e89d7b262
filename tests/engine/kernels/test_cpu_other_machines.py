"""Kernels compile for CPUs that the tests do not run on: what a CPU lacks ends the process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILE = """
from engine.kernels.cpu.compiled import compiled
from engine.kernels.cpu.prefill import prefill
from engine.kernels.cpu.product import product
from engine.kernels.cpu.tile_product import tile_product

for function, element in ({kernels}):
    compiled(function, element)
print("compiled")
"""


@pytest.mark.parametrize(
    ("cpu", "kernels"),
    [
        pytest.param(
            "haswell", "(prefill, 'bf16_narrow+int8'), (product, 'bf16_narrow')", id="avx2"
        ),
        pytest.param("skylake-avx512", "(product, 'bf16'),", id="avx512"),
        pytest.param("znver4", "(prefill, 'bf16_dot+fp8_e4m3'),", id="avx512-bf16"),
        pytest.param(
            "sapphirerapids",
            "(prefill, 'bf16_tiles+fp8_e5m2'), (tile_product, 'bf16_tiles')",
            id="amx",
        ),
    ],
)
def test_kernels_compile_for_a_cpu_of_another_kind(cpu: str, kernels: str, tmp_path: Path) -> None:
    environment = os.environ | {
        "NUMBA_CPU_NAME": cpu,
        "NUMBA_CPU_FEATURES": "",
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPILE.format(kernels=kernels)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "compiled\n", done.stderr
