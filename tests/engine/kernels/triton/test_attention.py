from dataclasses import replace

import pytest
import torch

from engine.kernels.interface import AttentionSpec
from engine.kernels.reference import ReferenceKernels, scale_view
from engine.kernels.triton.kernels import TritonKernels
from tests.engine.kernels.cases import (
    QUANTISED,
    AttentionCase,
    attention_case,
    make_spec,
    row,
    scale,
)
from tests.interpreter import sums_are_not_checked_for_overflow

__all__ = ["sums_are_not_checked_for_overflow"]

REFERENCE = ReferenceKernels()
DECODE = [(1, 1), (1, 37), (1, 64), (1, 16), (1, 129)]
MIXED = [(1, 1), (1, 37), (5, 5), (1, 64), (17, 40), (2, 90), (33, 33)]


def assert_right(
    case: AttentionCase, device: torch.device, num_programs: int, tolerance: float = 1e-5
) -> None:
    expected = REFERENCE.attention(
        case.q, case.spec, case.slab, case.layer, case.batch, case.group, case.sinks
    )
    there = case.to(device)
    out = TritonKernels(num_programs).attention(
        there.q, there.spec, there.slab, there.layer, there.batch, there.group, there.sinks
    )
    assert out.dtype == case.q.dtype
    torch.testing.assert_close(out.cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_programs", [1, 3, 7, 40])
def test_decode_however_the_work_is_dealt_out(num_programs: int, device: torch.device) -> None:
    """From one program that holds all segments to programs that hold a sliver of one."""
    lengths = [(1, 300), (1, 1), (1, 1000), (1, 64), (1, 513)]
    case = attention_case(make_spec(head_dim=64), lengths, seed=num_programs)
    assert_right(case, device, num_programs)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "value_dim"),
    [
        (4, 2, 16, 16),
        (8, 2, 64, 64),
        (6, 1, 80, 80),
        (4, 4, 96, 96),
        (8, 2, 128, 128),
        (4, 1, 256, 256),
        (6, 2, 48, 32),
        (5, 1, 32, 32),
        (14, 2, 64, 64),
    ],
)
def test_head_shapes(
    heads: int, kv_heads: int, head_dim: int, value_dim: int, device: torch.device
) -> None:
    case = attention_case(make_spec(heads, kv_heads, head_dim, value_dim), MIXED)
    assert_right(case, device, num_programs=5)


@pytest.mark.parametrize("num_programs", [1, 7])
@pytest.mark.parametrize("window", [None, 20])
def test_sinks(window: int | None, num_programs: int, device: torch.device) -> None:
    """Each part of a long sequence begins somewhere; its sink counts once."""
    spec = make_spec(12, 4, 32, window=window)
    case = attention_case(spec, [*MIXED, (1, 700)]).with_sinks()
    assert_right(case, device, num_programs)


def test_sinks_of_more_query_heads_than_rows_of_a_tile(device: torch.device) -> None:
    case = attention_case(make_spec(heads=80, kv_heads=1), [(1, 40), (3, 20)]).with_sinks()
    assert_right(case, device, num_programs=3)


def test_more_query_heads_than_rows_of_a_tile(device: torch.device) -> None:
    case = attention_case(make_spec(heads=80, kv_heads=1), [(1, 40), (1, 3), (3, 20)])
    assert_right(case, device, num_programs=3)


def test_cache_of_another_dtype(device: torch.device) -> None:
    case = attention_case(make_spec(), [(1, 40), (7, 20)], dtype=torch.float16)
    assert_right(replace(case, q=case.q.bfloat16()), device, num_programs=3, tolerance=2e-2)


@pytest.mark.parametrize("window", [1, 20, 64])
@pytest.mark.parametrize("block_size", [16, 64])
def test_window(window: int, block_size: int, device: torch.device) -> None:
    case = attention_case(make_spec(window=window, head_dim=32), MIXED, block_size)
    assert_right(case, device, num_programs=5)


@pytest.mark.parametrize("window", [None, 30])
def test_soft_cap(window: int | None, device: torch.device) -> None:
    case = attention_case(make_spec(soft_cap=2.0, window=window), MIXED)
    assert_right(case, device, num_programs=5)


@pytest.mark.parametrize("block_size", [8, 16, 32, 256])
def test_block_sizes(block_size: int, device: torch.device) -> None:
    case = attention_case(make_spec(head_dim=64), MIXED, block_size)
    assert_right(case, device, num_programs=3)


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [(torch.bfloat16, 64), (torch.bfloat16, 80), (torch.bfloat16, 256), (torch.float16, 128)],
)
def test_half_precision(dtype: torch.dtype, head_dim: int, device: torch.device) -> None:
    spec = make_spec(heads=8, kv_heads=2, head_dim=head_dim)
    case = attention_case(spec, [*MIXED, (70, 200)], block_size=64, dtype=dtype)
    assert_right(case, device, num_programs=4, tolerance=2e-2)


@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize(
    ("spec", "block_size"),
    [
        (make_spec(8, 2, 64), 16),
        (make_spec(6, 1, 80, window=20), 64),
        (make_spec(4, 2, 128, value_dim=48, soft_cap=2.0), 32),
    ],
)
def test_quantised_caches(
    spec: AttentionSpec, block_size: int, format: str, device: torch.device
) -> None:
    case = attention_case(spec, MIXED, block_size, format=format)
    assert_right(case, device, num_programs=5)


@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quantised_caches_of_half_precision(
    dtype: torch.dtype, format: str, device: torch.device
) -> None:
    spec = make_spec(heads=8, kv_heads=2, head_dim=64)
    lengths = [*MIXED, (70, 200)]
    case = attention_case(spec, lengths, block_size=64, dtype=dtype, format=format)
    assert_right(case, device, num_programs=4, tolerance=2e-2)


@pytest.mark.parametrize("format", QUANTISED)
def test_small_values_keep_their_digits_in_fp16(format: str, device: torch.device) -> None:
    """A weight of 1 / 1000 times a scale of some 1e-6 is nothing in fp16."""
    case = attention_case(make_spec(), [(1, 1000), (9, 900)], dtype=torch.float16, format=format)
    for plane in (0, 1):
        scale_view(case.slab, case.layer, plane).mul_(1e-2)
    expected = REFERENCE.attention(
        case.q.float(), case.spec, case.slab, case.layer, case.batch, case.group
    )
    there = case.to(device)
    out = TritonKernels(3).attention(
        there.q, there.spec, there.slab, there.layer, there.batch, there.group
    )
    error = (out.cpu().float() - expected).norm() / expected.norm()
    assert error < 1e-2


@pytest.mark.parametrize("format", QUANTISED)
def test_what_is_not_finite_stays_so(format: str, device: torch.device) -> None:
    for plane in (0, 1):
        case = attention_case(make_spec(), [(1, 40), (1, 30), (4, 20)], format=format)
        block = int(case.group.block_tables[1, 0])
        for head in range(case.spec.num_kv_heads):
            place = case.layer, plane, head, block, 3
            row(case.slab, *place).view(torch.uint8).zero_()
            scale(case.slab, *place).fill_(torch.inf)
        there = case.to(device)
        out = TritonKernels(3).attention(
            there.q, there.spec, there.slab, there.layer, there.batch, there.group
        )
        assert out[1].isnan().all()
        assert out[[0, 2, 3, 4, 5]].isfinite().all()


@pytest.mark.parametrize("spec", [make_spec(), make_spec(window=40)])
def test_a_long_prompt_in_chunks(spec: AttentionSpec, device: torch.device) -> None:
    case = attention_case(spec, [(130, 130), (100, 230), (1, 230)], dtype=torch.float16)
    assert_right(case, device, num_programs=2, tolerance=5e-3)


def test_sequences_without_tokens_give_zeros(device: torch.device) -> None:
    """They fill up a recorded graph."""
    case = attention_case(make_spec(), [*DECODE, (1, 3), (1, 2)])
    case.batch.kv_lens[-2:] = 0
    case.batch.kv_lens[1] = 0
    assert_right(case, device, num_programs=4)


def test_nothing_to_do(device: torch.device) -> None:
    """Chunks without decode, and decode without chunks."""
    assert_right(attention_case(make_spec(), [(9, 9)]), device, num_programs=2)
    assert_right(attention_case(make_spec(), [(1, 9)]), device, num_programs=2)
