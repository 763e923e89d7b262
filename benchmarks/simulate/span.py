"""Decode steps of one batch as one event: how long so many of them take together."""

import math
from dataclasses import dataclass

from benchmarks.simulate.device import NO_PROMPTS, Device


@dataclass(frozen=True, slots=True)
class Span:
    """`num_steps` steps from `start` on; each takes `slope_s` longer than the one before."""

    start: float
    num_steps: int
    first_s: float
    slope_s: float

    def after_s(self, steps: int) -> float:
        """What the first so many steps take."""
        return steps * self.first_s + self.slope_s * (steps * (steps - 1) / 2)

    def num_done(self, now: float) -> int:
        """Steps that are complete."""
        elapsed_s = now - self.start + 1e-9
        if not self.slope_s:
            return min(self.num_steps, int(elapsed_s / self.first_s))
        linear = self.first_s - self.slope_s / 2
        root = math.sqrt(linear * linear + 2 * self.slope_s * elapsed_s)
        return min(self.num_steps, int((root - linear) / self.slope_s))

    def cut(self, now: float) -> "Span":
        """Ends with the step that is under way."""
        num_steps = min(self.num_steps, self.num_done(now) + 1)
        return Span(self.start, num_steps, self.first_s, self.slope_s)


def decode_span(
    device: Device, start: float, num_sequences: int, context: int, most_steps: int
) -> Span:
    """Every sequence reads one token more with each step. Ends where steps that were bound by
    arithmetic begin to be bound by reading, or the other way round: both grow evenly."""
    reading_s = device.memory_s(NO_PROMPTS, context)
    computing_s = device.compute_s(NO_PROMPTS, num_sequences, context)
    more_reading_s = device.kv_token_bytes * num_sequences / device.bytes_per_s
    more_computing_s = device.pair_flops * num_sequences / device.flops_per_s
    if reading_s >= computing_s:
        longer_s, slope_s = reading_s, more_reading_s
        lead_s, gain_s = reading_s - computing_s, more_computing_s - more_reading_s
    else:
        longer_s, slope_s = computing_s, more_computing_s
        lead_s, gain_s = computing_s - reading_s, more_reading_s - more_computing_s
    steps = most_steps
    if gain_s > 0:
        steps = min(steps, int(lead_s / gain_s) + 1)
    return Span(start, steps, device.decode_step_s + longer_s, slope_s)
