"""The compiled kernels outside attention against the reference, for every element type."""

from dataclasses import replace

import pytest
import torch

from engine.kernels.cpu.features import CpuFeatures
from engine.kernels.cpu.kernels import CpuKernels
from engine.kernels.cpu.packing import IN_TILES, PANELS, Packing, WeightMemory
from engine.kernels.interface import Activation, AttentionSpec
from engine.kernels.reference import activated
from tests.engine.kernels.cases import make_slab, make_spec, random_slots, rotate_case
from tests.engine.kernels.cpu import BEST, DTYPES, PLAIN, REFERENCE

PAIRS = CpuKernels(replace(CpuFeatures.of_this_machine(), bf16_tiles=False))
WITH_PLAIN = [*DTYPES, pytest.param(torch.float32, PLAIN, id="fp32-plain-cpu")]

# Both sides compute in fp32 and round once: half precision may differ by one unit in the last
# place where the fp32 results lie on two sides of a rounding boundary.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize(("dtype", "kernels"), DTYPES)
@pytest.mark.parametrize("width", [7, 16, 40, 768])
@pytest.mark.parametrize("rows", [1, 90])  # of 768 elements: shared by threads
def test_norms(dtype: torch.dtype, kernels: CpuKernels, width: int, rows: int) -> None:
    x, residual = torch.randn(2, rows, width).to(dtype)
    weight = torch.randn(width)
    theirs_residual = residual.clone()
    assert_same(kernels.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    ours = kernels.add_rms_norm(x, residual, weight, 1e-5)
    theirs = REFERENCE.add_rms_norm(x, theirs_residual, weight, 1e-5)
    assert_same(residual, theirs_residual)
    assert_same(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (3, 5), (300, 1000)])
def test_pick_rows(dtype: torch.dtype, rows: int, width: int) -> None:
    x = torch.randn(70, width + 3).to(dtype)[:, :width]
    numbers = torch.randint(70, (rows,))
    assert torch.equal(CpuKernels().pick_rows(x, numbers), x[numbers])


@pytest.mark.parametrize(("dtype", "kernels"), DTYPES)
@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("width", [5, 48, 1000])
def test_gated_activation(
    dtype: torch.dtype, kernels: CpuKernels, activation: Activation, width: int
) -> None:
    gate_up = torch.randn(70, 2 * width).mul(5).to(dtype)  # of 1,000: shared by threads
    gate_up[0, : min(width, 3)] = torch.tensor([200.0, -200.0, 0.0])[:width].to(dtype)
    ours = kernels.gated_activation(gate_up, activation)
    gate, up = gate_up.double().chunk(2, dim=-1)  # torch's fp32 loses digits where GELU is small
    assert_same(ours, (activated(gate, activation) * up).to(dtype))


@pytest.mark.parametrize(
    ("dtype", "kernels"),
    [
        *DTYPES,
        pytest.param(torch.bfloat16, PAIRS, id="bf16-pairs"),
        pytest.param(torch.float16, PLAIN, id="fp16-plain-cpu"),
        pytest.param(torch.float32, PLAIN, id="fp32-plain-cpu"),
    ],
)
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(64, 32), (1, 16), (200, 96), (130, 33), (70, 1100), (530, 300)]
)
def test_linear(dtype: torch.dtype, kernels: CpuKernels, outputs: int, inputs: int) -> None:
    weight = torch.randn(outputs, inputs).mul(inputs**-0.5).to(dtype)
    bias = torch.randn(outputs).to(dtype)
    for used_bias in (bias, None):
        ours = kernels.linear(weight.clone(), used_bias)
        theirs = REFERENCE.linear(weight, used_bias)
        for rows in (0, 1, 2, 3, 6, 13, 20, 57, 400):
            x = torch.randn(rows, inputs).to(dtype)
            assert_same(ours(x), theirs(x))


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (1, 16), (130, 33), (530, 300)])
@pytest.mark.parametrize(
    ("packing", "dtype"),
    [
        pytest.param(PANELS["f32"], torch.float32, id="fp32"),
        pytest.param(PANELS["f16"], torch.float16, id="fp16"),
        pytest.param(PANELS["bf16"], torch.bfloat16, id="bf16"),
        pytest.param(PANELS["bf16_dot"], torch.bfloat16, id="bf16-pairs"),
        pytest.param(IN_TILES, torch.bfloat16, id="bf16-tiles"),
    ],
)
def test_rows_of_a_packed_weight_are_the_weights(
    packing: Packing, dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    weight = torch.randn(outputs, inputs).to(dtype)
    packed = packing.pack(weight, WeightMemory().empty)
    for numbers in (torch.arange(outputs), torch.randint(0, outputs, (7,)), torch.arange(0)):
        assert torch.equal(packing.rows(packed, numbers)[:, :inputs], weight[numbers])


def test_one_weight_is_read_as_head_and_as_embedding() -> None:
    """On a CPU with wide registers; packing and reading take none."""
    kernels = CpuKernels(CpuFeatures(wide_registers=True, bf16_dot=True, bf16_tiles=False))
    weight = torch.randn(530, 300)
    rows = kernels.rows_of(kernels.linear(weight, None))
    assert rows is not None
    numbers = torch.tensor([529, 0, 63, 64, 63])
    assert torch.equal(rows(numbers), weight[numbers])


@pytest.mark.parametrize(("dtype", "kernels"), WITH_PLAIN)
def test_linear_gives_a_row_the_same_bits_beside_any_others(
    dtype: torch.dtype, kernels: CpuKernels
) -> None:
    linear = kernels.linear(torch.randn(530, 320).to(dtype), None)
    x = torch.randn(75, 320).to(dtype)
    together = linear(x)
    for rows in (1, 2, 5, 7, 16, 31, 40):
        assert torch.equal(linear(x[3 : 3 + rows]), together[3 : 3 + rows])


@pytest.mark.parametrize(("dtype", "kernels"), WITH_PLAIN)
def test_rows_that_lie_apart_are_read_where_they_lie(
    dtype: torch.dtype, kernels: CpuKernels
) -> None:
    apart = torch.full((75, 336), torch.nan).to(dtype)[:, :320]
    apart.copy_(torch.randn(75, 320))
    linear, norm = kernels.linear(torch.randn(530, 320).to(dtype), None), torch.randn(320)
    for rows in (apart[:1], apart[:20], apart):
        assert torch.equal(linear(rows), linear(rows.clone(memory_format=torch.contiguous_format)))
        assert_same(kernels.rms_norm(rows, norm, 1e-5), REFERENCE.rms_norm(rows, norm, 1e-5))


@pytest.mark.parametrize(("dtype", "kernels"), DTYPES)
@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize(
    ("spec", "half", "normed"),
    [
        (make_spec(4, 2, 64, 64), 32, False),
        (make_spec(3, 1, 16, 16), 8, True),
        (make_spec(2, 2, 96, 40), 12, True),
        (make_spec(5, 1, 80, 80), 40, False),
    ],
)
def test_rotate_and_write(
    dtype: torch.dtype,
    kernels: CpuKernels,
    block_size: int,
    spec: AttentionSpec,
    half: int,
    normed: bool,
) -> None:
    case = rotate_case(spec, half, normed, 12 * block_size, dtype=dtype)
    ours, theirs = (make_slab(spec, 12, block_size, dtype=dtype) for _ in range(2))
    q, expected = case.run(kernels, ours), case.run(REFERENCE, theirs)
    assert_same(q, expected)
    assert_same(ours.data, theirs.data)


@pytest.mark.parametrize(("dtype", "kernels"), DTYPES)
def test_write_kv_copies_every_bit(dtype: torch.dtype, kernels: CpuKernels) -> None:
    spec = make_spec(4, 2, 24, 40)
    slab, expected = (make_slab(spec, 6, dtype=dtype) for _ in range(2))
    k, v = torch.randn(11, 2, 24).to(dtype), torch.randn(11, 2, 40).to(dtype)
    k[0, 0, 0] = 1e-40
    slots = random_slots(11, 96)
    kernels.write_kv(k, v, slab, 2, slots)
    REFERENCE.write_kv(k, v, expected, 2, slots)
    assert torch.equal(slab.data.view(torch.uint8), expected.data.view(torch.uint8))


def test_a_cache_of_another_type_than_the_model() -> None:
    spec = make_spec(4, 2, 32)
    case = rotate_case(spec, half=16, normed=False, num_slots=64)
    ours, theirs = (make_slab(spec, 4, dtype=torch.bfloat16) for _ in range(2))
    q, expected = case.run(BEST, ours), case.run(REFERENCE, theirs)
    assert q.dtype == torch.float32
    torch.testing.assert_close(q, expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(ours.data, theirs.data, rtol=2e-2, atol=2e-2, equal_nan=True)
