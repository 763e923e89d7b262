"""`kvrelay plan` as its user starts it."""

import json
import subprocess
import sys
from itertools import product

import pytest

from cluster.cli import main
from cluster.commands.plan import weight_bytes
from engine import sizing
from engine.config import EngineConfig
from engine.kernels import registry
from engine.kernels.reference import ReferenceKernels
from engine.model_source import resolve_model
from engine.models.describe import describe
from kv_cache.layout import KV_FORMATS


def plan(*arguments: str) -> int:
    """In this process; its exit code."""
    try:
        return main(["plan", "bundled", *arguments])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1


def test_the_table_names_every_format() -> None:
    command = [sys.executable, "-m", "cluster.cli", "plan", "bundled"]
    command += ["--memory", "1GiB", "--context", "1024"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0
    assert done.stderr == ""
    rows = {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    assert set(KV_FORMATS) <= rows


def test_json_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--memory", "1GiB", "--context", "1024", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cache_bytes"] == (1 << 30) - found["weight_bytes"]
    bf16 = next(row for row in found["formats"] if row["kv_format"] == "bf16")
    (num_blocks,) = bf16["num_blocks"]
    assert num_blocks == found["cache_bytes"] // bf16["block_bytes"]
    blocks_of_one = 1024 // found["block_size"] + 1
    assert bf16["num_sequences"] == (num_blocks - 1) // blocks_of_one


def test_weights_are_counted_as_an_engine_here_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an embedding that is the head too, with kernels that need it twice."""
    kernels = ReferenceKernels()
    monkeypatch.setattr(registry, "load_kernels", lambda *_: kernels)
    model = describe(resolve_model("bundled"))
    assert model.num_tied
    for copies, dtype in product((False, True), ("bfloat16", "float32")):
        monkeypatch.setattr(kernels, "copies_tied", lambda _, copies=copies: copies)
        there = sizing.weight_bytes(model, sizing.DTYPES[dtype], kernels)
        assert weight_bytes(model, EngineConfig(dtype=dtype)) == there


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--memory", "lots"], "memory"),
        (["--context", "1000000"], "context"),
        (["--block-size", "17"], "block_size"),
        (["--dtype", "int8"], "dtype"),
    ],
)
def test_a_wrong_value_is_named(
    capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert plan(*arguments) == 2
    assert named in capsys.readouterr().err.replace("-", "_")
