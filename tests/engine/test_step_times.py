"""The model of a step's time, against times that are known."""

import random
from collections.abc import Iterator

import pytest

from engine.step import Slice, StepPlan
from engine.step_times import StepShape, StepTimes, num_pairs

BASE_S, PROMPT_S, CONTEXT_S, SEQUENCE_S, PAIR_S = 2e-3, 40e-6, 30e-9, 20e-6, 8e-9


def seconds(shape: StepShape, slower: float = 1.0) -> float:
    return slower * (
        BASE_S
        + PROMPT_S * shape.num_prompt_tokens
        + CONTEXT_S * shape.num_context_tokens
        + SEQUENCE_S * shape.num_sequences
        + PAIR_S * shape.num_prompt_pairs
    )


def steps(count: int, seed: int = 1) -> Iterator[StepShape]:
    """Mostly decoding, with a prompt's chunk now and then."""
    source = random.Random(seed)
    for _ in range(count):
        decoding = source.randint(0, 32)
        prompt = source.randint(16, 2048) if source.random() < 0.2 or not decoding else 0
        start = source.choice([0, 0, 1024, 8192, 30_000])
        context = sum(source.randint(10, 4000) for _ in range(decoding))
        pairs = sum(range(start, start + prompt))  # one by one
        yield StepShape(prompt, context, decoding + (prompt > 0), pairs)


PROBES = [
    StepShape(2048, 0, 1, 2048**2 / 2),
    StepShape(2048, 0, 1, 2048 * 60_000),
    StepShape(0, 2000, 1),
    StepShape(0, 64_000, 32),
    StepShape(512, 30_000, 17, 512 * 4000),
]


def worst_error(times: StepTimes, slower: float = 1.0) -> float:
    return max(abs(times.predict(p) / seconds(p, slower) - 1) for p in PROBES)


def test_it_finds_the_costs_behind_the_noise() -> None:
    times, noise = StepTimes(), random.Random(2)
    for shape in steps(400):
        times.note(shape, seconds(shape) * noise.uniform(0.9, 1.1))
    assert worst_error(times) < 0.1


def test_each_cost_of_a_prompt_is_told_from_the_other() -> None:
    times, noise = StepTimes(), random.Random(2)
    for shape in steps(1500):
        times.note(shape, seconds(shape) * noise.uniform(0.98, 1.02))
    assert times.costs.prompt_pair_s == pytest.approx(PAIR_S, rel=0.05)
    assert times.costs.prompt_token_s == pytest.approx(PROMPT_S, rel=0.1)


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_chunks_have_as_many_pairs_as_the_whole_prompt(chunk: int) -> None:
    """One step that decodes two sequences besides; u new tokens after c: u * c + u * u / 2."""
    decoding = [Slice(slot, 500, 1, 500, ()) for slot in (1, 2)]
    pairs = 0.0
    for start in range(0, 1000, chunk):
        num_tokens = min(chunk, 1000 - start)
        part = Slice(0, start, num_tokens, start, ())
        shape = StepShape.of(StepPlan(1, (*decoding, part), 2, 2 + num_tokens))
        assert shape[:3] == (num_tokens, 1000, 3)
        pairs += shape.num_prompt_pairs
    assert pairs == 1000**2 / 2


@pytest.mark.parametrize(("every", "longer"), [(40, 100.0), (8, 10.0)])
def test_a_pause_now_and_then_changes_little(every: int, longer: float) -> None:
    times, noise = StepTimes(), random.Random(2)
    for number, shape in enumerate(steps(400), 1):
        took_s = seconds(shape, slower=1.0 if number % every else longer)
        times.note(shape, took_s * noise.uniform(0.95, 1.05))
    assert worst_error(times) < 0.03


def test_it_follows_a_machine_that_becomes_slower() -> None:
    times = StepTimes()
    for shape in steps(300):
        times.note(shape, seconds(shape))
    for shape in steps(700, seed=3):
        times.note(shape, seconds(shape, slower=2.0))
    assert worst_error(times, slower=2.0) < 0.1


def test_decoding_alone_is_known_soon_and_followed() -> None:
    """No prompt comes that would have the costs found anew."""
    times = StepTimes()
    for slower, count in ((1.0, 3), (1.0, 100), (2.0, 300)):
        for number in range(count):
            shape = StepShape(0, 1000 + number, 8)
            times.note(shape, seconds(shape, slower))
        assert times.predict(shape) == pytest.approx(seconds(shape, slower), rel=0.05)


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


def warmed_up() -> StepTimes:
    times = StepTimes(PAIR_S / PROMPT_S)
    for shape in (StepShape(65, 0, 1, num_pairs(0, 65)), StepShape(0, 65, 1)):
        times.note(shape, seconds(shape))
        assert times.predict(shape) == pytest.approx(seconds(shape), rel=0.1)
    return times


def test_what_an_engine_knows_when_it_has_warmed_up() -> None:
    """Little of what was not in its steps."""
    times = warmed_up()
    for length in (512, 2048, 8192):
        long = StepShape(length, 0, 1, num_pairs(0, length))
        assert times.predict(long) == pytest.approx(seconds(long), rel=0.3)
    many = StepShape(0, 64 * 2000, 64)
    assert seconds(many) / 5 < times.predict(many) < 2 * seconds(many)


@pytest.mark.parametrize("length", [64, 65, 500])
def test_short_prompts_do_not_make_long_ones_look_endless(length: int) -> None:
    """By the noise alone they would: any share of their time may be that of their pairs."""
    times, noise = warmed_up(), random.Random(2)
    for _ in range(300):
        for num_prompts in (0, 0, 0, 0, 1, 3):
            shape = StepShape(
                num_prompts * length, 4000, 8 + num_prompts, num_prompts * num_pairs(0, length)
            )
            times.note(shape, seconds(shape) * noise.uniform(0.7, 1.6))
    long = StepShape(8192, 0, 1, num_pairs(0, 8192))
    assert seconds(long) / 3 < times.predict(long) < 4 * seconds(long)


@pytest.mark.parametrize("start", [0, 192, 1800])
def test_short_prompts_do_not_make_tokens_or_pairs_look_dear(start: int) -> None:
    """Of what a step with any prompt takes besides, 2 ms, as a small model does on a CPU: by the
    ends of prompts that share the rest a long one would take many times as long."""
    times, noise = StepTimes(PAIR_S / PROMPT_S), random.Random(2)
    warm_up = [StepShape(65, 0, 1, num_pairs(0, 65)), StepShape(0, 65, 1)]
    first = StepShape(start + 8, 0, 1, num_pairs(0, start + 8))
    end = StepShape(8, 2 * start, 3, num_pairs(start, start + 8))
    decoding = [StepShape(0, 2 * start + number, 2) for number in range(12)]
    for shape in [*warm_up, first, *decoding, *(40 * [end, *decoding])]:
        besides_s = 2e-3 if shape.num_prompt_tokens else 0.0
        times.note(shape, (seconds(shape) + besides_s) * noise.uniform(0.9, 1.2))
    long = StepShape(1900, 0, 1, num_pairs(0, 1900))
    assert seconds(long) / 2 < times.predict(long) < 2 * seconds(long)
