"""What is ahead of a prompt, against the pairs counted one by one."""

from engine.step_times import StepShape
from prefill_worker.ahead import Ahead


def pairs(start: int, end: int) -> float:
    """Of a token with all those before it, and half of one with itself."""
    return sum(range(start, end)) + (end - start) / 2


def test_what_is_computed_is_not_ahead_any_more() -> None:
    ahead = Ahead()
    ahead.add(1000)
    ahead.add(300)
    ahead.computed(0, 256)
    ahead.computed(256, 700)
    assert ahead.as_one_step() == StepShape(600, 0, 1, pairs(700, 1000) + pairs(0, 300))
    ahead.computed(700, 1000)
    ahead.computed(0, 300)
    assert ahead.as_one_step() == StepShape(0, 0, 1, 0.0)


def test_the_longest_step_is_the_last_of_the_longest_prompt() -> None:
    ahead = Ahead()
    assert ahead.longest_step(256) == StepShape(256, 0, 1, pairs(0, 256))
    for length in (100, 5000, 5000, 700):
        ahead.add(length)
    ahead.ended(5000)
    assert ahead.longest_step(256) == StepShape(256, 0, 1, pairs(4744, 5000))
    ahead.ended(5000)
    assert ahead.longest_step(256) == StepShape(256, 0, 1, pairs(444, 700))
