"""Kernels compile for CPUs that the tests do not run on: what a CPU lacks ends the process."""

import os
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import pytest

ROOT = Path(__file__).parents[3]
SECONDS = 900  # for what takes thirty on a machine at rest
COMPILE = """
from engine.kernels.cpu.compiled import compiled
from engine.kernels.cpu.prefill import prefill
from engine.kernels.cpu.product import product
from engine.kernels.cpu.short import short_rows
from engine.kernels.cpu.tile_prefill import tile_prefill
from engine.kernels.cpu.tile_product import tile_product

for function, element in ({kernels}):
    compiled(function, element)
print("compiled")
"""


@pytest.mark.parametrize(
    ("cpu", "kernels"),
    [
        pytest.param("nehalem", "(prefill, 'bf16+int8'),", id="sse"),
        pytest.param(
            "haswell",
            "(prefill, 'bf16_narrow+int8'), (product, 'f16_narrow'),"
            "(product, 'bf16_narrow+short'), (short_rows, 'bf16_narrow+short')",
            id="avx2",
        ),
        pytest.param(
            "skylake-avx512", "(product, 'bf16+short'), (short_rows, 'bf16+short')", id="avx512"
        ),
        pytest.param(
            "znver4",
            "(prefill, 'bf16_dot+fp8_e4m3'), (product, 'bf16_dot+short')",
            id="avx512-bf16",
        ),
        pytest.param(
            "sapphirerapids",
            "(tile_prefill, 'bf16_tiles+fp8_e5m2'), (tile_product, 'bf16_tiles')",
            id="amx",
        ),
    ],
)
def test_kernels_compile_for_a_cpu_of_another_kind(cpu: str, kernels: str) -> None:
    """Once on a machine: what comes out is kept, by its source and its CPU."""
    environment = os.environ | {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": ""}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE.format(kernels=kernels)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "compiled\n", done.stderr


@pytest.mark.skipif(
    not llvm.get_host_cpu_features().get("avx512bf16", False),
    reason="beside its tiles a CPU with AMX has AVX512-BF16",
)
@pytest.mark.timeout(SECONDS + 60)
def test_kernels_of_tiles_are_right_on_a_cpu_without_them(tmp_path: Path) -> None:
    plugin, folder = "tests.engine.kernels.tiles_in_memory", Path(__file__).parent
    chosen = [
        f"{folder}/test_cpu_ops.py::test_linear",
        f"{folder}/test_cpu_attention.py::test_attention_of_any_shape",
        f"{folder}/test_cpu_attention.py::test_a_prompt_gets_the_same_bits_in_any_chunks",
    ]
    names = ["-k", "bf16 and not plain and not pairs"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", plugin, "-p", "no:cacheprovider", *names, *chosen],
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout
    compiled = {path.name.rpartition("-")[0] for path in tmp_path.glob("**/*.code")}
    assert {
        f"{kernel}.{kernel}-bf16_tiles" for kernel in ("tile_product", "tile_prefill")
    } <= compiled
