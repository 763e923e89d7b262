"""Recorded kernel calls: repeated to the last bit, and only where nothing else computed."""

import asyncio
import ctypes
from collections.abc import Callable, Iterator
from struct import Struct
from threading import Thread
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from engine.kernels.cpu.emit import LINE_BYTES
from engine.kernels.cpu.features import CpuFeatures
from engine.kernels.cpu.kernel import Kernel
from engine.kernels.cpu.kernels import CpuKernels
from engine.kernels.cpu.memory import OWN_WORDS
from engine.kernels.cpu.recording import Call, OutputPool, empty, recording
from engine.kernels.cpu.replay import ASLEEP, WORDS, Replay, chain
from engine.kernels.interface import Activation
from tests.engine.kernels.slow_workers import SlowWorkers
from tests.waiting import until

ROWS, WIDTH = 100, 768  # enough for all kernels to share the work
FEW = 4  # enough for products alone
OWN = CpuFeatures(wide_registers=True, bf16_dot=False, bf16_tiles=False)  # product, for fp32


class Block:
    """Some of a layer, on inputs that stay where they are."""

    def __init__(self, kernels: CpuKernels, rows: int = ROWS) -> None:
        self.kernels = kernels
        self.gate_up = kernels.linear(torch.randn(2 * WIDTH, WIDTH).mul(0.05), None)
        self.down = kernels.linear(torch.randn(WIDTH, WIDTH).mul(0.05), None)
        self.norm = torch.rand(WIDTH)
        self.x = torch.randn(rows, WIDTH)

    def __call__(self) -> torch.Tensor:
        x, residual = self.kernels.rms_norm(self.x, self.norm, 1e-5), self.x
        for _ in range(6):
            gated = self.kernels.gated_activation(self.gate_up(x), Activation.SILU)
            x = self.kernels.rms_norm(self.down(gated), self.norm, 1e-5)
            x = self.kernels.add_rms_norm(x, residual, self.norm, 1e-5)
        return x


@pytest.fixture(params=[2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [FEW, ROWS])
@torch.inference_mode()
def test_repeated_calls_give_what_calls_give(threads: int, rows: int) -> None:
    kernels = CpuKernels(OWN)
    block = Block(kernels, rows)
    with recording(OutputPool()) as recorder:
        block()
    taken = {call.num_threads for call in recorder.calls}
    assert taken == ({1, threads} if rows == FEW else {threads})
    first = block.x.clone()
    expected = block()
    block.x.copy_(first)
    result, replay = kernels.record(block)
    assert replay is not None
    assert torch.equal(result, expected)
    for _ in range(20):
        other = torch.randn(rows, WIDTH)
        block.x.copy_(other)
        expected = block()
        block.x.copy_(other)
        replay()
        assert torch.equal(result, expected)


@torch.inference_mode()
def test_recordings_share_memory_and_repeat_in_any_order() -> None:
    kernels = CpuKernels(OWN)
    blocks = [Block(kernels) for _ in range(3)]
    inputs = [block.x.clone() for block in blocks]
    recorded = [kernels.record(block) for block in blocks]
    for i in (0, 2, 1, 1, 0):
        blocks[i].x.copy_(inputs[i])
        expected = blocks[i]()
        blocks[i].x.copy_(inputs[i])
        result, replay = recorded[i]
        assert replay is not None
        replay()
        assert torch.equal(result, expected)


async def test_who_waits_for_a_slow_worker_leaves_it_the_core() -> None:
    slow, layout = SlowWorkers(), Struct(f"{OWN_WORDS}q")
    calls = [Call(slow.code, 2, layout, ())] * 2
    replay = Replay(Kernel(chain, "f32", WORDS), calls)
    caller = asyncio.create_task(asyncio.to_thread(replay))
    await until(lambda: slow.jobs)
    job_bytes = -(-layout.size // LINE_BYTES) * LINE_BYTES
    asleep = ctypes.c_int64.from_address(slow.jobs[0] + job_bytes + ASLEEP)
    await until(lambda: asleep.value == 1)
    slow.go_on.set()
    await caller
    assert asleep.value == 0
    assert len(slow.jobs) == 2


def _adds(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def _adds_in_place(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1)


def _converts(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def _picks(x: torch.Tensor) -> torch.Tensor:
    return x[torch.tensor([0, 1])]


@pytest.mark.parametrize("compute", [_adds, _adds_in_place, _converts, _picks])
@torch.inference_mode()
def test_what_torch_computes_is_not_repeated(
    compute: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    kernels = CpuKernels(OWN)
    block = Block(kernels)
    result, replay = kernels.record(lambda: kernels.rms_norm(compute(block()), block.norm, 1e-5))
    assert replay is None
    assert result.shape[1] == WIDTH


@torch.inference_mode()
def test_what_onednn_computes_is_not_repeated() -> None:
    kernels = CpuKernels(CpuFeatures(wide_registers=False, bf16_dot=False, bf16_tiles=False))
    linear = kernels.linear(torch.randn(WIDTH, WIDTH).bfloat16(), None)
    x = torch.randn(ROWS, WIDTH).bfloat16()
    result, replay = kernels.record(lambda: linear(x))
    assert replay is None
    assert torch.equal(result, linear(x))


@torch.inference_mode()
def test_views_do_not_keep_calls_from_being_repeated() -> None:
    kernels = CpuKernels(OWN)
    block = Block(kernels)
    _, replay = kernels.record(lambda: block().view(ROWS, 2, -1)[:, 0])
    assert replay is not None


def output(rows: int = 100) -> torch.Tensor:
    return empty((rows, 100), torch.float32)


@torch.inference_mode()
def test_memory_is_used_again_only_when_no_tensor_looks_at_it() -> None:
    with recording(OutputPool()):
        kept = output()
        view = output().view(-1)[5:]
        assert view.untyped_storage().data_ptr() != kept.data_ptr()
        gone = output().data_ptr()
        assert output(90).data_ptr() == gone
        assert empty((100, 200), torch.bfloat16).data_ptr() == gone
        others = {kept.data_ptr(), view.untyped_storage().data_ptr()}
        assert output().data_ptr() not in others


@torch.inference_mode()
def test_memory_in_use_stays_so_when_a_tensor_of_an_earlier_recording_goes() -> None:
    pool = OutputPool()
    with recording(pool):
        earlier = output()
    with recording(pool):
        now = output()
        assert now.data_ptr() == earlier.data_ptr()
        del earlier
        assert output().data_ptr() != now.data_ptr()


def test_only_the_own_threads_calls_are_recorded() -> None:
    kernels, others = CpuKernels(OWN), CpuKernels(OWN)
    block, other = Block(kernels), Block(others)
    with torch.inference_mode(), recording(OutputPool()) as recorder:
        thread = Thread(target=other)
        thread.start()
        thread.join()
        assert not recorder.calls
        block()
        assert len(recorder.calls) == 1 + 6 * 5


@torch.inference_mode()
def test_a_call_that_fails_ends_the_recording() -> None:
    kernels = CpuKernels(OWN)
    block = Block(kernels)

    def fail() -> torch.Tensor:
        block()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        kernels.record(fail)
    assert kernels.record(block)[1] is not None


@pytest.mark.parametrize("rows", [FEW, ROWS])
@torch.inference_mode()
def test_calls_carried_out_together_give_what_calls_give(threads: int, rows: int) -> None:
    kernels = CpuKernels(OWN)
    block = Block(kernels, rows)
    first = block.x.clone()
    expected, left = block(), block.x.clone()
    for _ in range(3):
        block.x.copy_(first)
        with kernels.together():
            result = block()
        assert torch.equal(result, expected)
        assert torch.equal(block.x, left)


@pytest.mark.parametrize("compute", [_adds, _adds_in_place, _converts, _picks])
@torch.inference_mode()
def test_torch_and_calls_that_are_carried_out_together_see_each_other(
    compute: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    kernels = CpuKernels(OWN)
    block = Block(kernels)
    first = block.x.clone()

    def run() -> torch.Tensor:
        x = kernels.rms_norm(compute(block()), block.norm, 1e-5)
        return kernels.rms_norm(compute(x), block.norm, 1e-5)

    expected = run()
    block.x.copy_(first)
    with kernels.together():
        result = run()
        torch.full_like(first, torch.nan)  # where what torch made would lie, were it gone
    assert torch.equal(result, expected)


@pytest.mark.parametrize("called_between", [False, True])
@torch.inference_mode()
def test_what_torch_computes_stays_until_the_last_call_that_may_read_it(
    called_between: bool,
) -> None:
    kernels = CpuKernels(OWN)
    block = Block(kernels)
    with kernels.together():
        one = (block.x + 1)[1:]
        memory: Any = StorageWeakRef(one.untyped_storage())  # type: ignore[no-untyped-call]
        if called_between:
            kernels.rms_norm(one, block.norm, 1e-5)
        _ = block.x + 2  # for which the calls before it are carried out
        kernels.rms_norm(one, block.norm, 1e-5)
        del one
        assert not memory.expired()
    assert memory.expired()


@torch.inference_mode()
def test_calls_wait_for_the_end_of_the_block() -> None:
    kernels = CpuKernels(OWN)
    block = Block(kernels)
    address, size = block.x.data_ptr(), block.x.nbytes
    first = ctypes.string_at(address, size)
    with kernels.together():
        block()
        assert ctypes.string_at(address, size) == first
    assert ctypes.string_at(address, size) != first


@torch.inference_mode()
def test_a_block_that_fails_computes_nothing_and_the_next_one_does() -> None:
    kernels = CpuKernels(OWN)
    block = Block(kernels)
    first = block.x.clone()
    expected = block()
    block.x.copy_(first)

    def run(quotient: int) -> torch.Tensor:
        with kernels.together():
            result = block()
            _ = 1 // quotient
        return result

    with pytest.raises(ZeroDivisionError):
        run(0)
    assert torch.equal(block.x, first)
    assert torch.equal(run(1), expected)


@torch.inference_mode()
def test_no_rows_are_no_reason_to_fail() -> None:
    kernels = CpuKernels(OWN)
    block = Block(kernels)
    with kernels.together():
        assert block.down(block.x[:0]).shape == (0, WIDTH)


@torch.inference_mode()
def test_calls_of_a_recording_are_carried_out_as_ever() -> None:
    kernels = CpuKernels(OWN)
    block = Block(kernels)

    def run() -> torch.Tensor:
        with kernels.together():
            return block()

    assert kernels.record(run)[1] is not None
