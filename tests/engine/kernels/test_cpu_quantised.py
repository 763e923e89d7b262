"""Compiled kernels over quantised caches, against the reference."""

import pytest
import torch

from engine.kernels.cpu.decode_state import SPLIT
from engine.kernels.cpu.emit import LINE_BYTES
from engine.kernels.cpu.kernel import WorkingMemory
from engine.kernels.cpu.kernels import CpuKernels
from engine.kernels.interface import NO_SLOT, AttentionSpec
from kv_cache.slab import KvSlab
from tests.engine.kernels.cases import (
    MASKED_VALUE,
    QUANTISED,
    attention_case,
    make_slab,
    make_spec,
    random_slots,
    rotate_case,
    row,
    scale,
    step_batch,
)
from tests.engine.kernels.cpu import (
    BEST,
    MIXED,
    PLAIN,
    REFERENCE,
    assert_as_reference,
    assert_same_bits_alone,
    assert_same_bits_in_chunks,
    attended,
)

FORMATS = pytest.mark.parametrize("format", QUANTISED)
# What tensors are computed in with each format. Reading widens a byte to fp32 and narrows that to
# the type, so each kind of either is there once and all of both, which would compile for minutes,
# are not; only pairs of bf16 have ways of their own for each format.
COMPUTED = {
    "fp8_e4m3": (torch.bfloat16, torch.float32),
    "fp8_e5m2": (torch.bfloat16, torch.float16),
    "int8": (torch.bfloat16,),
}
KINDS = pytest.mark.parametrize(
    ("format", "dtype", "kernels"),
    [
        *((format, dtype, BEST) for format in QUANTISED for dtype in COMPUTED[format]),
        ("int8", torch.bfloat16, PLAIN),
    ],
    ids=lambda value: "plain-cpu" if value is PLAIN else None if value is BEST else str(value),
)


def largest_of(slab: KvSlab) -> float:
    largest = slab.layout.format.largest
    assert largest is not None
    return largest


@KINDS
@pytest.mark.parametrize(
    ("spec", "block_size"),
    [
        (make_spec(4, 2, 16, 16), 16),
        (make_spec(6, 1, 80, 80), 8),
        (make_spec(3, 3, 96, 32), 16),
        (make_spec(8, 2, 64, 128), 64),
    ],
)
def test_attention_of_any_shape(
    format: str,
    dtype: torch.dtype,
    kernels: CpuKernels,
    spec: AttentionSpec,
    block_size: int,
) -> None:
    case = attention_case(spec, MIXED, block_size, dtype, format=format)
    assert_as_reference(kernels, case)


@KINDS
@pytest.mark.parametrize(("window", "soft_cap"), [(1, None), (37, 30.0), (130, None)])
def test_windows_and_soft_caps(
    format: str,
    dtype: torch.dtype,
    kernels: CpuKernels,
    window: int | None,
    soft_cap: float | None,
) -> None:
    spec = make_spec(6, 2, 32, window=window, soft_cap=soft_cap)
    assert_as_reference(kernels, attention_case(spec, MIXED, 8, dtype, format=format))


def test_rows_of_an_odd_length() -> None:
    case = attention_case(make_spec(2, 1, 15), MIXED, 8, torch.bfloat16, format="int8")
    assert_as_reference(BEST, case)


@FORMATS
def test_what_lies_behind_the_last_token_does_not_matter_even_if_nan(format: str) -> None:
    spec = make_spec(4, 2, 32, window=60)
    lengths = [(1, 37), (1, 129), (19, 43)]
    case = attention_case(spec, lengths, 16, torch.bfloat16, format=format)
    before = attended(BEST, case)
    hidden = case.slab.scales.eq(MASKED_VALUE / largest_of(case.slab))
    assert hidden.any()
    case.slab.scales[hidden] = torch.nan
    assert torch.equal(attended(BEST, case), before)


@FORMATS
def test_a_sequence_gets_the_same_bits_beside_any_others(format: str) -> None:
    spec = make_spec(6, 2, 64, window=300)
    lengths = [(1, 2 * SPLIT + 3), (1, 50), (90, 150)]
    case = attention_case(spec, lengths, 16, torch.bfloat16, format=format)
    assert_same_bits_alone(case)


@FORMATS
def test_a_prompt_gets_the_same_bits_in_any_chunks(format: str) -> None:
    case = attention_case(make_spec(6, 2, 64), [(230, 230)], 16, torch.bfloat16, format=format)
    assert_same_bits_in_chunks(case, (3, 64, 90, 73))


@FORMATS
def test_every_byte_is_read_as_torch_reads_it(format: str) -> None:
    """A value that alone is seen is the result, times its scale."""
    spec = make_spec(1, 1, 16, 256, window=1)
    slab = make_slab(spec, 1, format=format)
    codes = torch.arange(256, dtype=torch.uint8).view(slab.data.dtype)
    numbers = codes.float().nan_to_num(0.0, 0.0, 0.0)
    row(slab, 0, 0, 0, 0, 0).copy_(torch.ones(16))
    row(slab, 0, 1, 0, 0, 0).copy_(numbers)
    for plane in (0, 1):
        scale(slab, 0, plane, 0, 0, 0).fill_(0.25)
    batch, group = step_batch([(1, 1)], [[0]], 16)
    for dtype in COMPUTED[format]:
        out = BEST.attention(torch.ones(1, 1, 16, dtype=dtype), spec, slab, 0, batch, group)
        assert torch.equal(out.flatten().float(), numbers * 0.25)


@KINDS
@pytest.mark.parametrize(
    ("spec", "half", "normed", "block_size"),
    [
        (make_spec(4, 2, 64), 32, False, 16),
        (make_spec(2, 2, 96, 40), 12, True, 8),
        (make_spec(3, 1, 15), 4, True, 8),
    ],
)
def test_rotate_and_write(
    format: str,
    dtype: torch.dtype,
    kernels: CpuKernels,
    spec: AttentionSpec,
    half: int,
    normed: bool,
    block_size: int,
) -> None:
    case = rotate_case(spec, half, normed, 12 * block_size, dtype=dtype)
    ours, theirs = (make_slab(spec, 12, block_size, format=format) for _ in range(2))
    q, expected = case.run(kernels, ours), case.run(REFERENCE, theirs)
    torch.testing.assert_close(q, expected, rtol=2**-7, atol=2**-7)
    for plane in (0, 1):
        for slot in case.slots[case.slots != NO_SLOT].tolist():
            for head in range(spec.num_kv_heads):
                place = 1, plane, head, slot // block_size, slot % block_size
                torch.testing.assert_close(scale(ours, *place), scale(theirs, *place))
                x, y = (row(slab, *place).view(torch.int8).int() for slab in (ours, theirs))
                # Keys are turned in another order: the last bit may lead to the next number.
                assert (x - y).abs().max() <= 1 - plane
                assert (x != y).float().mean() <= 0.1
                for slab in (ours, theirs):
                    for part in (row, scale):
                        part(slab, *place).view(torch.uint8).fill_(0xFF)
    assert (ours.data.view(torch.uint8) == 0xFF).all()


@KINDS
def test_write_kv_stores_the_same_bits(
    format: str, dtype: torch.dtype, kernels: CpuKernels
) -> None:
    spec = make_spec(4, 2, 24, 40)
    slab, expected = (make_slab(spec, 6, format=format) for _ in range(2))
    k, v = torch.randn(11, 2, 24).to(dtype), torch.randn(11, 2, 40).to(dtype)
    k[0] = 0.0
    v[0], v[1] = v[0] * 1e-4, v[1] * 1e4
    slots = random_slots(11, 96)
    kernels.write_kv(k, v, slab, 2, slots)
    REFERENCE.write_kv(k, v, expected, 2, slots)
    assert torch.equal(slab.data.view(torch.uint8), expected.data.view(torch.uint8))


@FORMATS
def test_numbers_between_those_that_can_be_stored(format: str) -> None:
    """Ties go to even ones, the smallest are subnormal, and the scale is 1."""
    spec = make_spec(1, 1, 16)
    slab, expected = (make_slab(spec, 64, format=format) for _ in range(2))
    numbers = torch.arange(256, dtype=torch.uint8).view(slab.data.dtype).float()
    numbers = numbers[numbers.abs() <= largest_of(slab)].sort().values
    between = (numbers[1:] + numbers[:-1]) / 2
    nearly = torch.cat([between, between * (1 + 1e-6), between * (1 - 1e-6)])
    rows = nearly[: len(nearly) // 15 * 15].view(-1, 15)
    rows = torch.cat([rows, torch.full((len(rows), 1), largest_of(slab))], 1)
    k = rows.unsqueeze(1).contiguous()
    slots = torch.arange(len(rows))
    BEST.write_kv(k, -k, slab, 0, slots)
    REFERENCE.write_kv(k, -k, expected, 0, slots)
    assert torch.equal(slab.data.view(torch.uint8), expected.data.view(torch.uint8))


@FORMATS
def test_rows_without_a_finite_scale(format: str) -> None:
    """Zeros are read as zeros, and nothing hides an infinity or a NaN."""
    spec = make_spec(1, 1, 16, window=1)
    slab = make_slab(spec, 1, format=format)
    k, v = torch.ones(6, 1, 16), torch.randn(6, 1, 16)
    v[0], v[1] = 0.0, torch.full((16,), 1e-40)
    v[2, 0, 5], v[3, 0, 5], v[4, 0, 5] = torch.inf, -torch.inf, torch.nan
    v[5], v[5, 0, 3] = 0.0, torch.nan
    BEST.write_kv(k, v, slab, 0, torch.arange(6))
    for dtype in COMPUTED[format]:
        for slot in range(6):
            batch, group = step_batch([(1, slot + 1)], [[0]], 16, 1)
            out = BEST.attention(torch.ones(1, 1, 16, dtype=dtype), spec, slab, 0, batch, group)
            if slot < 2:
                assert torch.equal(out, torch.zeros_like(out))
            else:
                assert not out.isfinite().any()


@FORMATS
def test_a_call_for_one_thread_has_room_for_all(
    format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a step is repeated every thread comes to every call, and may be the one to do it."""
    given: list[int] = []
    address = WorkingMemory.address

    def noted(memory: WorkingMemory, num_bytes: int) -> int:
        given.append(num_bytes)
        return address(memory, num_bytes)

    monkeypatch.setattr(WorkingMemory, "address", noted)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    spec = make_spec(1, 1, 16)
    slab, ones = make_slab(spec, 12, format=format), torch.ones(2, 1, 16, dtype=torch.bfloat16)
    BEST.write_kv(ones, ones, slab, 0, torch.arange(2))
    rotate_case(spec, 8, False, 12 * 16, dtype=torch.bfloat16).run(BEST, slab)
    assert given == [3 * LINE_BYTES] * 2
