"""The autoscaling policy on simulated pools: it settles, does not swing, and keeps to its
objective on recorded load."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.cluster.scaling_simulation import (
    OBJECTIVES,
    STEP_S,
    DecodeWorkers,
    Ingresses,
    PrefillWorkers,
    Workers,
    simulate,
)

RECORDED = Path(__file__).parent / "recorded" / "conversation_load.csv"
SLOW = settings(max_examples=2)
PROMPT_S = 0.4  # of work
ANSWER_TOKENS = 200.0
# A full worker of the simulation has 32 sequences, which take a token each 74 ms: by this many
# answers a second it has no more room.
ANSWERS_PER_WORKER = 2.1
REQUEST_S = 10.0  # that one is open at an ingress

LOADS = st.integers(1, 55).map(lambda tenths: tenths / 10)  # in workers
Arrivals = Callable[[float], Sequence[float]]


def evenly(rate: float, work: float) -> Arrivals:
    def arrivals(now: float) -> Sequence[float]:
        return [work] * (int((now + STEP_S) * rate) - int(now * rate))

    return arrivals


def at_random(rng: random.Random, rate: float, work: float) -> Arrivals:
    def arrivals(now: float) -> Sequence[float]:
        found: list[float] = []
        at = rng.expovariate(rate)
        while at < STEP_S:
            found.append(work * rng.uniform(0.25, 1.75))
            at += rng.expovariate(rate)
        return found

    return arrivals


def pool_of(name: str, load: float) -> tuple[Workers, float, float]:
    """Workers, and the rate and size of what comes, so that `load` of them are just enough."""
    if name == "prefill":
        return PrefillWorkers(), load / PROMPT_S, PROMPT_S
    if name == "ingress":
        return Ingresses(), load * OBJECTIVES.most_requests / REQUEST_S, REQUEST_S
    return DecodeWorkers(), load * ANSWERS_PER_WORKER, ANSWER_TOKENS


@pytest.mark.parametrize("name", ["prefill", "decode", "ingress"])
@SLOW
@given(load=LOADS, first=st.integers(1, 12), startup_s=st.floats(2, 60))
@example(load=1.7, first=1, startup_s=17.0)
def test_an_even_load_settles_and_stays(
    name: str, load: float, first: int, startup_s: float
) -> None:
    workers, rate, size = pool_of(name, load)
    run = simulate(workers, evenly(rate, size), 3000, startup_s=startup_s, target=first)
    assert run.changes_after(2000) == []
    assert load <= run.target <= max(1.0, 2.0 * load + 1)


@pytest.mark.parametrize("name", ["prefill", "decode", "ingress"])
@SLOW
@given(load=LOADS, seed=st.integers(0, 10**6))
def test_a_random_load_is_not_chased(name: str, load: float, seed: int) -> None:
    workers, rate, size = pool_of(name, load)
    run = simulate(workers, at_random(random.Random(seed), rate, size), 3600)
    late = run.changes_after(1800)
    assert len(late) <= 4, run.changes
    assert all(abs(change.after - change.before) == 1 for change in late), run.changes
    if isinstance(workers, PrefillWorkers):
        assert in_95_of_100(workers.waits_s) <= 2.0


@SLOW
@given(load=LOADS, seed=st.integers(0, 10**6))
def test_workers_that_cannot_be_busy_all_the_time_are_full_sooner(load: float, seed: int) -> None:
    """`load` of them, at work for seven tenths of their time at most, are just enough."""
    workers = PrefillWorkers(efficiency=0.7)
    rate = 0.7 * load / PROMPT_S
    run = simulate(workers, at_random(random.Random(seed), rate, PROMPT_S), 3600)
    assert in_95_of_100(workers.waits_s) <= 2.0
    assert len(run.changes_after(1800)) <= 4, run.changes


@pytest.mark.parametrize("name", ["prefill", "ingress"])
@SLOW
@given(half_s=st.integers(15, 240), high=st.floats(1.5, 5.0), startup_s=st.floats(2, 40))
def test_a_square_wave_is_not_followed(
    name: str, half_s: int, high: float, startup_s: float
) -> None:
    workers, rate, size = pool_of(name, high)
    busy, calm = evenly(rate, size), evenly(0.2 * rate / high, size)

    def arrivals(now: float) -> Sequence[float]:
        return busy(now) if now // half_s % 2 == 0 else calm(now)

    run = simulate(workers, arrivals, 9000, startup_s=startup_s)
    num_waves = 3000 / (2 * half_s)
    assert len(run.changes_after(6000)) <= max(3.0, num_waves / 8), run.changes
    assert run.target >= high / 2


def test_a_load_that_ends_leaves_the_least() -> None:
    busy = evenly(5 / PROMPT_S, PROMPT_S)
    run = simulate(PrefillWorkers(), lambda now: busy(now) if now < 300 else (), 2000)
    assert max(run.targets) >= 5
    assert run.target == 1
    assert all(change.after < change.before for change in run.changes_after(310))


class Second(NamedTuple):
    """Of the recorded load."""

    num_requests: int
    prompt_tokens: int
    answer_tokens: int


def recorded(works: Callable[[Second], float]) -> Arrivals:
    """Forty minutes of conversations; `works`: what all requests of a second ask of a pool."""
    lines = [line for line in RECORDED.read_text().splitlines() if not line.startswith("#")]
    numbers = [[int(word) for word in line.split(",")] for line in lines]
    seconds = {row[0]: Second(*row[1:]) for row in numbers}

    def arrivals(now: float) -> Sequence[float]:
        second = None if now % 1 else seconds.get(int(now))
        if second is None:
            return ()
        return [works(second) / second.num_requests] * second.num_requests

    return arrivals


def test_recorded_prompts_are_held() -> None:
    """One worker computes 20,000 tokens of them a second."""
    arrivals = recorded(lambda second: second.prompt_tokens / 20_000)
    workers = PrefillWorkers()
    run = simulate(workers, arrivals, 2400, startup_s=30)
    assert in_95_of_100(workers.waits_s) <= 2.0
    assert len(run.changes_after(600)) <= 4, run.changes
    assert sum(run.targets) / len(run.targets) < 5
    two = PrefillWorkers()
    simulate(two, arrivals, 2400, most=2, target=2)
    assert in_95_of_100(two.waits_s) > 20.0


def test_recorded_answers_are_held() -> None:
    """A full worker draws 430 tokens of them a second: by the mean, 2.6 of them are just enough."""
    arrivals = recorded(lambda second: second.answer_tokens)
    workers = DecodeWorkers()
    run = simulate(workers, arrivals, 2400, startup_s=30)
    assert in_95_of_100(workers.nums_waiting) == 0
    assert len(run.changes_after(600)) <= 4, run.changes
    assert sum(run.targets) / len(run.targets) < 5
    two = DecodeWorkers()
    simulate(two, arrivals, 2400, most=2, target=2)
    assert in_95_of_100(two.nums_waiting) > 1000


def in_95_of_100(of_steps: Sequence[float]) -> float:
    """The wait, in seconds or in sequences, once the pool has settled."""
    late = sorted(of_steps[len(of_steps) // 4 :])
    return late[int(0.95 * len(late))]
