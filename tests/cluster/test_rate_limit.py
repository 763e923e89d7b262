from hypothesis import given
from hypothesis import strategies as st

from cluster.rate_limit import RateLimiter, Rates


def test_a_minute_s_worth_at_once_and_then_steadily() -> None:
    limiter = RateLimiter(Rates(requests_per_minute=6))
    assert [limiter.admit("a", 100.0) for _ in range(6)] == [0] * 6
    assert limiter.admit("a", 100.0) == 10
    assert limiter.admit("a", 104.0) == 6, "a refusal costs nothing"
    assert limiter.admit("b", 104.0) == 0, "each caller by itself"
    assert limiter.admit("a", 110.0) == 0
    assert limiter.admit("a", 110.0) == 10
    assert [limiter.admit("a", 1e6) for _ in range(7)] == [0] * 6 + [10]


def test_tokens_are_counted_when_they_are_known() -> None:
    """A request larger than a minute's worth goes through; what it took is waited for."""
    limiter = RateLimiter(Rates(tokens_per_minute=60))
    assert limiter.admit("a", 0.0) == 0
    limiter.spend("a", 90, 0.0)
    assert limiter.admit("a", 0.0) == 31
    assert limiter.admit("a", 31.0) == 0
    limiter.spend("a", 1, 31.0)
    assert limiter.admit("a", 31.0) == 1


def test_a_clock_that_goes_back_gives_nothing() -> None:
    limiter = RateLimiter(Rates(requests_per_minute=1))
    assert limiter.admit("a", 50.0) == 0
    assert limiter.admit("a", 20.0) == 60
    assert limiter.admit("a", 50.0) == 60


def test_without_rates_nobody_waits() -> None:
    limiter = RateLimiter(Rates())
    limiter.spend("a", 10**9, 0.0)
    assert all(limiter.admit("a", 0.0) == 0 for _ in range(1000))


@given(
    rate=st.integers(1, 600),
    gaps=st.lists(st.floats(0, 30), min_size=1, max_size=60),
)
def test_never_more_than_a_minute_s_worth_ahead_of_the_rate(rate: int, gaps: list[float]) -> None:
    limiter, now, admitted = RateLimiter(Rates(requests_per_minute=rate)), 0.0, 0
    for gap in gaps:
        now += gap
        wait_s = limiter.admit("a", now)
        admitted += wait_s == 0
        assert admitted <= rate + now * rate / 60 + 1e-6
        if wait_s:  # and who comes back when told to is let in
            now += wait_s + 1e-6
            assert limiter.admit("a", now) == 0
            admitted += 1
