"""RMSNorm of rows, optionally of the sum with a residual that is written back."""

from typing import Any

from engine.kernels.cpu.emit import LANES
from engine.kernels.cpu.language import part_of_kernel
from engine.kernels.cpu.memory import claim, element_bytes, load, load_fp32, real, store, word
from engine.kernels.cpu.vectors import fma, root, splat, total

WORDS = "9qd"


def rms_norm(job: Any) -> None:
    """Pieces are rows. Where there is a residual, it becomes the sum, and its norm the result."""
    x, x_row = word(job, 0), word(job, 1)  # [rows, width]
    residual, weight = word(job, 2), word(job, 3)  # 0 for no residual; weight is fp32
    out, out_row = word(job, 4), word(job, 5)
    width, rows, together = word(job, 6), word(job, 7), word(job, 8)
    eps = real(job, 9)
    while True:
        first = claim(job, together)
        if first >= rows:
            return
        for row in range(first, min(first + together, rows)):
            source = x + row * x_row
            if residual != 0:
                summed = residual + row * width * element_bytes(job)
                add_to(job, source, summed, width)
                source = summed
            scale = norm_scale(job, source, width, eps)
            scaled(job, source, weight, scale, out + row * out_row, width)


@part_of_kernel
def add_to(job: Any, x: Any, residual: Any, width: Any) -> None:
    for i in range(0, width, LANES):
        place, count = residual + i * element_bytes(job), width - i
        value = load(job, place, count) + load(job, x + i * element_bytes(job), count)
        store(job, place, value, count)


@part_of_kernel
def norm_scale(job: Any, x: Any, width: Any, eps: Any) -> Any:
    """1 / root of (mean square + eps)."""
    squares = splat(0.0)
    for i in range(0, width, LANES):
        value = load(job, x + i * element_bytes(job), width - i)
        squares = fma(value, value, squares)
    return 1.0 / root(total(squares) / width + eps)


@part_of_kernel
def scaled(job: Any, x: Any, weight: Any, scale: Any, out: Any, width: Any) -> None:
    for i in range(0, width, LANES):
        value = load(job, x + i * element_bytes(job), width - i) * scale
        value = value * load_fp32(weight + i * 4, width - i)
        store(job, out + i * element_bytes(job), value, width - i)
