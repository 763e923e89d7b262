"""What a hand-off counts for, by the times at which things happened to it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.histogram import Histogram
from kv_transfer.tally import DONE, NOT_HELD, PullRecord, PullTally


@given(
    st.lists(st.floats(0, 100), unique=True, max_size=8).map(sorted),
    st.lists(st.floats(-10, 1000), max_size=30),
)
def test_a_value_is_counted_below_the_first_bound_that_it_does_not_exceed(
    bounds: list[float], values: list[float]
) -> None:
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    below = [sum(histogram.counts[: i + 1]) for i in range(len(bounds))]
    assert below == [sum(value <= bound for value in values) for bound in bounds]
    assert sum(histogram.counts) == len(values)
    assert histogram.sum == pytest.approx(sum(values))


def test_bytes_that_came_before_the_prompts_end_are_hidden() -> None:
    tally = PullTally()
    record = PullRecord(tally)
    record.note_post(10.0, 0.001, 4)
    record.note_read(10.5, 400)
    record.note_post(10.6, 0.002, 1)
    record.note_finished(11.0)
    record.note_read(11.25, 100)
    record.end(DONE)
    assert (tally.num_blobs, tally.num_bytes, tally.num_hidden_bytes) == (5, 500, 400)
    assert tally.post_s.sum == pytest.approx(0.003)
    assert tally.transfer_s.sum == pytest.approx(1.25)
    assert tally.exposed_s.sum == pytest.approx(0.25)
    assert tally.ends == {DONE: 1}


def test_a_transfer_that_ends_before_the_prompt_is_exposed_for_no_time() -> None:
    tally = PullTally()
    record = PullRecord(tally)
    record.note_post(10.0, 0.001, 4)
    record.note_read(10.5, 400)
    record.note_finished(11.0)
    record.end(DONE)
    assert (tally.transfer_s.sum, tally.exposed_s.sum) == (0.5, 0.0)


def test_what_is_not_used_has_moved_bytes_and_taken_no_time() -> None:
    tally = PullTally()
    record = PullRecord(tally)
    record.note_post(10.0, 0.001, 4)
    record.note_read(10.5, 400)
    record.end(NOT_HELD)
    assert (tally.ends, tally.num_bytes) == ({NOT_HELD: 1}, 400)
    assert sum(tally.transfer_s.counts) == 0


def test_a_hand_off_without_a_byte_is_in_no_histogram() -> None:
    tally = PullTally()
    record = PullRecord(tally)
    record.note_finished(11.0)
    record.end(DONE)
    assert tally.ends == {DONE: 1}
    assert sum(tally.transfer_s.counts) == sum(tally.post_s.counts) == 0
