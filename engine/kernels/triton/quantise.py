"""Rows as a quantised cache stores them: a scale each, elements over that, rounded to even."""

import triton
import triton.language as tl

SMALLEST_ROW = tl.constexpr(2.0**-100)  # its largest element; below, 1 / scale could overflow
ROUNDS = tl.constexpr(1.5 * 2.0**23)  # added to a small fp32 number, it leaves no fraction


@triton.jit
def highest_of(rows: tl.tensor) -> tl.tensor:
    """The largest magnitude of each row; infinite where one is NaN, which a maximum would drop."""
    magnitudes = tl.abs(rows)
    return tl.max(tl.where(magnitudes == magnitudes, magnitudes, float("inf")), 1)


@triton.jit
def scale_of(highest: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    return tl.where(highest < SMALLEST_ROW, 1.0, highest / LARGEST)


@triton.jit
def stored_as(
    rows: tl.tensor, scale: tl.tensor, LARGEST: tl.constexpr, KIND: tl.constexpr
) -> tl.tensor:
    """Elements of KIND; zeros where the scale is infinite, so that they are read as NaN."""
    rows = rows * (1.0 / scale)[:, None]
    rows = tl.where(rows == rows, tl.minimum(tl.maximum(rows, -LARGEST), LARGEST), 0.0)
    if KIND == tl.int8:  # noqa: SIM300 - not a constant of Python's
        rows = (rows + ROUNDS) - ROUNDS
    return rows.to(KIND)
