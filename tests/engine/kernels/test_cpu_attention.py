"""The compiled paged attention against the reference, and what it promises beyond it."""

import pytest
import torch

from engine.kernels.cpu.decode_state import SPLIT
from engine.kernels.cpu.kernels import CpuKernels
from engine.kernels.interface import AttentionSpec
from kv_cache.layout import KV_FORMATS, BlockLayout, KvGroup
from kv_cache.slab import KvSlab
from tests.engine.kernels.cases import attention_case, make_spec, row, step_batch, write_by_turns
from tests.engine.kernels.cpu import (
    BEST,
    DTYPES,
    MIXED,
    REFERENCE,
    assert_as_reference,
    assert_same_bits_alone,
    assert_same_bits_in_chunks,
    attended,
)

# Whatever registers this CPU has.
EACH_WIDTH = [case for case in DTYPES if case.values[0] != torch.float16]


@pytest.mark.parametrize(("dtype", "kernels"), DTYPES)
@pytest.mark.parametrize(
    ("spec", "block_size"),
    [
        (make_spec(4, 2, 16, 16), 16),
        (make_spec(6, 1, 80, 80), 8),
        (make_spec(3, 3, 96, 32), 16),
        (make_spec(12, 4, 64, 64), 16),
        (make_spec(8, 2, 256, 256), 64),
        (make_spec(70, 2, 24, 40), 8),
        (make_spec(2, 1, 15, 15), 16),
    ],
)
def test_attention_of_any_shape(
    dtype: torch.dtype,
    kernels: CpuKernels,
    spec: AttentionSpec,
    block_size: int,
) -> None:
    assert_as_reference(kernels, attention_case(spec, MIXED, block_size, dtype))


@pytest.mark.parametrize(("dtype", "kernels"), DTYPES)
@pytest.mark.parametrize(
    ("window", "soft_cap"), [(1, None), (20, None), (37, 30.0), (130, None), (None, 5.0)]
)
def test_windows_and_soft_caps(
    dtype: torch.dtype, kernels: CpuKernels, window: int | None, soft_cap: float | None
) -> None:
    spec = make_spec(6, 2, 32, window=window, soft_cap=soft_cap)
    assert_as_reference(kernels, attention_case(spec, MIXED, 8, dtype))


@pytest.mark.parametrize(("dtype", "kernels"), DTYPES)
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (20, None), (None, 5.0)])
def test_sinks(
    dtype: torch.dtype, kernels: CpuKernels, window: int | None, soft_cap: float | None
) -> None:
    """Each piece of a long sequence begins somewhere; its sink counts once."""
    spec = make_spec(12, 4, 32, window=window, soft_cap=soft_cap)
    case = attention_case(spec, [*MIXED, (1, 3 * SPLIT + 70)], 8, dtype).with_sinks()
    assert_as_reference(kernels, case)
    assert_same_bits_alone(case, kernels)


@pytest.mark.parametrize("length", [SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT, 3 * SPLIT + 70])
def test_long_sequences_are_split_and_merged(length: int) -> None:
    case = attention_case(make_spec(3, 1, 32), [(1, length), (1, 3)])
    assert_as_reference(BEST, case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_lies_behind_the_last_token_does_not_matter_even_if_nan(dtype: torch.dtype) -> None:
    spec = make_spec(4, 2, 32)
    case = attention_case(spec, [(1, 37), (1, 129), (19, 43)], 16, dtype)
    before = attended(BEST, case)
    case.slab.data[case.slab.data == 500.0] = torch.nan
    assert torch.equal(attended(BEST, case), before)


@pytest.mark.parametrize(("dtype", "kernels"), EACH_WIDTH)
@pytest.mark.parametrize("window", [None, 100])
def test_a_sequence_gets_the_same_bits_beside_any_others(
    dtype: torch.dtype, kernels: CpuKernels, window: int | None
) -> None:
    spec = make_spec(6, 2, 64, window=window)
    case = attention_case(spec, [(1, 3 * SPLIT), (1, 50), (90, 150), (1, 700)], 16, dtype)
    assert_same_bits_alone(case, kernels)


@pytest.mark.parametrize(("dtype", "kernels"), EACH_WIDTH)
@pytest.mark.parametrize("window", [None, 50])
def test_a_prompt_gets_the_same_bits_in_any_chunks(
    dtype: torch.dtype, kernels: CpuKernels, window: int | None
) -> None:
    spec = make_spec(6, 2, 64, window=window)
    case = attention_case(spec, [(230, 230)], 16, dtype)
    assert_same_bits_in_chunks(case, (3, 64, 90, 73), kernels)


def test_offsets_beyond_32_bits() -> None:
    spec = make_spec(4, 2, 64)
    layout = BlockLayout(KvGroup((0, 1), 2, (64, 64)), 16, KV_FORMATS["bf16"])
    num_blocks = (9 << 30) // layout.blob_bytes  # more than 2 ** 32 elements; touched sparsely
    storage = torch.empty(num_blocks * layout.blob_bytes // 2, dtype=torch.bfloat16)
    slab = KvSlab(layout, storage)
    table = [num_blocks - 1, 1, num_blocks - 7]
    for block in table:
        slab.blob(block).zero_()
    q, k, v = (torch.randn(40, heads, 64).bfloat16() for heads in (4, 2, 2))
    _, group = step_batch([(40, 40)], [table], 16)
    write_by_turns(BEST, q, k, v, spec, slab, group.slots)
    for plane, written in enumerate((k, v)):
        for token, rows in enumerate(written):
            for head in range(2):
                place = head, table[token // 16], token % 16
                assert torch.equal(row(slab, 1, plane, *place), rows[head])
    for queries in (40, 1):
        batch, group = step_batch([(queries, 40)], [table], 16)
        ours = BEST.attention(q[-queries:], spec, slab, 1, batch, group)
        theirs = REFERENCE.attention(q[-queries:], spec, slab, 1, batch, group)
        torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-6)
