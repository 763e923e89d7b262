"""The threshold is where both ways take equally long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.policy import Station, fetch_above

TOKEN_S = 0.001


def cost(station: Station, num_tokens: int) -> float:
    return station.wait_s + num_tokens * station.token_s * (1 + station.num_held_up)


@given(
    st.floats(0, 10),
    st.floats(0, 10),
    st.floats(1e-5, 1e-2),
    st.floats(1e-5, 1e-2),
    st.integers(0, 64),
    st.floats(0, 0.1),
    st.integers(1, 10_000),
)
def test_the_whole_prompt_goes_where_it_is_sooner(
    wait_here: float,
    wait_there: float,
    here_s: float,
    there_s: float,
    held_up: int,
    hand_off_s: float,
    num_tokens: int,
) -> None:
    here = Station(wait_here, here_s, held_up)
    there = Station(wait_there, there_s)
    threshold = fetch_above(here, there, hand_off_s, num_tokens)
    fetched = threshold is not None and num_tokens > threshold
    gain = cost(here, num_tokens) - cost(there, num_tokens) - hand_off_s
    if abs(gain) > 2 * max(here_s * (1 + held_up), there_s):
        assert fetched == (gain > 0)


@pytest.mark.parametrize(
    ("held_up", "wait_there", "expected"),
    [
        (0, 0.0, None),  # as fast here, and nobody is held up
        (1, 0.0, 5),  # 5 tokens here hold up another one for as long as the hand-off takes
        (4, 0.0, 1),
        (1, 1.0, None),  # a queue there
        (9, 1.0, 111),
    ],
)
def test_thresholds(held_up: int, wait_there: float, expected: int | None) -> None:
    here, there = Station(0.0, TOKEN_S, held_up), Station(wait_there, TOKEN_S)
    assert fetch_above(here, there, 0.005, 1000) == expected
