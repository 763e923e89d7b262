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


def test_what_a_long_answer_took_is_owed_from_its_end_on() -> None:
    """A full minute's worth grows no fuller while it runs."""
    limiter = RateLimiter(Rates(tokens_per_minute=60))
    assert limiter.admit("a", 0.0) == 0
    limiter.spend("a", 90, 300.0)
    assert limiter.admit("a", 300.0) == 31


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


@given(
    rate=st.integers(1, 600),
    gaps=st.lists(st.floats(0, 30), min_size=1, max_size=60),
    parts=st.integers(1, 5),
)
def test_several_together_admit_what_one_would(rate: int, gaps: list[float], parts: int) -> None:
    """Each has room for one request, however small its part of the rate is."""
    limiters = [RateLimiter(Rates(requests_per_minute=rate)) for _ in range(parts)]
    for limiter in limiters:
        limiter.divide(parts)
    now, admitted = 0.0, 0
    for number, gap in enumerate(gaps):
        now += gap
        limiter = limiters[number % parts]
        wait_s = limiter.admit("a", now)
        admitted += wait_s == 0
        assert admitted <= max(rate, parts) + now * rate / 60 + 1e-6
        if wait_s:
            now += wait_s + 1e-6
            assert limiter.admit("a", now) == 0
            admitted += 1


def test_parts_come_and_go() -> None:
    one, other = (RateLimiter(Rates(requests_per_minute=60)) for _ in range(2))
    assert [one.admit("a", 0.0) for _ in range(20)] == [0] * 20
    for limiter in (one, other):
        limiter.divide(2)
    assert [one.admit("a", 0.0) for _ in range(21)] == [0] * 20 + [2], "40 were left, of which half"
    assert [other.admit("a", 0.0) for _ in range(31)] == [0] * 30 + [2]
    assert one.admit("a", 2.0) == 0, "at half the rate"
    one.divide(1)
    assert one.admit("a", 2.0) == 1
    assert one.admit("a", 3.0) == 0, "at all of it"
