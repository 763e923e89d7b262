"""What a prompt may compute beside those that draw tokens."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.pace import Pace
from engine.step_times import StepCosts, StepShape, StepTimes, num_pairs
from tests.engine.scheduler.test_scheduler import BLOCK, Bench

FREE = StepCosts(0.0, 0.0, 0.0, 0.0, 0.0)
GRANULE = 8
seconds = st.sampled_from((0.0, 1e-9, 1e-6, 1e-4, 1e-3, 0.1))


def took_s(costs: StepCosts, shape: StepShape) -> float:
    return sum(cost * feature for cost, feature in zip(costs, (1.0, *shape), strict=True))


@given(
    costs=st.builds(StepCosts, seconds, seconds, seconds, seconds, seconds),
    pause_s=st.sampled_from((1e-3, 0.25, 10.0)),
    drawing=st.just((0, 0)) | st.tuples(st.integers(1, 64), st.integers(0, 100_000)),
    prompts=st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 5000)), max_size=5),
)
def test_as_many_whole_granules_as_fit_and_no_more(
    costs: StepCosts,
    pause_s: float,
    drawing: tuple[int, int],
    prompts: list[tuple[int, int]],
) -> None:
    num_sequences, num_context = drawing
    pace = Pace(costs, pause_s, GRANULE, num_sequences, num_context)
    drawing_s = took_s(costs, StepShape(0, num_context, num_sequences))
    most_s = pause_s if num_sequences else 2 * pause_s
    bound_s = max(most_s, drawing_s + most_s / 2, 2 * drawing_s)
    begun: list[tuple[int, int]] = []

    def step_s(more: tuple[int, int]) -> float:
        parts = [*begun, more]
        num_tokens = sum(count for _, count in parts)
        pairs = sum(num_pairs(start, start + count) for start, count in parts)
        return took_s(costs, StepShape(num_tokens, num_context, num_sequences + len(parts), pairs))

    for start, wanted in prompts:
        most = pace.most(start, wanted)
        assert 0 <= most <= wanted
        if not begun:
            assert most >= min(wanted, GRANULE), "prompts never starve"
        if most > (0 if begun else GRANULE):
            assert step_s((start, most)) <= bound_s * (1 + 1e-9)
        if most < wanted:
            assert most % GRANULE == 0
            assert step_s((start, min(wanted, most + GRANULE))) > bound_s * (1 - 1e-9)
        if most:
            pace.take(start, most)
            begun.append((start, most))


class Machine:
    """Whose steps read all weights, and multiply meanwhile: a few tokens cost nothing."""

    def __init__(self, read_s: float, pause_s: float, token_s: float, granule: int) -> None:
        self._read_s, self._pause_s, self._token_s = read_s, pause_s, token_s
        self._granule = granule
        self._noise = random.Random(2)
        self._times = StepTimes(granule=granule)
        self.step(65, num_drawing=0)
        self.step(0)

    def step(self, wanted: int, start: int = 0, num_drawing: int = 4) -> tuple[int, float]:
        """Tokens of a prompt beside answers, and what all of it took."""
        context = 500 * num_drawing
        costs = self._times.careful_costs
        pace = Pace(costs, self._pause_s, self._granule, num_drawing, context)
        num_tokens = pace.most(start, wanted) if wanted else 0
        pairs = num_pairs(start, start + num_tokens)
        shape = StepShape(num_tokens, context, num_drawing + (num_tokens > 0), pairs)
        seconds = max(self._read_s, self._token_s * num_tokens) * self._noise.uniform(0.95, 1.1)
        self._times.note(shape, seconds)
        return num_tokens, seconds


CHATS = [range(8, 9), range(8, 16), range(8, 60)]  # uncached tokens


@pytest.mark.parametrize(
    ("read_s", "pause_s", "token_s", "granule", "chats", "late"),
    [
        *((0.07, 0.5, 1e-3, 8, chats, 1.6) for chats in CHATS),
        *((0.07, 0.1, 1e-3, 8, chats, 1.6) for chats in CHATS),
        *((0.3, 0.5, 1e-3, 8, chats, 1.6) for chats in CHATS),
        *((0.8, 0.5, 1e-3, 8, chats, 1.6) for chats in CHATS),
        (0.07, 0.5, 1e-3, 128, range(2, 24), 1.6),
        # A few tokens say little of hundreds.
        (0.005, 0.05, 5e-4, 16, range(2, 9), 2.6),
        (0.02, 0.5, 0.01, 16, range(2, 4), 2.6),
        (0.02, 0.5, 0.01, 8, range(2, 4), 2.6),
    ],
)
@pytest.mark.parametrize("every", [8, 30])
def test_chats_make_a_long_prompt_look_neither_free_nor_dear(
    read_s: float,
    pause_s: float,
    token_s: float,
    granule: int,
    chats: range,
    late: float,
    every: int,
) -> None:
    machine = Machine(read_s, pause_s, token_s, granule)
    bound_s = max(pause_s, read_s + pause_s / 2, 2 * read_s)
    for _ in range(2):
        for number in range(40 * every):
            machine.step(0 if number % every else chats[number % len(chats)])
        done, took_s = 0, []
        while done < 2048:
            num_tokens, seconds = machine.step(2048 - done, done)
            done += num_tokens
            took_s.append(seconds)
        assert max(took_s) < late * bound_s
        most = max(12, 3 * 2048 * token_s / bound_s)
        assert len(took_s) <= most, "nor does it come in crumbs"


def sizes(bench: Bench) -> list[list[int]]:
    found = []
    while bench.scheduler.has_work:
        step = bench.scheduler.schedule(costs=bench.costs)
        assert step is not None
        found.append([s.num_tokens for s in step.plan.slices])
        bench.scheduler.complete(step, bench.runner.execute(step.plan))
    return found


def test_others_prompts_hold_nobody_up_for_longer_than_a_pause() -> None:
    bench = Bench(
        num_blocks=40, budget=64, max_pause_s=1.0, costs=FREE._replace(prompt_token_s=1 / 20)
    )
    bench.add("runs", [1], max_tokens=5)
    bench.step()
    bench.add("long", [4] * 42, max_tokens=1)
    bench.add("waits", [5] * 7, max_tokens=1)
    assert sizes(bench) == [[1, 16], [1, 16], [1, 10, 7], [1]]


def test_a_step_that_nobody_waits_for_may_take_twice_as_long() -> None:
    bench = Bench(
        num_blocks=40, budget=64, max_pause_s=1.0, costs=FREE._replace(prompt_token_s=1 / 20)
    )
    bench.add("long", [4] * 60, max_tokens=1)
    bench.add("too", [5] * 17, max_tokens=1)
    assert sizes(bench) == [[40], [20, 17]]


@pytest.mark.parametrize("num_drawing", [0, 2])
def test_steps_that_are_long_anyway_are_not_paid_for_crumbs(num_drawing: int) -> None:
    bench = Bench(
        num_blocks=60, budget=64, max_pause_s=0.5, costs=StepCosts(1.4, 0.05, 0.0, 0.0, 0.0)
    )
    for number in range(num_drawing):
        bench.add(f"runs {number}", [1], max_tokens=5)
    if num_drawing:
        bench.step()
    bench.add("long", [4] * 24, max_tokens=1)
    assert max(sizes(bench)[0]) == 24


def test_what_is_fetched_does_not_wait_for_time_to_compute() -> None:
    bench = Bench(num_blocks=60, budget=64, costs=FREE._replace(prompt_token_s=1.0))
    bench.add("runs", [1], max_tokens=9)
    bench.step()
    bench.add("long", [4] * 42, max_tokens=1)
    bench.add("fetched", [6] * 30, fetch_above=8, max_tokens=1)
    output = bench.step()
    assert output is not None
    assert [str(one.request_id) for one in output.reservations] == ["fetched"]
    bench.add("computed", [7] * 30, max_tokens=1)
    bench.add("fetched too", [8] * 30, fetch_above=8, max_tokens=1)
    output = bench.step()
    assert output is not None
    assert not output.reservations, "nobody overtakes"
    assert BLOCK == GRANULE
