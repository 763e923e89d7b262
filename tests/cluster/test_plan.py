"""`kvrelay plan` as its user starts it."""

import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import fields
from typing import Any

import pytest

from cluster.cli import main
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model_source import resolve_model
from engine.models.describe import describe
from engine.sizing import decide_shape
from kv_cache.layout import KV_FORMATS


def plan(*arguments: str) -> int:
    """In this process; its exit code."""
    try:
        return main(["plan", "bundled", *arguments])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1


def test_the_table_names_every_format() -> None:
    command = [sys.executable, "-m", "cluster.cli", "plan", "bundled"]
    command += ["--device", "cuda", "--memory", "1GiB", "--context", "1024"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0
    assert done.stderr == ""
    rows = {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    assert set(KV_FORMATS) <= rows
    heads = next(line for line in done.stdout.splitlines() if line.startswith("KV format"))
    assert heads.split()[-3:] == ["blocks", "tokens", "sequences"]


def test_json_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--device", "cpu", "--memory", "1GiB", "--context", "1024", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    taken = found["weight_bytes"] + found["table_bytes"]
    assert found["cache_bytes"] == (1 << 30) - taken
    bf16 = next(row for row in found["formats"] if row["kv_format"] == "bf16")
    (num_blocks,) = bf16["num_blocks"]
    assert num_blocks == found["cache_bytes"] // bf16["block_bytes"]
    assert bf16["num_tokens"] == (num_blocks - 1) * found["block_size"]
    blocks_of_one = 1024 // found["block_size"] + 1
    assert bf16["num_sequences"] == (num_blocks - 1) // blocks_of_one


def test_the_knobs_of_an_engine_that_leave_the_cache_more_or_less(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def planned(*arguments: str) -> dict[str, Any]:
        assert plan("--memory", "8GiB", "--context", "1024", "--json", *arguments) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    usual, half = (
        planned("--device", "cuda", *share) for share in ((), ("--gpu-memory-utilization", "0.5"))
    )
    assert usual["gpu_memory_utilization"] == 0.9
    assert half["cache_bytes"] == (4 << 30) - half["weight_bytes"] - half["step_bytes"]
    more = planned("--device", "cuda", "--max-num-seqs", "2048", "--max-num-batched-tokens", "8192")
    assert more["step_bytes"] > usual["step_bytes"]
    assert more["cache_bytes"] + more["step_bytes"] == usual["cache_bytes"] + usual["step_bytes"]
    few, many = (planned("--device", "cpu", "--max-num-seqs", count) for count in ("64", "128"))
    per_sequence = (many["table_bytes"] - few["table_bytes"]) // 64
    assert per_sequence > 1024 * 4, "of every token its id"
    assert many["cache_bytes"] == few["cache_bytes"] - 64 * per_sequence


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16", "float32"])
def test_served_is_what_an_engine_would_take(
    capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    assert plan("--memory", "1GiB", "--dtype", dtype, "--json") == 0
    found = json.loads(capsys.readouterr().out)["formats"]
    model = describe(resolve_model("bundled"))
    taken = set()
    (knob,) = (knob for knob in fields(EngineConfig) if knob.name == "kv_cache_dtype")
    for name in knob.metadata["choices"]:
        with suppress(ConfigError):
            shape = decide_shape(EngineConfig(dtype=dtype, kv_cache_dtype=name), model)
            taken.add(shape.kv_format.name)
    assert {row["kv_format"] for row in found if row["served"]} == taken
    assert len(taken) == 4, "the weights' own and three quantised ones"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--memory", "lots"], "memory"),
        (["--context", "1000000"], "context"),
        (["--block-size", "17"], "block_size"),
        (["--dtype", "int8"], "dtype"),
        (["--device", "tpu"], "device"),
        (["--device", "cuda", "--memory", "1GiB", "--gpu-memory-utilization", "2"], "utilization"),
        (["--device", "cpu", "--gpu-memory-utilization", "0.5"], "gpu_memory_utilization"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--max-num-seqs", "4096"], "max_num_batched_tokens: 2048, must be at least"),
    ],
)
def test_a_wrong_value_is_named(
    capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert plan(*arguments) == 2
    assert named in capsys.readouterr().err.replace("-", "_")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("memory", ["0", "1KiB", "8MiB"])
def test_a_memory_without_room_for_a_sequence_is_told_and_ends_with_1(
    capsys: pytest.CaptureFixture[str], device: str, memory: str
) -> None:
    assert plan("--device", device, "--memory", memory) == 1
    said = capsys.readouterr().out
    told = {"0": "of 0 bytes", "1KiB": "of 1.0 KiB", "8MiB": "of 8.0 MiB"}[memory]
    assert told in said
    assert "nothing left for the cache" in said
    assert "bf16: a sequence of 2048 tokens needs" in said
    assert plan("--device", device, "--memory", memory, "--json") == 1


def test_a_memory_in_which_a_smaller_format_fits_is_enough(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """But not one that no engine serves."""

    def sized(fits: str) -> tuple[int, dict[str, bool]]:
        status = plan("--device", "cpu", "--memory", str(taken + needs[fits]), "--json")
        rows = json.loads(capsys.readouterr().out)["formats"]
        return status, {row["kv_format"]: row["problem"] is None for row in rows}

    assert plan("--device", "cpu", "--memory", "1GiB", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    taken = found["weight_bytes"] + found["table_bytes"]
    blocks = found["context_tokens"] // found["block_size"] + 2  # the null block, too
    needs = {row["kv_format"]: blocks * row["block_bytes"] for row in found["formats"]}
    assert needs["int4"] < needs["int8"] < needs["bf16"]
    status, fit = sized("int8")
    assert (status, fit["int8"], fit["bf16"]) == (0, True, False)
    status, fit = sized("int4")
    assert (status, fit["int4"], fit["int8"]) == (1, True, False)
