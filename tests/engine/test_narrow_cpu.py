"""A CPU without AVX-512 answers with kernels of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.engine.models_on_disk import make_tiny
from tests.engine.test_exact import random_prompts

ROOT = Path(__file__).parents[2]
SECONDS = 300.0  # for what takes fifteen on a machine at rest


def test_an_engine_on_avx2_alone_answers_as_transformers(tmp_path: Path) -> None:
    """In fp16, which has a product of its own there, and is near enough for the same tokens."""
    tiny = make_tiny("llama", tmp_path / "model")
    prompts = [[5], *random_prompts(2, 30, 70)]
    environment = os.environ | {
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "",
        "NUMBA_CACHE_DIR": str(tmp_path / "kernels"),
    }
    child = subprocess.run(
        [sys.executable, "-m", "tests.engine.narrow_cpu", str(tiny.folder), json.dumps(prompts)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert child.returncode == 0, child.stderr
    assert json.loads(child.stdout) == tiny.greedy(prompts, 8)
    compiled = {path.name.rpartition("-")[0] for path in tmp_path.glob("kernels/**/*.code")}
    assert {
        f"{kernel}-f16_narrow" for kernel in ("product.product", "prefill.prefill", "decode.decode")
    } <= compiled
