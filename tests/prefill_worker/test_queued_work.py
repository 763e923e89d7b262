"""The work that is queued before a prompt, against the pairs counted one by one."""

from engine.step_times import StepShape
from prefill_worker.queued_work import QueuedWork


def pairs(start: int, end: int) -> float:
    """Of a token with all those before it, and half of one with itself."""
    return sum(range(start, end)) + (end - start) / 2


def test_what_is_computed_is_not_queued_any_more() -> None:
    queued = QueuedWork()
    queued.add(1000)
    queued.add(300)
    queued.computed(0, 256)
    queued.computed(256, 700)
    assert queued.as_one_step() == StepShape(600, 0, 1, pairs(700, 1000) + pairs(0, 300))
    queued.computed(700, 1000)
    queued.computed(0, 300)
    assert queued.as_one_step() == StepShape(0, 0, 1, 0.0)


def test_the_longest_step_is_the_last_of_the_longest_prompt() -> None:
    queued = QueuedWork()
    assert queued.longest_step(256) == StepShape(256, 0, 1, pairs(0, 256))
    for length in (100, 5000, 5000, 700):
        queued.add(length)
    queued.ended(5000)
    assert queued.longest_step(256) == StepShape(256, 0, 1, pairs(4744, 5000))
    queued.ended(5000)
    assert queued.longest_step(256) == StepShape(256, 0, 1, pairs(444, 700))
