"""Who was given least goes first, and nobody saves up for later."""

from collections import Counter

from router.tenants import Tenants


def serve(tenants: Tenants, tokens: dict[str, int], times: int) -> Counter[str]:
    """Each turn goes to the first in line; what everybody got."""
    got: Counter[str] = Counter()
    for _ in range(times):
        tenant = next(tenants.turns(0)).tenant
        tenants.charge(tenant, tokens[tenant])
        got[tenant] += tokens[tenant]
    return got


def test_tokens_are_shared_not_turns() -> None:
    tenants = Tenants()
    for tenant in ("long", "short"):
        tenants.enter(0, tenant)
    got = serve(tenants, {"long": 900, "short": 100}, 200)
    assert abs(got["long"] - got["short"]) <= 900


def test_no_credit_for_an_absence() -> None:
    tenants = Tenants()
    tenants.enter(0, "here")
    tenants.enter(0, "away")
    tenants.leave(0, "away")
    serve(tenants, {"here": 100}, 50)
    tenants.enter(0, "away")
    assert serve(tenants, {"here": 100, "away": 100}, 10) == {"here": 500, "away": 500}


def test_no_credit_where_everybody_was_away() -> None:
    tenants = Tenants()
    for _ in range(50):
        tenants.enter(0, "often")
        tenants.charge("often", 100)
        tenants.leave(0, "often")
    tenants.enter(0, "new")
    tenants.enter(0, "often")
    got = serve(tenants, {"often": 100, "new": 100}, 20)
    assert abs(got["often"] - got["new"]) <= 100


def test_a_debt_outlasts_a_short_absence() -> None:
    tenants = Tenants()
    tenants.enter(0, "a")
    tenants.enter(0, "b")
    tenants.charge("a", 1000)
    tenants.leave(0, "a")
    tenants.enter(0, "a")
    assert serve(tenants, {"a": 100, "b": 100}, 10) == {"b": 1000}


def test_turns_are_looked_ahead_as_they_would_be_taken() -> None:
    tenants = Tenants()
    for tenant in ("a", "b"):
        tenants.enter(0, tenant)
    left = {"a": [30, 30, 30], "b": [100, 10]}
    seen = []
    for turn in tenants.turns(0):
        turn.num_tokens = left[turn.tenant].pop(0) if left[turn.tenant] else None
        if turn.num_tokens is not None:
            seen.append((turn.tenant, turn.num_tokens))
    # Both at 0, a at 30, b at 100: a catches up at 90 and has nothing left.
    assert seen == [("a", 30), ("b", 100), ("a", 30), ("a", 30), ("b", 10)]


def test_who_is_away_is_forgotten_in_time() -> None:
    tenants = Tenants()
    for i in range(5000):
        tenants.enter(0, str(i))
        tenants.charge(str(i), 1)
        tenants.leave(0, str(i))
    assert len(tenants) < 2500
