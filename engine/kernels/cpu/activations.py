"""act(gate) * up, for the activations that models use."""

from typing import Any

from engine.kernels.cpu.emit import LANES
from engine.kernels.cpu.language import part_of_kernel
from engine.kernels.cpu.memory import claim, element_bytes, load, store, word
from engine.kernels.cpu.vectors import LOG2_E, magnitude, power_of_two, splat
from engine.kernels.interface import Activation

WORDS = "7q"
CODES = {Activation.SILU: 0, Activation.GELU_TANH: 1, Activation.GELU: 2}


def gated_activation(job: Any) -> None:
    """Pieces are rows of [gate | up]."""
    gate_up, out, out_row = word(job, 0), word(job, 1), word(job, 2)
    width, rows, together, code = word(job, 3), word(job, 4), word(job, 5), word(job, 6)
    row_bytes = width * element_bytes(job)
    while True:
        first = claim(job, together)
        if first >= rows:
            return
        for row in range(first, min(first + together, rows)):
            gate = gate_up + 2 * row * row_bytes
            for i in range(0, width, LANES):
                at, count = i * element_bytes(job), width - i
                value = activated(load(job, gate + at, count), code)
                value = value * load(job, gate + row_bytes + at, count)
                store(job, out + row * out_row + at, value, count)


@part_of_kernel
def activated(x: Any, code: Any) -> Any:
    if code == 0:
        return x * sigmoid(x)
    if code == 1:  # 0.5 * (1 + tanh(y)) is sigmoid(2 * y)
        return x * sigmoid(x * (x * x * 0.07135481282665 + 1.5957691216057308))
    size = magnitude(x)  # what is taken off is small where the result is: its digits stay
    return (x + size) * 0.5 - size * 0.5 * beyond(size * 0.7071067811865476)


@part_of_kernel
def sigmoid(x: Any) -> Any:
    return splat(1.0) / (power_of_two(x * -LOG2_E) + 1.0)


@part_of_kernel
def beyond(x: Any) -> Any:
    """erfc(x) for x >= 0, within 1.2e-7 of itself: Numerical Recipes' Chebyshev fit."""
    t = splat(1.0) / (x * 0.5 + 1.0)
    poly = t * 0.17087277 - 0.82215223
    poly = poly * t + 1.48851587
    poly = poly * t - 1.13520398
    poly = poly * t + 0.27886807
    poly = poly * t - 0.18628806
    poly = poly * t + 0.09678418
    poly = poly * t + 0.37409196
    poly = poly * t + 1.00002368
    poly = poly * t - 1.26551223
    return t * power_of_two((poly - x * x) * LOG2_E)
