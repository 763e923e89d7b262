"""The model of a step's time, against times that are known."""

import random
from collections.abc import Iterator

import pytest

from engine.step_times import StepShape, StepTimes

BASE_S, PROMPT_S, CONTEXT_S, SEQUENCE_S = 2e-3, 40e-6, 30e-9, 20e-6


def seconds(shape: StepShape, slower: float = 1.0) -> float:
    return slower * (
        BASE_S
        + PROMPT_S * shape.num_prompt_tokens
        + CONTEXT_S * shape.num_context_tokens
        + SEQUENCE_S * shape.num_sequences
    )


def steps(count: int, seed: int = 1) -> Iterator[StepShape]:
    """Mostly decoding, with a prompt's chunk now and then."""
    source = random.Random(seed)
    for _ in range(count):
        decoding = source.randint(0, 32)
        prompt = source.randint(16, 2048) if source.random() < 0.2 or not decoding else 0
        context = sum(source.randint(10, 4000) for _ in range(decoding))
        yield StepShape(prompt, context, decoding + (prompt > 0))


PROBES = [
    StepShape(2048, 0, 1),
    StepShape(0, 2000, 1),
    StepShape(0, 64_000, 32),
    StepShape(512, 30_000, 17),
]


def worst_error(times: StepTimes, slower: float = 1.0) -> float:
    return max(abs(times.predict(p) / seconds(p, slower) - 1) for p in PROBES)


def test_it_finds_the_costs_behind_the_noise() -> None:
    times, noise = StepTimes(), random.Random(2)
    for shape in steps(400):
        times.note(shape, seconds(shape) * noise.uniform(0.9, 1.1))
    assert worst_error(times) < 0.1


def test_a_pause_now_and_then_changes_little() -> None:
    times, noise = StepTimes(), random.Random(2)
    for number, shape in enumerate(steps(400)):
        pause = 1.0 if number % 40 == 20 else 0.0
        times.note(shape, seconds(shape) * noise.uniform(0.95, 1.05) + pause)
    assert worst_error(times) < 0.25


def test_it_follows_a_machine_that_becomes_slower() -> None:
    times = StepTimes()
    for shape in steps(300):
        times.note(shape, seconds(shape))
    for shape in steps(700, seed=3):
        times.note(shape, seconds(shape, slower=2.0))
    assert worst_error(times, slower=2.0) < 0.1


def test_prompts_are_remembered_through_a_time_of_decoding() -> None:
    times = StepTimes()
    for shape in steps(300):
        times.note(shape, seconds(shape))
    for number in range(3000):
        shape = StepShape(0, 1000 + number, 8)
        times.note(shape, seconds(shape))
    assert times.predict(PROBES[0]) == pytest.approx(seconds(PROBES[0]), rel=0.3)


def test_no_cost_is_negative_and_nothing_is_known_at_first() -> None:
    times = StepTimes()
    assert times.predict(PROBES[0]) == 0.0
    for shape in steps(200):
        times.note(shape, 0.01 / (1 + shape.num_sequences))  # faster, the more there is to do
    assert all(times.predict(probe) >= 0 for probe in PROBES)
    assert times.predict(StepShape(0, 0, 0)) <= times.predict(StepShape(9, 9, 9))


def test_two_steps_say_something() -> None:
    """What an engine knows when it has warmed up."""
    times = StepTimes()
    for shape in (StepShape(65, 0, 1), StepShape(0, 65, 1)):
        times.note(shape, seconds(shape))
    shape = StepShape(65, 0, 1)
    assert times.predict(shape) == pytest.approx(seconds(shape), rel=0.1)
