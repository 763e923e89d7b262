"""What is planned is what an engine would do."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from cluster.commands.plan import as_table
from engine import capacity as capacity_module
from engine.capacity import plan_capacity, weight_bytes
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kernels.reference import ReferenceKernels
from engine.kernels.triton.kernels import TritonKernels
from engine.sizing import (
    DTYPES,
    Memory,
    check_host,
    decide_shape,
    gpu_step_bytes,
    size_cache,
)
from engine.sizing import weight_bytes as loaded_bytes
from kv_cache.layout import KvGroup
from tests.engine.test_sizing import GIB, MIB
from tests.engine.test_sizing import MODEL as WITHOUT_WINDOWS

MODEL = replace(
    WITHOUT_WINDOWS,
    groups=(
        KvGroup(tuple(range(8)), 8, (128, 128)),
        KvGroup(tuple(range(8, 16)), 8, (128, 128), window=512),
    ),
)
WEIGHTS = 2 * MODEL.num_parameters


def test_formats_that_are_only_planned_are_counted() -> None:
    capacity = plan_capacity(EngineConfig(device="cpu", max_model_len=1024), MODEL, 8 * GIB)
    by_name = {row.kv_format: row for row in capacity.formats}
    assert capacity.cache_bytes == 8 * GIB - WEIGHTS - capacity.table_bytes
    assert by_name["bf16"].bytes_per_token == 16 * 8 * 2 * 128 * 2
    assert by_name["fp8_e4m3"].bytes_per_token == 16 * 8 * 2 * (128 + 4), "a scale a head"
    served = {name for name, row in by_name.items() if row.served}
    assert served == {"bf16", "fp8_e4m3", "fp8_e5m2", "int8"}
    int4, fp8, bf16 = (by_name[name].num_sequences for name in ("int4", "fp8_e4m3", "bf16"))
    assert int4 is not None
    assert fp8 is not None
    assert bf16 is not None
    assert int4 > 1.8 * fp8 > 1.8 * 1.8 * bf16


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_a_plan_has_the_engines_own_blocks(device: str, kv_cache_dtype: str) -> None:
    """On a GPU by itself; on a CPU if it is told to take all that there is."""
    capacity = plan_capacity(EngineConfig(device=device), MODEL, 24 * GIB)
    there = torch.device(device)
    config = EngineConfig(device=device, kv_cache_dtype=kv_cache_dtype)
    shape = decide_shape(config, MODEL, there)
    memory = Memory(24 * GIB, 24 * GIB)
    by_itself = size_cache(config, shape, MODEL, memory, WEIGHTS)
    if device == "cpu":
        all_of_it = replace(config, kv_cache_memory_bytes=capacity.cache_bytes)
        plan = size_cache(all_of_it, shape, MODEL, memory, WEIGHTS)
    else:
        plan = by_itself
    (row,) = (row for row in capacity.formats if row.kv_format == shape.kv_format.name)
    assert capacity.block_size == shape.block_size
    assert row.num_blocks == plan.num_blocks
    assert row.num_tokens == plan.num_tokens
    assert row.num_sequences == plan.num_sequences(MODEL.max_model_len)
    assert capacity.default_cache_bytes == pytest.approx(by_itself.num_bytes, rel=0.01)
    steps = gpu_step_bytes(config, shape, MODEL) if device == "cuda" else 0
    assert capacity.step_bytes == steps


def test_a_plan_leaves_room_for_the_tables_of_an_engine() -> None:
    """And no more than that."""
    config = EngineConfig(device="cpu", max_num_seqs=2048)
    model = replace(MODEL, position_bytes=512)
    memory = Memory(24 * GIB, 24 * GIB)
    left = plan_capacity(config, model, 24 * GIB).cache_bytes
    shape = decide_shape(config, model)

    def check(cache_bytes: int) -> None:
        told = replace(config, kv_cache_memory_bytes=cache_bytes)
        plan = size_cache(told, shape, model, memory, WEIGHTS)
        check_host(told, shape, model, plan, 24 * GIB, WEIGHTS)

    check(left)
    with pytest.raises(ConfigError, match="^max_num_seqs: tables"):
        check(left + 8 * MIB)


def test_what_tokens_means_beside_windows_is_told() -> None:
    config = EngineConfig(device="cpu", max_model_len=1024)
    for model, told in ((MODEL, True), (WITHOUT_WINDOWS, False)):
        text = as_table(plan_capacity(config, model, 8 * GIB))
        assert ("layers with a window" in text) is told


def test_a_gpu_that_is_full_of_weights_is_told_so() -> None:
    capacity = plan_capacity(EngineConfig(device="cuda"), MODEL, WEIGHTS + 64 * MIB)
    assert capacity.cache_bytes == 0
    assert {row.num_blocks for row in capacity.formats} == {None}
    assert all(row.problem for row in capacity.formats)


def test_the_share_is_of_all_that_a_gpu_has_though_others_hold_some_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 * GIB, 80 * GIB))
    capacity = plan_capacity(EngineConfig(device="cuda"), MODEL, None)
    assert (capacity.memory_bytes, capacity.held_bytes) == (80 * GIB, 30 * GIB)
    taken = capacity.held_bytes + capacity.weight_bytes + capacity.step_bytes
    assert taken + capacity.cache_bytes == int(0.9 * 80 * GIB)
    text = as_table(capacity)
    assert "0.9 of 80.00 GiB is used: others 30.00 GiB, bfloat16 weights" in text


def test_memory_of_a_gpu_that_is_not_here_must_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError) as caught:
        plan_capacity(EngineConfig(device="cuda"), MODEL, None)
    assert caught.value.field == "memory"


def test_weights_are_counted_as_an_engine_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an embedding that is the head too, with kernels that need it twice."""
    kernels = ReferenceKernels()
    monkeypatch.setattr(capacity_module, "load_kernels", lambda *_: kernels)
    model = replace(MODEL, num_tied=32000 * 2048)
    for copies, dtype in product((False, True), ("bfloat16", "float32")):
        monkeypatch.setattr(kernels, "copies_tied", lambda _, copies=copies: copies)
        config = EngineConfig(device="cpu", dtype=dtype)
        shape = decide_shape(config, model)
        assert weight_bytes(config, shape, model) == loaded_bytes(model, DTYPES[dtype], kernels)
        on_gpu = replace(shape, device=torch.device("cuda"))
        there = loaded_bytes(model, DTYPES[dtype], TritonKernels(1))
        assert weight_bytes(config, on_gpu, model) == there
