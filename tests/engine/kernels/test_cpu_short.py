"""Weights in twelve bits: the same products to the last bit, and the same rows."""

import llvmlite.binding as llvm
import pytest
import torch
from safetensors.torch import load_file

from engine.kernels.cpu.emit import LINE_BYTES
from engine.kernels.cpu.linear import PanelLinear, make_linear, packed, product_of
from engine.kernels.cpu.packing import WeightMemory
from engine.kernels.cpu.shortening import CHUNK_PANELS, SAMPLE
from engine.model_source import BUNDLED_FOLDER
from tests.engine.kernels.cpu import REFERENCE

FOUND = llvm.get_host_cpu_features()
ELEMENTS = [
    pytest.param(element, marks=pytest.mark.skipif(not FOUND.get(needed), reason=f"no {needed}"))
    for element, needed in (
        ("bf16", "avx512bw"),
        ("bf16_dot", "avx512bf16"),
        ("bf16_narrow", "avx2"),
    )
]
ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 14, 16, 40, 63, 64, 70, 384, 385, 391)
ODD = torch.tensor([0.0, -0.0, 1e-39, -1e-30, 3e10, 1e-9, torch.inf, torch.nan])


def normal(outputs: int, inputs: int) -> torch.Tensor:
    return torch.randn(outputs, inputs).mul(inputs**-0.5).bfloat16()


def with_odd_ones(weight: torch.Tensor, values: torch.Tensor, share: float) -> torch.Tensor:
    """In its corners, in neighbours, and anywhere; `share` of all."""
    flat = weight.view(-1)
    places = torch.randperm(len(flat))[: max(1, int(share * len(flat)))]
    flat[places] = values[torch.randint(len(values), (len(places),))].bfloat16()
    for place in (0, 1, -1):
        flat[place] = values[1].bfloat16()
    return weight


def bits(x: torch.Tensor) -> torch.Tensor:
    """NaN of any sort are alike; of others the sign of zero counts."""
    return torch.where(x.isnan(), torch.nan, x).view(torch.int16)


def both_ways(element: str, weight: torch.Tensor) -> tuple[PanelLinear, PanelLinear]:
    product = product_of(element)
    short, plain = (
        packed(way, WeightMemory(), weight) for way in (product, product._replace(short=None))
    )
    assert product.short is not None
    assert short.multiply is product.short.multiply
    return PanelLinear(product, short, weight, None), PanelLinear(product, plain, weight, None)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("values", [ODD[:6], ODD], ids=["finite", "not-finite"])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(64, 32), (1, 16), (130, 33), (530, 300), (200, 1100)]
)
def test_products_and_rows_have_the_same_bits(
    element: str, values: torch.Tensor, outputs: int, inputs: int
) -> None:
    weight = with_odd_ones(normal(outputs, inputs), values, 1 / 1000)
    short, plain = both_ways(element, weight)
    for count in ROWS:
        x = torch.randn(count, inputs).bfloat16()
        assert torch.equal(bits(short(x)), bits(plain(x)))
    for numbers in (torch.arange(outputs), torch.randint(outputs, (7,)), torch.arange(0)):
        assert torch.equal(bits(short.rows(numbers)), bits(weight[numbers]))


@pytest.mark.parametrize("element", ELEMENTS)
def test_a_normal_weight_takes_three_quarters(element: str) -> None:
    weight, product = normal(640, 512), product_of(element)
    short = packed(product, WeightMemory(), weight)
    assert short.panels.nbytes == weight.nbytes * 3 // 4


@pytest.mark.parametrize("element", ELEMENTS)
def test_trained_weights_do_as_well(element: str) -> None:
    """Their upper bytes are of more kinds than a normal distribution's, all those of one step are
    not."""
    product = product_of(element)
    tensors = load_file(BUNDLED_FOLDER / "model.safetensors")
    linear = {name: tensor for name, tensor in tensors.items() if name.endswith("proj.weight")}
    assert linear
    for name, weight in linear.items():
        short = packed(product, WeightMemory(), weight.bfloat16())
        assert short.multiply is not product.multiply, name


@pytest.mark.parametrize("element", ELEMENTS)
def test_a_weight_of_many_exponents_stays_as_it_is(element: str) -> None:
    weight = torch.randn(130, 96).mul(torch.rand(130, 96).mul(40).sub(20).exp2()).bfloat16()
    product, place = product_of(element), WeightMemory()
    first = place.empty((1,), dtype=torch.uint8)
    plain = packed(product, place, weight)
    assert plain.multiply is product.multiply
    assert plain.panels.data_ptr() == first.data_ptr() + LINE_BYTES  # nothing was left behind
    linear = make_linear(product, WeightMemory(), weight, None)
    x = torch.randn(9, 96).bfloat16()
    theirs = REFERENCE.linear(weight, None)(x)
    torch.testing.assert_close(linear(x), theirs, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("element", ELEMENTS)
def test_what_the_sample_does_not_show_is_right_all_the_same(element: str) -> None:
    """Columns of nothing but odd weights, one of many that are looked at in part."""
    inputs = 512
    weight = normal(2 * SAMPLE // inputs + 64 * CHUNK_PANELS, inputs)
    weight[-70:-1] = 1e-20
    weight[5, ::2] = -1e20
    short, plain = both_ways(element, weight)
    for count in (1, 7, 64):
        x = torch.randn(count, inputs).bfloat16()
        assert torch.equal(bits(short(x)), bits(plain(x)))
    assert torch.equal(short.rows(torch.arange(len(weight))), weight)


@pytest.mark.parametrize("element", ELEMENTS)
def test_steps_have_tables_of_their_own(element: str) -> None:
    """Of columns of many widths, more bytes than one table has."""
    widths = torch.arange(0, 60, 6).repeat_interleave(64).sub(30).exp2()
    weight = torch.randn(len(widths), 256).mul(widths.unsqueeze(1)).bfloat16()
    short, plain = both_ways(element, weight)
    for count in (1, 8, 33, 70):
        x = torch.randn(count, 256).bfloat16()
        assert torch.equal(bits(short(x)), bits(plain(x)))
    assert torch.equal(short.rows(torch.arange(len(weight))), weight)
