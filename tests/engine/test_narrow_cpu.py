"""A CPU without AVX-512 answers with kernels of its own, and needs no compiler for them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.models_on_disk import make_tiny
from tests.engine.test_exact import random_prompts

ROOT = Path(__file__).parents[2]
SECONDS = 300.0  # for what takes fifteen on a machine at rest


@pytest.mark.parametrize(
    ("cpu", "dtype", "kernels"),
    [
        pytest.param(
            "haswell",
            "float16",
            {
                "product.product-f16_narrow",
                "prefill.prefill-f16_narrow",
                "decode.decode-f16_narrow",
            },
            id="avx2",
        ),
        pytest.param("nehalem", "float32", {"prefill.prefill-f32", "decode.decode-f32"}, id="sse"),
    ],
)
def test_an_engine_on_a_lesser_cpu_answers_as_transformers(
    cpu: str, dtype: str, kernels: set[str], tmp_path: Path
) -> None:
    """fp16 has a product of its own with AVX2, and is near enough for the same tokens; with less
    than that there is none."""
    tiny = make_tiny("llama", tmp_path / "model")
    prompts = [[5], *random_prompts(2, 30, 70)]
    without_programs = tmp_path / "no programs"
    without_programs.mkdir()
    environment = os.environ | {
        "PATH": str(without_programs),  # a compiler above all
        "NUMBA_CPU_NAME": cpu,
        "NUMBA_CPU_FEATURES": "",
    }
    module = [sys.executable, "-m", "tests.engine.narrow_cpu"]
    child = subprocess.run(
        [*module, str(tiny.folder), dtype, json.dumps(prompts)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert child.returncode == 0, child.stderr
    answers, used = json.loads(child.stdout)
    assert answers == tiny.greedy(prompts, 8)
    assert kernels <= set(used)
