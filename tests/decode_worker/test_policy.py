"""The threshold is where both ways take equally long, from the first who is not shunned."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.policy import (
    DECISIONS,
    FETCHING_S,
    Decision,
    Prospect,
    Reason,
    Station,
    decide,
    fetch_above,
    in_turn,
    is_shunned,
    num_held_up,
)
from protos.judging import LONG_PAUSE_S, SILENT_AFTER_S

TOKEN_S = 0.001
IDLE = Prospect(Station(0.0, TOKEN_S), 0.005)
BUSY = Prospect(Station(1.0, TOKEN_S), 0.005)
UNKNOWN = Prospect()
NEIGHBOUR = Prospect(Station(0.0, TOKEN_S), 0.005, shares_cores=True)
LONG = int(LONG_PAUSE_S / TOKEN_S)


def shunned(prospect: Prospect) -> Prospect:
    return prospect._replace(shunned=True)


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
    threshold = fetch_above(here, [Prospect(there, hand_off_s)], num_tokens)
    fetched = threshold is not None and num_tokens > threshold
    gain = cost(here, num_tokens) - cost(there, num_tokens) - hand_off_s - held_up * FETCHING_S
    if abs(gain) > 2 * max(here_s * (1 + held_up), there_s):
        assert fetched == (gain > 0)


@pytest.mark.parametrize(
    ("wait_here", "held_up", "prospects", "expected"),
    [
        (0.0, 0, [IDLE], None),  # as fast here, and nobody is held up
        (0.0, 1, [IDLE], 7),  # 7 tokens here hold up another one as long as fetching does
        (0.0, 4, [IDLE], 3),
        (0.0, 50, [IDLE], 2),  # a few tokens are never worth it, however many run
        (0.0, 1, [BUSY], None),  # a queue there
        (0.0, 9, [BUSY], 113),
        (0.5, 0, [IDLE], 0),  # a queue here
        (0.5, 9, [BUSY], 58),
        (0.0, 9, [BUSY, IDLE], 113),  # the order is not ours
        (0.0, 9, [shunned(BUSY), IDLE], 2),
        (0.0, 9, [shunned(UNKNOWN), BUSY], 113),
        (0.0, 0, [UNKNOWN, IDLE], 0),  # asking makes it known
        (9.0, 9, [shunned(IDLE), shunned(UNKNOWN)], None),
        (9.0, 9, [], None),
        (0.5, 0, [NEIGHBOUR], None),  # computes nothing sooner, and nobody pauses
        (0.5, 9, [NEIGHBOUR], LONG),
        (0.0, 9, [shunned(IDLE), NEIGHBOUR], LONG),
    ],
)
def test_thresholds(
    wait_here: float, held_up: int, prospects: list[Prospect], expected: int | None
) -> None:
    assert fetch_above(Station(wait_here, TOKEN_S, held_up), prospects, 1000) == expected


@pytest.mark.parametrize(
    ("age_s", "draining", "unhealthy", "expected"),
    [
        (0.0, False, False, False),
        (SILENT_AFTER_S, False, False, False),
        (SILENT_AFTER_S + 0.1, False, False, True),
        (0.0, True, False, True),
        (0.0, False, True, True),
    ],
)
def test_who_is_shunned(age_s: float, draining: bool, unhealthy: bool, expected: bool) -> None:
    assert is_shunned(age_s, draining, unhealthy) == expected


def test_who_is_shunned_comes_last() -> None:
    assert in_turn([shunned(IDLE), BUSY, shunned(UNKNOWN), IDLE]) == [1, 3, 0, 2]


@pytest.mark.parametrize(
    ("running", "queued", "fetched", "expected"),
    [
        (0, 0, 0, 0),
        (5, 0, 0, 5),
        (5, 2, 0, 7),  # they run before it does
        (5, 2, 1, 8),
        (5, 2, 9, 10),  # while three prompts are computed here, about three come
    ],
)
def test_who_is_held_up(running: int, queued: int, fetched: int, expected: int) -> None:
    assert num_held_up(running, queued, fetched) == expected


@pytest.mark.parametrize(
    ("prospects", "threshold", "decision"),
    [
        ([], None, Decision(False, Reason.ALONE)),
        ([shunned(IDLE)], None, Decision(False, Reason.SHUNNED)),
        ([shunned(IDLE), UNKNOWN], 0, Decision(True, Reason.UNKNOWN)),
        ([IDLE], None, Decision(False, Reason.SOONER)),
        ([IDLE], 99, Decision(True, Reason.SOONER)),
        ([IDLE], 100, Decision(False, Reason.SHORT)),
        ([NEIGHBOUR], 99, Decision(True, Reason.SOONER)),
        ([NEIGHBOUR], 100, Decision(False, Reason.SHARED)),
        ([NEIGHBOUR], None, Decision(False, Reason.SHARED)),
    ],
)
def test_a_decision_has_a_reason(
    prospects: list[Prospect], threshold: int | None, decision: Decision
) -> None:
    assert decide(prospects, threshold, num_prompt_tokens=100) == decision
    assert decision in DECISIONS
