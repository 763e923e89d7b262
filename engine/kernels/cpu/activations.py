"""act(gate) * up, for the activations that models use."""

from typing import Any

from engine.kernels.cpu.emit import LANES
from engine.kernels.cpu.language import part_of_kernel
from engine.kernels.cpu.memory import claim, element_bytes, load, store, word
from engine.kernels.cpu.vectors import magnitude, power_of_two, splat, with_sign_of
from engine.kernels.interface import Activation

WORDS = "6q"
CODES = {Activation.SILU: 0, Activation.GELU_TANH: 1, Activation.GELU: 2}
LOG2_E = 1.4426950408889634


def gated_activation(job: Any) -> None:
    """Pieces are rows of [gate | up]."""
    gate_up, out = word(job, 0), word(job, 1)
    width, rows, together, code = word(job, 2), word(job, 3), word(job, 4), word(job, 5)
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
                store(job, out + row * row_bytes + at, value, count)


@part_of_kernel
def activated(x: Any, code: Any) -> Any:
    if code == 0:
        return x * sigmoid(x)
    if code == 1:  # 0.5 * (1 + tanh(y)) is sigmoid(2 * y)
        return x * sigmoid(x * (x * x * 0.07135481282665 + 1.5957691216057308))
    return x * 0.5 * (error_function(x * 0.7071067811865476) + 1.0)


@part_of_kernel
def sigmoid(x: Any) -> Any:
    return splat(1.0) / (power_of_two(x * -LOG2_E) + 1.0)


@part_of_kernel
def error_function(x: Any) -> Any:
    """Abramowitz and Stegun 7.1.26, within 1.5e-7."""
    size = magnitude(x)
    t = splat(1.0) / (size * 0.3275911 + 1.0)
    poly = t * 1.061405429 - 1.453152027
    poly = poly * t + 1.421413741
    poly = poly * t - 0.284496736
    poly = (poly * t + 0.254829592) * t
    return with_sign_of(splat(1.0) - poly * power_of_two(x * x * -LOG2_E), x)
