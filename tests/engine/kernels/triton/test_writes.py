import mmap

import pytest
import torch

from engine.kernels.interface import NO_SLOT, AttentionSpec, GroupBatch, StepBatch
from engine.kernels.reference import ReferenceKernels
from engine.kernels.triton.kernels import TritonKernels
from kv_cache.slab import KvSlab
from tests.engine.kernels.cases import (
    QUANTISED,
    make_slab,
    make_spec,
    random_slots,
    rotate_case,
    row,
    scale,
    write_by_turns,
)

KERNELS, REFERENCE = TritonKernels(num_programs=4), ReferenceKernels()
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
GIB = 1 << 30


def copy_of(slab: KvSlab, device: torch.device) -> KvSlab:
    return KvSlab(slab.layout, slab.data.clone().to(device))


@pytest.mark.crossed("dtype", "with_norm")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(
    ("spec", "rotary_dim"),
    [
        (make_spec(heads=4, kv_heads=2, head_dim=64), 64),
        (make_spec(heads=6, kv_heads=1, head_dim=80), 32),
        (make_spec(heads=20, kv_heads=20, head_dim=96), 96),
        (make_spec(heads=9, kv_heads=3, head_dim=256, value_dim=128), 64),
    ],
)
def test_rotate_and_write(
    spec: AttentionSpec,
    rotary_dim: int,
    with_norm: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    case = rotate_case(spec, rotary_dim // 2, with_norm, num_slots=64, num_tokens=7, dtype=dtype)
    slab = make_slab(spec, num_blocks=4, dtype=dtype)
    there = copy_of(slab, device)
    expected = case.run(REFERENCE, slab)
    q = case.to(device).run(KERNELS, there)
    tolerance = TOLERANCE[dtype]
    assert q.dtype == dtype
    torch.testing.assert_close(q.cpu(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        there.data.cpu(), slab.data, rtol=tolerance, atol=tolerance, equal_nan=True
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "head_dim", "value_dim"), [(2, 64, 64), (40, 80, 48)])
def test_write(
    kv_heads: int, head_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    spec = make_spec(heads=kv_heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim)
    slab = make_slab(spec, num_blocks=3, dtype=dtype)
    there = copy_of(slab, device)
    slots = random_slots(11, 48)
    k = torch.randn(11, kv_heads, head_dim).to(dtype)
    v = torch.randn(11, kv_heads, value_dim).to(dtype)
    REFERENCE.write_kv(k, v, slab, 1, slots)
    KERNELS.write_kv(k.to(device), v.to(device), there, 1, slots.to(device))
    torch.testing.assert_close(there.data.cpu(), slab.data, rtol=0, atol=0, equal_nan=True)


@pytest.mark.crossed("dtype", "format")
@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("spec", "rotary_dim"),
    [
        (make_spec(heads=4, kv_heads=2, head_dim=64), 64),
        (make_spec(heads=6, kv_heads=1, head_dim=80), 32),
        (make_spec(heads=9, kv_heads=3, head_dim=256, value_dim=128), 64),
    ],
)
def test_rotate_and_write_quantised(
    spec: AttentionSpec, rotary_dim: int, dtype: torch.dtype, format: str, device: torch.device
) -> None:
    case = rotate_case(spec, rotary_dim // 2, True, num_slots=64, num_tokens=7, dtype=dtype)
    slab = make_slab(spec, num_blocks=4, format=format)
    there = copy_of(slab, device)
    case.run(REFERENCE, slab)
    case.to(device).run(KERNELS, there)
    assert_stored_alike(there, slab, case.slots)


@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_quantised(dtype: torch.dtype, format: str, device: torch.device) -> None:
    """Rows of zeros, of every size, and with what is not finite."""
    spec = make_spec(heads=3, kv_heads=3, head_dim=80, value_dim=48)
    slab = make_slab(spec, num_blocks=3, format=format)
    there = copy_of(slab, device)
    slots = random_slots(23, 48)
    k, v = torch.randn(23, 3, 80).to(dtype), torch.randn(23, 3, 48).to(dtype)
    k[0], v[0], k[1], k[3], k[4] = 0.0, 0.0, k[1] * 1e30, k[3] * 1e-25, k[4] * 1e-35
    v[5, 1, 7], v[7, :, 7], v[8, 2, 7], k[9, 0, 0] = torch.inf, torch.nan, -torch.inf, torch.nan
    REFERENCE.write_kv(k, v, slab, 1, slots)
    KERNELS.write_kv(k.to(device), v.to(device), there, 1, slots.to(device))
    assert_stored_alike(there, slab, slots)


def assert_stored_alike(ours: KvSlab, theirs: KvSlab, slots: torch.Tensor) -> None:
    """Scales as sums round, elements one unit apart at most where these do, no other byte."""
    ours = KvSlab(ours.layout, ours.data.cpu())
    size = theirs.layout.block_size
    for slot in slots[slots != NO_SLOT].tolist():
        for head in range(theirs.layout.group.num_kv_heads):
            for plane in (0, 1):
                place = 1, plane, head, slot // size, slot % size
                (own,), (expected,) = scale(ours, *place), scale(theirs, *place)
                torch.testing.assert_close(own, expected, rtol=1e-5, atol=0)
                if expected.isinf():
                    assert not row(ours, *place).float().any()
                else:
                    codes, wanted = (row(slab, *place).float() for slab in (ours, theirs))
                    step = row(theirs, *place).float().abs().clamp_min(2**-6) / 4
                    if theirs.layout.format.name == "int8":
                        step = torch.ones(())
                    assert ((codes - wanted).abs() <= step).all()
                    assert (codes != wanted).float().mean() < 0.05
                for part in (row, scale):
                    for slab in (ours, theirs):
                        part(slab, *place).view(torch.uint8).fill_(0xFF)
    assert (ours.data.view(torch.uint8) == 0xFF).all()


def sparse_slab(spec: AttentionSpec, num_bytes: int, device: torch.device) -> KvSlab:
    """Zeros that take no memory until they are written, on a CPU."""
    layout = make_slab(spec, num_blocks=1, dtype=torch.float16).layout
    num_blocks = num_bytes // layout.blob_bytes
    if device.type != "cpu":
        return KvSlab.allocate(layout, num_blocks, device)
    memory = mmap.mmap(-1, num_blocks * layout.blob_bytes)
    return KvSlab(layout, torch.frombuffer(memory, dtype=torch.float16))


def test_addresses_are_64_bit(device: torch.device) -> None:
    """Writes and reads on either side of 2^31 elements and at the end of a slab above 4 GiB."""
    spec = make_spec(heads=4, kv_heads=2, head_dim=64)
    slab = sparse_slab(spec, 6 * GIB, device)
    size, edge = slab.layout.block_size, (1 << 31) // slab.block_stride
    blocks = [edge - 1, edge, slab.num_blocks - 1, 1]
    slots = torch.tensor([b * size + i for b in blocks for i in range(size)])
    q, k, v = (torch.randn(4 * size, heads, 64).half().to(device) for heads in (4, 2, 2))
    write_by_turns(KERNELS, q, k, v, spec, slab, slots.to(device))
    for i, block in enumerate(blocks):
        stored = slab.data[block * slab.block_stride :][: slab.block_stride].float()
        written = k[i * size : (i + 1) * size], v[i * size : (i + 1) * size]
        total = sum(t.float().abs().sum() for t in written)
        torch.testing.assert_close(stored.abs().sum(), total, rtol=1e-3, atol=0)

    group = GroupBatch(torch.tensor([blocks, blocks], dtype=torch.int32).to(device), slots)
    batch = StepBatch(
        token_ids=torch.zeros(6, dtype=torch.int64),
        positions=torch.arange(6),
        query_starts=torch.tensor([0, 1, 6], dtype=torch.int32).to(device),
        kv_lens=torch.tensor([61, 64], dtype=torch.int32).to(device),
        groups=(group,),
        num_decode=1,
        max_query_len=5,
        max_kv_len=64,
    )
    q = torch.randn(6, 4, 64).half().to(device)
    expected = REFERENCE.attention(q, spec, slab, 1, batch, group)
    out = KERNELS.attention(q, spec, slab, 1, batch, group)
    torch.testing.assert_close(out, expected, rtol=5e-3, atol=5e-3)
