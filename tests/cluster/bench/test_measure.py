"""Figures from records whose figures are known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.bench.answer import FailureKind
from cluster.bench.measure import Objectives, percentile, spread, summarise
from tests.cluster.bench.records import answered, failed

TIMES = st.lists(st.floats(0, 1e4), min_size=1, max_size=40)


@given(TIMES, st.floats(0, 100))
def test_percentiles_are_numpy_s(values: list[float], share: float) -> None:
    expected = np.percentile(values, share)
    assert percentile(sorted(values), share) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(TIMES)
def test_a_spread_is_of_all_values(values: list[float]) -> None:
    told = spread([*values, None])
    assert told is not None
    assert told.num == len(values)
    assert told.largest == max(values)
    assert told.mean == pytest.approx(np.mean(values))
    assert list(told.percentiles.values()) == sorted(told.percentiles.values())


def test_of_nothing_there_is_no_spread() -> None:
    assert spread([None, None]) is None
    empty = summarise([])
    assert (empty.num_sent, empty.requests_per_s, empty.ttft) == (0, 0.0, None)


def test_times_and_rates() -> None:
    summary = summarise(
        [
            answered(0.5, [0.1, 0.3], sent_s=10.0, due_s=9.75, num_prompt=30, num_cached=16),
            answered(1.5, [0.2], sent_s=11.0, due_s=11.0, num_output=5),
        ]
    )
    assert summary.span_s == pytest.approx(2.7)
    assert (summary.num_prompt_tokens, summary.num_cached_tokens) == (40, 16)
    assert summary.num_output_tokens == 8
    assert summary.output_tokens_per_s == pytest.approx(8 / 2.7)
    assert summary.ttft
    assert summary.ttft.mean == pytest.approx(1.0)
    assert summary.itl
    assert summary.itl.num == 3
    assert summary.itl.largest == pytest.approx(0.3)
    # Tokens are the server's count: five of them in two pieces.
    assert summary.tpot
    assert summary.tpot.mean == pytest.approx((0.2 + 0.05) / 2)
    assert summary.late
    assert summary.late.largest == pytest.approx(0.25)


def test_whatever_was_sent_is_counted_once() -> None:
    records = [
        answered(0.1, []),
        answered(0.1, [0.1], num_output=1),
        failed(FailureKind.STATUS, 429),
        failed(FailureKind.STATUS, 429),
        failed(FailureKind.STATUS, 500),
        failed(FailureKind.TIMEOUT, end_s=50.0),
        failed(FailureKind.INTERRUPTED),
    ]
    summary = summarise(records, num_unsent=3)
    assert summary.failures == {"HTTP 429": 2, "HTTP 500": 1, "timed out": 1}
    assert summary.failure_messages["HTTP 500"] == "refused said 500"
    assert (summary.num_interrupted, summary.num_unsent, summary.num_short) == (1, 3, 1)
    counted = summary.num_complete + sum(summary.failures.values()) + summary.num_interrupted
    assert counted == summary.num_sent == len(records)
    assert summary.span_s == 50.0
    assert summary.num_good is None


def test_goodput_counts_who_keeps_everything() -> None:
    records = [
        answered(0.2, [0.01] * 200),
        answered(0.6, [0.01] * 200),  # late at first
        answered(0.2, [0.01] * 197 + [0.5] * 3),  # more than one gap in a hundred is long
        answered(0.2, [0.01] * 199 + [0.5]),  # one in two hundred is
        answered(0.2, []),  # has no gaps to be too long
        failed(FailureKind.TIMEOUT),
    ]
    kept = [
        summarise(records, objectives).num_good
        for objectives in (
            Objectives(ttft_s=0.5),
            Objectives(itl_s=0.05),
            Objectives(ttft_s=0.5, itl_s=0.05),
            Objectives(tpot_s=0.011),
            Objectives(tpot_s=0.013),
        )
    ]
    assert kept == [4, 4, 3, 3, 4]
    assert summarise(records, Objectives()).num_good is None


@given(st.lists(st.tuples(st.floats(0, 2), st.lists(st.floats(0, 1), max_size=5)), max_size=8))
def test_a_looser_objective_is_kept_by_no_fewer(made: list[tuple[float, list[float]]]) -> None:
    records = [answered(first, gaps) for first, gaps in made]
    goods = [
        summarise(records, Objectives(ttft_s=limit, itl_s=limit)).num_good
        for limit in (0.1, 0.5, 1.0, 2.0)
    ]
    assert all(isinstance(good, int) for good in goods)
    assert goods == sorted(good for good in goods if good is not None)
    assert goods[-1] == len(records)
