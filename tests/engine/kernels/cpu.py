"""What the tests of the compiled kernels compare, and with what."""

import pytest
import torch

from engine.kernels.cpu.decode_state import SPLIT
from engine.kernels.cpu.features import CpuFeatures
from engine.kernels.cpu.kernels import CpuKernels
from engine.kernels.interface import GroupBatch, StepBatch
from engine.kernels.reference import ReferenceKernels
from tests.engine.kernels.cases import AttentionCase, step_batch

REFERENCE = ReferenceKernels()
PLAIN_CPU = CpuFeatures(
    wide_registers=False, bf16_dot=False, bf16_tiles=False, narrow_registers=True
)
BEST, PLAIN = CpuKernels(), CpuKernels(PLAIN_CPU)
DTYPES = [
    pytest.param(torch.float32, BEST, id="fp32"),
    pytest.param(torch.float16, BEST, id="fp16"),
    pytest.param(torch.bfloat16, BEST, id="bf16"),
    pytest.param(torch.bfloat16, PLAIN, id="bf16-plain-cpu"),
]
MIXED = [(1, 1), (1, 37), (5, 5), (1, 64), (17, 40), (1, 16), (33, 33), (70, 200), (1, SPLIT + 9)]
# With bf16 products the weights of attention are rounded to bf16 too, half a unit in 2 ** -8 each,
# and the result is rounded once more; the other types only round the result.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def attended(kernels: CpuKernels | ReferenceKernels, case: AttentionCase) -> torch.Tensor:
    return kernels.attention(
        case.q, case.spec, case.slab, case.layer, case.batch, case.group, case.sinks
    )


def assert_as_reference(kernels: CpuKernels, case: AttentionCase) -> None:
    tolerance = TOLERANCE[case.q.dtype]
    ours, theirs = attended(kernels, case), attended(REFERENCE, case)
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def assert_same_bits_alone(case: AttentionCase, kernels: CpuKernels = BEST) -> None:
    """Each sequence as beside the others."""
    together = attended(kernels, case)
    starts = case.batch.query_starts.tolist()
    for s, kv_len in enumerate(case.batch.kv_lens.tolist()):
        tokens = slice(starts[s], starts[s + 1])
        batch, group = _sub_batch(case, s, (starts[s + 1] - starts[s], kv_len))
        alone = kernels.attention(
            case.q[tokens], case.spec, case.slab, case.layer, batch, group, case.sinks
        )
        assert torch.equal(alone, together[tokens])


def assert_same_bits_in_chunks(
    case: AttentionCase, sizes: tuple[int, ...], kernels: CpuKernels = BEST
) -> None:
    """The case's one prompt as at once."""
    whole = attended(kernels, case)
    start = 0
    for size in sizes:
        batch, group = _sub_batch(case, 0, (size, start + size))
        q = case.q[start : start + size]
        chunk = kernels.attention(q, case.spec, case.slab, case.layer, batch, group, case.sinks)
        assert torch.equal(chunk, whole[start : start + size])
        start += size
    assert start == len(whole)


def _sub_batch(
    case: AttentionCase, sequence: int, length: tuple[int, int]
) -> tuple[StepBatch, GroupBatch]:
    table = case.group.block_tables[sequence].tolist()
    return step_batch([length], [table], case.slab.layout.block_size)
