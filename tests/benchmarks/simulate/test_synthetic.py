"""Generators are what they say, and what is said of traffic is so."""

import math
import statistics
from random import Random

import pytest

from benchmarks.simulate.arrivals import Arrivals, Day
from benchmarks.simulate.likeness import describe, lru_hit
from benchmarks.simulate.quantiles import Quantiles
from benchmarks.simulate.synthetic import (
    GENERATORS,
    BestOf,
    Independent,
    PrefixGroups,
    Sessions,
)

HOUR = Arrivals(rate=3.4, seconds=3537.0)


def test_sessions_are_like_the_published_conversations() -> None:
    found = describe(Sessions().requests(HOUR, seed=1)).figures()
    for name, value in Sessions.imitated.items():
        assert found[name] == pytest.approx(value, rel=0.15), name
    assert found["requests/s"] == pytest.approx(3.4, rel=0.1)


def test_a_conversation_s_prompt_begins_with_all_that_came_before() -> None:
    requests = Sessions(turn_shares=(0.0, 0.5)).requests(Arrivals(1.0, 600.0), seed=2)
    by_branch: dict[bytes, list[tuple[bytes, ...]]] = {}
    for request in requests:
        if len(request.names) > 1:
            by_branch.setdefault(request.names[1], []).append(tuple(request.names))
    several = [turns for turns in by_branch.values() if len(turns) > 1]
    assert len(several) > 50
    for turns in several:
        for before, after in zip(turns, turns[1:], strict=False):
            assert after[: len(before)] == before


def test_prefix_groups_hit_as_often_as_is_computed() -> None:
    groups = PrefixGroups(num_groups=20)
    requests = groups.requests(Arrivals(10.0, 60.0), seed=1)
    assert describe(requests).endless_hit == pytest.approx(
        groups.expected_hit(len(requests)), rel=0.01
    )


def test_bursts_ask_the_same_at_the_same_moment() -> None:
    requests = BestOf(num_answers=8).requests(Arrivals(8.0, 600.0), seed=1)
    times = {request.at_s for request in requests}
    assert len(requests) == 8 * len(times)
    assert describe(requests).endless_hit == pytest.approx(7 / 8, rel=0.01)


def test_independent_prompts_are_like_the_published_ones_and_share_nothing() -> None:
    found = describe(Independent().requests(HOUR, seed=1)).figures()
    for name, value in Independent.imitated.items():
        assert found[name] == pytest.approx(value, rel=0.08), name
    assert found["hit, endless cache"] == 0


@pytest.mark.parametrize("name", GENERATORS)
def test_a_seed_decides_everything(name: str) -> None:
    few = Arrivals(2.0, 30.0)
    one, same, other = (GENERATORS[name]().requests(few, seed) for seed in (1, 1, 2))
    assert one == same
    assert one != other
    assert [request.number for request in one] == list(range(len(one)))
    assert one[0].at_s == 0.0


@pytest.mark.parametrize("shape", [0.3, 1.0, 4.0])
def test_intervals_vary_as_their_gamma_distribution_does(shape: float) -> None:
    times = list(Arrivals(10.0, 2000.0, burstiness=shape).times(1))
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.05)
    variation = statistics.stdev(gaps) / statistics.mean(gaps)
    assert variation == pytest.approx(1 / math.sqrt(shape), rel=0.06)


def test_a_day_rises_and_falls_and_keeps_its_mean() -> None:
    times = list(Arrivals(20.0, 1000.0, day=Day(depth=0.8, period_s=1000.0)).times(1))
    assert len(times) == pytest.approx(20_000, rel=0.03)
    quarters = [sum(250 * i <= t < 250 * (i + 1) for t in times) for i in range(4)]
    # The integral of 1 + 0.8 sin over a quarter is 250 (1 +- 1.6 / pi).
    high, low = 5000 * (1 + 1.6 / math.pi), 5000 * (1 - 1.6 / math.pi)
    assert quarters == pytest.approx([high, high, low, low], rel=0.07)


def test_quantiles_are_met_and_bounds_kept() -> None:
    lengths = Quantiles(((0, 10), (0.5, 100), (0.9, 1000), (1, 2000)))
    random = Random(1)
    drawn = sorted(lengths.draw(random) for _ in range(20_000))
    assert drawn[0] >= 10
    assert drawn[-1] <= 2000
    assert drawn[10_000] == pytest.approx(100, rel=0.05)
    assert drawn[18_000] == pytest.approx(1000, rel=0.05)


def test_a_small_cache_forgets_what_was_used_least_lately() -> None:
    one, two, three = [tuple(f"{text} {i}".encode() for i in range(2)) for text in "abc"]
    prompts = [one, two, one, three, one, two]
    assert lru_hit(prompts, None) == pytest.approx(6 / 12)
    assert lru_hit(prompts, 4) == pytest.approx(4 / 12)
    assert lru_hit(prompts, 2) == 0
    # A leaf goes before its parent.
    assert lru_hit([one, two, one], 3) == pytest.approx(1 / 6)
