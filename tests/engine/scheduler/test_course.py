"""Where a prompt's time went, and where its tokens came from."""

from engine.request import PromptTimes
from engine.scheduler.course import Counts, PromptCourse


def test_a_prompt_that_is_computed_here_waits_and_is_computed() -> None:
    course = PromptCourse(arrived_s=10.0)
    course.begin(12.0)
    course.begin(13.0)  # a second chunk begins nothing
    assert course.times(15.0) == PromptTimes(queued_s=2.0, prefill_s=3.0)


def test_of_a_prompt_that_was_fetched_the_other_side_says_what_it_took() -> None:
    course = PromptCourse(arrived_s=10.0)
    course.begin(11.0)
    course.elsewhere, course.whole = PromptTimes(0.5, 2.0, 0.25), True
    assert course.times(99.0) == PromptTimes(queued_s=1.5, prefill_s=2.0, transfer_s=0.25)


def test_a_prefix_is_fetched_before_the_rest_is_computed() -> None:
    course = PromptCourse(arrived_s=10.0)
    course.begin(11.0)
    course.elsewhere = PromptTimes(transfer_s=0.5)
    assert course.times(14.0) == PromptTimes(queued_s=1.0, prefill_s=2.5, transfer_s=0.5)


def test_what_came_to_nothing_was_waiting() -> None:
    course = PromptCourse(arrived_s=10.0)
    course.begin(11.0)
    course.begin_again()
    course.begin(14.0)
    assert course.times(15.0) == PromptTimes(queued_s=4.0, prefill_s=1.0)


def test_every_token_has_one_source() -> None:
    counts = Counts()
    PromptCourse(num_cached=16, num_pulled=32).count(counts, 100)
    PromptCourse().count(counts, 7)
    assert (counts.num_cached, counts.num_pulled, counts.num_computed) == (16, 32, 59)
    counts.reset()
    assert counts == Counts()
