"""A prefix is pulled exactly where that is sooner than computing it."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from prefill_worker.prefix_cost import (
    FREE,
    GroupSize,
    Offer,
    PullCost,
    pull_above,
    pull_cost,
    rank,
)

TOKEN_S = 0.001
FULL, WINDOW = GroupSize(4096), GroupSize(1024, window=40)


def offer(num_tokens: int, cost: PullCost = FREE, name: str = "a:1") -> Offer:
    return Offer(name, 7, num_tokens, cost)


def pulled_s(cost: PullCost, num_tokens: int) -> float:
    return cost.fixed_s + num_tokens * cost.token_s


costs = st.builds(PullCost, st.floats(0, 0.2), st.floats(0, 2e-3))


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([FULL], PullCost(0.04, 256 / 1e6)),
        ([WINDOW], PullCost(0.04 + 3 * 1024 / 1e6, 0.0)),
        ([FULL, WINDOW], PullCost(0.04 + 3 * 1024 / 1e6, 256 / 1e6)),
    ],
)
def test_cost(groups: list[GroupSize], expected: PullCost) -> None:
    """A hundredth of a second there, a megabyte a second; 40 tokens are three blocks of 16."""
    assert pull_cost(0.01, 1e6, groups, 16) == pytest.approx(expected)


def test_a_link_that_says_it_brings_nothing_divides_by_nothing() -> None:
    assert pull_cost(0.0, 0.0, [FULL], 16).token_s == 256.0


@given(costs, st.integers(1, 4000), st.floats(1e-5, 2e-3))
def test_above_is_where_both_take_equally_long(
    cost: PullCost, num_tokens: int, token_s: float
) -> None:
    one = offer(num_tokens, cost)
    if not rank([one], token_s):
        assert pulled_s(cost, num_tokens) >= num_tokens * token_s * (1 - 1e-9)
        return
    above = pull_above(one, token_s)
    assert above <= num_tokens
    assume(abs(pulled_s(cost, above) - above * token_s) > 1e-9)
    assert pulled_s(cost, above) >= above * token_s
    assert pulled_s(cost, above + 1) <= (above + 1) * token_s


@given(st.lists(st.tuples(st.integers(1, 4000), costs), max_size=6))
def test_the_one_that_saves_most_is_first_and_none_has_less(
    offered: list[tuple[int, PullCost]],
) -> None:
    offers = [offer(n, cost, f"a:{i}") for i, (n, cost) in enumerate(offered)]

    def saved(one: Offer, num_tokens: int) -> float:
        return num_tokens * TOKEN_S - pulled_s(one.cost, num_tokens)

    ranked = rank(offers, TOKEN_S)
    most = max((saved(one, one.num_tokens) for one in offers), default=0.0)
    if not ranked:
        assert most <= 1e-9
        return
    reserved = min(one.num_tokens for one in ranked)
    assert saved(ranked[0], reserved) >= most - 1e-9
    assert all(saved(one, reserved) > -1e-9 for one in ranked)


@pytest.mark.parametrize(
    ("offers", "expected"),
    [
        ([], []),
        ([offer(1000, PullCost(0.0, 2 * TOKEN_S))], []),  # slower than computing
        ([offer(100, PullCost(0.2, 0.0))], []),  # farther away than it is long
        ([offer(100), offer(90, name="b:1")], ["a:1"]),
        ([offer(90), offer(100, name="b:1")], ["b:1"]),
        ([offer(100, PullCost(0.01, 0)), offer(100, name="b:1")], ["b:1", "a:1"]),
        ([offer(500, PullCost(0.0, 0.9 * TOKEN_S)), offer(100, name="b:1")], ["b:1", "a:1"]),
    ],
)
def test_who_is_asked(offers: list[Offer], expected: list[str]) -> None:
    assert [one.address for one in rank(offers, TOKEN_S)] == expected
