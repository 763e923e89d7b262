"""What fits is decided before anything is loaded, and what does not is told with what would."""

import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine import engine as engine_module
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, ModelError
from engine.kernels.cpu.features import CpuFeatures
from engine.kernels.cpu.kernels import CpuKernels
from engine.kernels.reference import ReferenceKernels
from engine.machine import num_cpus
from engine.memory import CachePlan, bytes_needed
from engine.models.interface import ModelDescription
from engine.sizing import (
    CPU_CACHE_BYTES,
    EngineShape,
    Memory,
    check_host,
    decide_shape,
    gpu_step_bytes,
    size_cache,
    table_bytes,
    weight_bytes,
)
from engine.slots import SlotTable, slot_bytes
from kv_cache.layout import BlockLayout, KvGroup
from tests.engine.models_on_disk import make_tiny
from tests.populating import may_populate

MIB, GIB = 1 << 20, 1 << 30
# 2 billion parameters in bf16; 64 KiB of cache a token, so a longest sequence has half a GiB
MODEL = ModelDescription(
    architecture="LlamaForCausalLM",
    native=True,
    vocab_size=32000,
    hidden_size=2048,
    num_layers=16,
    num_heads=16,
    mlp_size=8192,
    max_model_len=8192,
    dtype="bfloat16",
    num_parameters=2 * GIB,
    groups=(KvGroup(tuple(range(16)), 8, (128, 128)),),
)
WEIGHTS = weight_bytes(MODEL, torch.bfloat16, ReferenceKernels())


def shape_of(config: EngineConfig, device: str) -> EngineShape:
    return decide_shape(replace(config, block_size=16), MODEL, torch.device(device))


def refusal(
    config: EngineConfig, device: str, memory: Memory, to_load_bytes: int = WEIGHTS
) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        size_cache(config, shape_of(config, device), MODEL, memory, to_load_bytes)
    return caught.value


def test_weights_that_do_not_fit_are_refused_with_both_sizes() -> None:
    error = refusal(EngineConfig(), "cpu", Memory(3 * GIB, 3 * GIB))
    assert error.field == "model"
    assert "weights take 4.00 GiB in bfloat16" in str(error)
    assert "3.00 GiB of memory are available" in str(error)
    assert str(error).endswith("of 8192 tokens it needs 4.50 GiB")
    loaded = refusal(EngineConfig(), "cpu", Memory(0, 3 * GIB), 0)
    assert str(loaded) == "model: nothing is left of the memory beside its weights"


def test_half_as_large_a_type_is_named_where_that_fits() -> None:
    config, memory = EngineConfig(dtype="float32"), Memory(5 * GIB, 5 * GIB)
    assert "as bfloat16 they take half" in str(refusal(config, "cpu", memory, 2 * WEIGHTS))
    memory = Memory(WEIGHTS, WEIGHTS)
    assert "bfloat16" not in str(refusal(config, "cpu", memory, 2 * WEIGHTS))


def test_a_cache_that_does_not_fit_beside_the_weights() -> None:
    config = EngineConfig(kv_cache_memory_bytes=2 * GIB)
    error = refusal(config, "cpu", Memory(5 * GIB, 5 * GIB))
    assert error.field == "kv_cache_memory_bytes"
    assert str(error).endswith("2.00 GiB, and 1.00 GiB are available, beside weights of 4.00 GiB")
    assert str(refusal(config, "cpu", Memory(GIB, GIB), 0)).endswith("1.00 GiB are available")


@pytest.mark.parametrize("to_load_bytes", [WEIGHTS, 0])
def test_a_cache_of_a_size_that_was_said_leaves_a_gpu_room_for_its_steps(
    to_load_bytes: int,
) -> None:
    """The start, whose steps are small, would pass without it."""
    config = EngineConfig(kv_cache_memory_bytes=2 * GIB)
    shape = shape_of(config, "cuda")
    steps = gpu_step_bytes(config, shape, MODEL)
    fitting = to_load_bytes + 2 * GIB + steps
    plan = size_cache(config, shape, MODEL, Memory(fitting, 80 * GIB), to_load_bytes)
    assert plan.num_bytes <= 2 * GIB
    error = refusal(config, "cuda", Memory(fitting - GIB, 80 * GIB), to_load_bytes)
    assert error.field == "kv_cache_memory_bytes"
    weights = "weights of 4.00 GiB and " if to_load_bytes else ""
    told = f"1.00 GiB are available, beside {weights}steps of {steps / MIB:.1f} MiB"
    assert str(error).endswith(told)
    error = refusal(config, "cuda", Memory(to_load_bytes + MIB, 80 * GIB), to_load_bytes)
    assert "and 0 bytes are available" in str(error)


def test_before_loading_it_is_what_it_is_afterwards() -> None:
    config = EngineConfig()
    for device, before in (("cpu", Memory(8 * GIB, 8 * GIB)), ("cuda", Memory(22 * GIB, 24 * GIB))):
        shape = shape_of(config, device)
        after = Memory(before.available_bytes - WEIGHTS, before.total_bytes)
        assert size_cache(config, shape, MODEL, before, WEIGHTS) == size_cache(
            config, shape, MODEL, after
        )


def test_nobody_is_advised_to_ask_for_more_than_there_is() -> None:
    """A quarter of what the weights leave, 256 MiB, is less than one sequence; all would do."""
    error = refusal(EngineConfig(), "cpu", Memory(5 * GIB, 5 * GIB))
    assert error.field == "max_model_len"
    assert "of cache and 256.0 MiB are there" in str(error)
    least = int(re.findall("kv_cache_memory_bytes to at least ([0-9]+)", str(error))[0])
    config = EngineConfig(kv_cache_memory_bytes=least)
    size_cache(config, shape_of(config, "cpu"), MODEL, Memory(5 * GIB, 5 * GIB), WEIGHTS)
    little = WEIGHTS + least - 1
    error = refusal(EngineConfig(), "cpu", Memory(little, little))
    assert "kv_cache_memory_bytes" not in str(error)
    fitting = int(re.findall("max_model_len to at most ([0-9]+)", str(error))[0])
    config = EngineConfig(max_model_len=fitting)
    size_cache(config, shape_of(config, "cpu"), MODEL, Memory(little, little), WEIGHTS)


def test_a_share_of_a_gpu_that_leaves_nothing_is_told_with_one_that_does() -> None:
    """8 GiB: 1 is others', 4 the weights', some a step's."""
    memory = Memory(7 * GIB, 8 * GIB)
    config = EngineConfig(gpu_memory_utilization=0.5)
    steps = gpu_step_bytes(config, shape_of(config, "cuda"), MODEL)
    nothing_left = Memory(4 * GIB + WEIGHTS + steps, 8 * GIB)
    assert refusal(config, "cuda", nothing_left).field == "gpu_memory_utilization"
    error = refusal(config, "cuda", memory)
    assert error.field == "gpu_memory_utilization"
    assert f"take {5 + steps / GIB:.2f} GiB" in str(error)
    assert "-" not in str(error), "bytes are never negative"
    share = float(re.findall("at least ([0-9.]+)", str(error))[0])
    assert share * 8 * GIB - 5.5 * GIB - steps < 8 * GIB / 100 + 4 * MIB, "no more than it takes"
    config = EngineConfig(gpu_memory_utilization=share)
    plan = size_cache(config, shape_of(config, "cuda"), MODEL, memory, WEIGHTS)
    assert plan.num_sequences(8192) == 1
    assert plan.num_bytes <= share * 8 * GIB - GIB - WEIGHTS - steps


def test_a_gpu_that_is_too_small_is_told_so() -> None:
    memory = Memory(5 * GIB, 5 * GIB)
    error = refusal(EngineConfig(), "cuda", memory)
    assert error.field == "gpu_memory_utilization"
    assert "set it" not in str(error)
    assert "a sequence of the longest needs 514.0 MiB" in str(error)
    assert refusal(EngineConfig(), "cuda", Memory(3 * GIB, 5 * GIB)).field == "model"


def test_all_of_a_gpu_is_advised_where_that_is_just_enough() -> None:
    shape = shape_of(EngineConfig(), "cuda")
    steps = gpu_step_bytes(EngineConfig(), shape, MODEL)
    layouts = [BlockLayout(group, 16, shape.kv_format) for group in MODEL.groups]
    least = bytes_needed(layouts, 8192, shape.chunk_tokens)
    memory = Memory(WEIGHTS + steps + least, 8 * GIB)
    assert str(refusal(EngineConfig(), "cuda", memory)).endswith("; set it to at least 1.0")
    size_cache(EngineConfig(gpu_memory_utilization=1.0), shape, MODEL, memory, WEIGHTS)


def test_a_share_of_a_gpu_is_refused_where_there_is_none() -> None:
    """Whatever it is: the default's 0.9 would do nothing there either."""
    for share in (0.5, 0.9):
        with pytest.raises(ConfigError, match="kv_cache_memory_bytes") as caught:
            shape_of(EngineConfig(gpu_memory_utilization=share), "cpu")
        assert caught.value.field == "gpu_memory_utilization"
    assert shape_of(EngineConfig(), "cpu").device.type == "cpu"
    assert shape_of(EngineConfig(gpu_memory_utilization=0.5), "cuda").device.type == "cuda"


def test_a_gpu_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="^device: 'cuda', and torch sees no such device here"):
        decide_shape(EngineConfig(device="cuda"), MODEL)
    assert decide_shape(EngineConfig(), MODEL).device.type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device in ("auto", "cuda"):
        assert decide_shape(EngineConfig(device=device), MODEL).device.type == "cuda"


def test_what_was_said_counts_for_more_than_what_is_found() -> None:
    for device, ahead in (("cpu", False), ("cuda", True)):
        assert shape_of(EngineConfig(), device).async_scheduling is ahead
        said = EngineConfig(async_scheduling=not ahead, num_threads=num_cpus() + 1)
        shape = shape_of(said, device)
        assert (shape.async_scheduling, shape.num_threads) == (not ahead, num_cpus() + 1)
    assert shape_of(EngineConfig(), "cpu").num_threads == num_cpus()


def test_a_step_has_room_for_a_token_of_every_sequence() -> None:
    with pytest.raises(ConfigError, match="63, must be at least max_num_seqs, 64") as caught:
        shape_of(EngineConfig(max_num_batched_tokens=63), "cpu")
    assert caught.value.field == "max_num_batched_tokens"
    shape_of(EngineConfig(max_num_batched_tokens=64), "cpu")


def test_a_cpus_cache_is_modest() -> None:
    memory = Memory(64 * GIB, 64 * GIB)
    short = EngineConfig(max_model_len=1024)
    plan = size_cache(short, shape_of(short, "cpu"), MODEL, memory, WEIGHTS)
    assert plan.num_bytes == pytest.approx(CPU_CACHE_BYTES, rel=0.01)


def test_a_tied_weight_counts_as_often_as_it_is_there() -> None:
    """torch's own layout for bf16, of a CPU without products of pairs, cannot be read by rows."""
    tied = replace(MODEL, num_tied=32000 * 2048)
    avx2 = CpuFeatures(wide_registers=False, bf16_dot=False, bf16_tiles=False)
    pairs = CpuFeatures(wide_registers=True, bf16_dot=True, bf16_tiles=False)
    once = tied.num_parameters
    assert weight_bytes(tied, torch.bfloat16, CpuKernels(pairs)) == 2 * once
    assert weight_bytes(tied, torch.float32, CpuKernels(avx2)) == 4 * once
    copied = torch.ops.mkldnn._is_mkldnn_bf16_supported() * tied.num_tied
    assert weight_bytes(tied, torch.bfloat16, CpuKernels(avx2)) == 2 * (once + copied)


def host_refusal(
    config: EngineConfig, device: str, model: ModelDescription, host_bytes: int
) -> ConfigError:
    memory = Memory(64 * GIB, 64 * GIB)
    shape = shape_of(config, device)
    plan = size_cache(config, shape, model, memory, WEIGHTS)
    with pytest.raises(ConfigError) as caught:
        check_host(config, shape, model, plan, host_bytes, WEIGHTS)
    return caught.value


@pytest.mark.parametrize(
    ("device", "beside"),
    [("cpu", "beside weights and cache"), ("cuda", "to be pinned, in powers of two")],
)
def test_swap_space_that_the_host_has_not_is_refused_with_what_it_has(
    device: str, beside: str
) -> None:
    """6 GiB; on a CPU 4 are the weights', half a GiB is the cache's. A GPU's is a power of two."""
    config = EngineConfig(preemption_mode="swap", swap_space_bytes=7 * GIB)
    error = host_refusal(config, device, MODEL, 6 * GIB)
    assert error.field == "swap_space_bytes"
    assert f"are available {beside};" in str(error)
    most = int(re.findall("at most ([0-9]+)", str(error))[0])
    shape = shape_of(config, device)
    plan = size_cache(config, shape, MODEL, Memory(64 * GIB, 64 * GIB), WEIGHTS)
    left = 2 * GIB - plan.num_bytes - table_bytes(shape, MODEL, 64, 8192)
    assert most == (left if device == "cpu" else 4 * GIB)
    fitting = replace(config, swap_space_bytes=most)
    check_host(fitting, shape, MODEL, plan, 6 * GIB, WEIGHTS)
    check_host(replace(config, preemption_mode="recompute"), shape, MODEL, plan, 6 * GIB, WEIGHTS)


def test_each_group_s_part_of_the_swap_space_is_pinned_as_a_power_of_two() -> None:
    """Of 8 GiB one has 5 and the other 3, so 12 are taken."""
    config = EngineConfig(preemption_mode="swap", swap_space_bytes=8 * GIB)
    shape = shape_of(config, "cuda")
    model = replace(MODEL, groups=(*MODEL.groups, replace(MODEL.groups[0], window=512)))
    layouts = tuple(BlockLayout(group, 16, shape.kv_format) for group in model.groups)
    plan = CachePlan(layouts, (5000, 3000), shape.chunk_tokens)

    def checked(swapped: int, left: int) -> None:
        there = left + table_bytes(shape, model, 64, 8192)
        check_host(replace(config, swap_space_bytes=swapped), shape, model, plan, there, WEIGHTS)

    checked(8 * GIB, 12 * GIB)
    with pytest.raises(ConfigError) as caught:
        checked(8 * GIB, 12 * GIB - 1)
    assert caught.value.field == "swap_space_bytes"
    most = int(re.findall("at most ([0-9]+)", str(caught.value))[0])
    checked(most, 12 * GIB - 1)
    with pytest.raises(ConfigError, match="powers of two"):
        checked(most + 1, 12 * GIB - 1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tables_that_the_host_has_no_room_for_are_refused_with_what_it_has(device: str) -> None:
    """Of a model whose cache is a window's: it says nothing of how long sequences may be. 2 GiB
    are left for them."""
    windowed = replace(
        MODEL,
        max_model_len=2**31 - 1,
        groups=tuple(replace(group, window=4096) for group in MODEL.groups),
        position_bytes=512,
    )
    host_bytes = 2 * GIB

    def checked(config: EngineConfig, loaded: bool = False) -> None:
        shape = decide_shape(config, windowed, torch.device(device))
        plan = size_cache(config, shape, windowed, Memory(64 * GIB, 64 * GIB), WEIGHTS)
        weights = 0 if loaded else WEIGHTS
        there = host_bytes + (weights + plan.num_bytes) * (device == "cpu")
        check_host(config, shape, windowed, plan, there, weights)

    with pytest.raises(ConfigError) as too_long:
        checked(EngineConfig())
    assert too_long.value.field == "max_model_len"
    length = int(re.findall("set it to at most ([0-9]+)", str(too_long.value))[0])
    # a token's id for each of 64 sequences, its share of their blocks' and its rotation
    block_size = {"cpu": 16, "cuda": 64}[device]
    assert length == pytest.approx(2 * GIB / (64 * 4 * (1 + 1 / block_size) + 512), rel=0.01)
    checked(EngineConfig(max_model_len=length))
    for one_more in (
        EngineConfig(max_model_len=length + 1),
        EngineConfig(max_model_len=length, max_num_seqs=65),
    ):
        with pytest.raises(ConfigError, match="^max_num_seqs: tables for"):
            checked(one_more)
    many = EngineConfig(
        max_model_len=1 << 17, max_num_seqs=16384, max_num_batched_tokens=16384, block_size=16
    )
    with pytest.raises(ConfigError) as too_many:
        checked(many)
    assert too_many.value.field == "max_num_seqs"
    num_seqs, fitting = map(int, re.findall("to at most ([0-9]+)", str(too_many.value)))
    assert num_seqs == pytest.approx((2 * GIB - (512 << 17)) / (4 << 17) / (1 + 1 / 16), rel=0.01)
    checked(replace(many, max_num_seqs=num_seqs))
    checked(replace(many, max_model_len=fitting))
    checked(replace(many, max_num_seqs=num_seqs + 100), loaded=True)  # rotations are there by then
    host_bytes = -1  # another has taken what was there
    with pytest.raises(ConfigError, match="and 0 bytes of .* are available for them$"):
        checked(many)


@pytest.mark.parametrize(("num_seqs", "length"), [(64, 8192), (4096, 64)])
def test_nobody_is_advised_to_serve_what_has_no_room_for_an_answer(
    num_seqs: int, length: int
) -> None:
    """A prompt and an answer are two tokens at least."""
    config = EngineConfig(
        max_num_seqs=num_seqs, max_num_batched_tokens=num_seqs, max_model_len=length
    )
    shape = shape_of(config, "cuda")
    plan = size_cache(config, shape, MODEL, Memory(64 * GIB, 64 * GIB), WEIGHTS)

    def refused(left: int) -> str:
        with pytest.raises(ConfigError) as caught:
            check_host(config, shape, MODEL, plan, left)
        return str(caught.value)

    two = table_bytes(shape, MODEL, num_seqs, 2, loaded=True)
    assert "to at most 2" in refused(two)
    assert "max_model_len to" not in refused(two - 1)
    assert not re.search("at most [01]$", refused(two - 1))
    one_fits = table_bytes(shape, MODEL, 1, length, loaded=True)
    assert refused(one_fits).startswith("max_num_seqs: ")
    assert "; set it to at most 1" in refused(one_fits)
    assert refused(one_fits - 1).startswith("max_model_len: ")


def test_what_is_counted_of_a_table_is_what_it_takes() -> None:
    table = SlotTable(num_slots=3, max_len=100, block_size=16, num_groups=2)
    arrays = [*vars(table).values(), *vars(table)["_tables"]]
    taken = sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
    assert 3 * slot_bytes(100, 16, 2) == taken


def test_weights_that_go_to_a_gpu_through_too_small_a_host_are_refused() -> None:
    """Ours are read tensor by tensor."""
    config, others = EngineConfig(), replace(MODEL, native=False)
    error = host_refusal(config, "cuda", others, 3 * GIB)
    assert error.field == "model"
    assert "take 4.00 GiB in bfloat16, and 3.00 GiB are available" in str(error)
    shape = shape_of(config, "cuda")
    plan = size_cache(config, shape, MODEL, Memory(64 * GIB, 64 * GIB), WEIGHTS)
    check_host(config, shape, MODEL, plan, 3 * GIB, WEIGHTS)
    check_host(config, shape, others, plan, WEIGHTS, WEIGHTS)


def test_what_does_not_fit_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=str(make_tiny("llama", tmp_path).folder), dtype="float32")
    monkeypatch.setattr(engine_module, "load_model", pytest.fail)
    monkeypatch.setattr(engine_module, "memory_of", lambda _: Memory(100 << 10, 100 << 10))
    with pytest.raises(ConfigError, match="model: its weights take"):
        Engine.create(config)
    monkeypatch.setattr(engine_module, "memory_of", lambda _: Memory(GIB, GIB))
    monkeypatch.setattr(engine_module, "available_memory", lambda: GIB)
    config = replace(config, preemption_mode="swap", swap_space_bytes=GIB)
    with pytest.raises(ConfigError, match="swap_space_bytes: 1.00 GiB, and"):
        Engine.create(config)


def test_a_device_that_fills_up_meanwhile_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    config = EngineConfig(model=str(make_tiny("llama", tmp_path).folder), dtype="float32")
    monkeypatch.setattr(engine_module, "load_model", load)
    monkeypatch.setattr(engine_module, "_compile_kernels", lambda *_: None)
    with pytest.raises(ModelError, match=r"CUDA out of memory. Tried to allocate 2\.00 GiB"):
        Engine.create(config)


def test_a_start_says_what_there_was_and_what_became_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the device's memory, which is not the host's."""
    asked: list[torch.device] = []

    def memory(device: torch.device) -> Memory:
        asked.append(device)
        return Memory((50 - 10 * len(asked)) << 20, 8 * GIB)

    folder = make_tiny("llama", tmp_path).folder
    config = EngineConfig(
        model=str(folder), dtype="float32", block_size=16, kv_cache_memory_bytes=4 << 20
    )
    monkeypatch.setattr(engine_module, "memory_of", memory)
    started = time.monotonic()
    with caplog.at_level("INFO"):
        engine = Engine.create(config)
        engine.touching.join(60)
    engine.close()
    assert ("4.0 MiB of cache touched in" in caplog.text) == may_populate()
    (ready,) = re.findall("ready after ([0-9.]+) s with 4.0 MiB of cache", caplog.text)
    assert 0 <= float(ready) <= time.monotonic() - started + 0.05
    assert asked == [torch.device("cpu")] * 2, "before loading, and to size the cache"
    weights = engine.info.model.num_parameters * 4
    assert (
        "40.0 MiB of memory were available on cpu:"
        f" weights take {weights / 2**10:.1f} KiB, the cache 4.0 MiB, and 26.0 MiB are left"
    ) in caplog.text
    # 4 MiB in blocks of 16 tokens, 2 layers of 2 heads of 16 keys and values in fp32
    num_blocks = (4 << 20) // (16 * 2 * 2 * 2 * 16 * 4)
    tokens = (num_blocks - 1) * 16
    num_sequences = engine.info.cache.num_sequences(256)
    assert 0 < num_sequences <= tokens // 256
    assert (
        f"the cache holds {tokens} tokens in blocks of 16: {num_sequences} sequences of 256 tokens"
    ) in caplog.text
