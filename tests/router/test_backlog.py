"""What waits at the router for more workers, and of which pool."""

from __future__ import annotations

import pytest

from protos.judging import SILENT_AFTER_S
from router.backlog import Backlog
from router.choosing import AIMED
from router.config import RouterConfig
from router.router import MOST_LOOKED_AT
from router.workers import Leg
from tests.router.world import COSTS, World, busy, keys

PROMPT_S = 0.512 + COSTS.step_s  # of 512 tokens


def backlog(world: World) -> Backlog:
    return world.router.backlog(world.now)


def crowd(world: World, num: int, num_tokens: int = 512, **facts: object) -> int:
    """How many of so many prompts were given to workers at once."""
    for number in range(num):
        world.submit(f"r{number}", num_tokens, **facts)
    return len(world.dispatch())


def test_nothing_waits() -> None:
    world = busy(1, 1)
    assert backlog(world) == Backlog()
    assert crowd(world, 1) == 1
    assert backlog(world) == Backlog()


def test_prompts_wait_for_prefill_workers() -> None:
    """Most of them were never looked at."""
    world = busy(1, 1)
    placed = crowd(world, 500)
    assert 1 <= placed <= 3
    found = backlog(world)
    assert found.num_prefill_prompts == pytest.approx(500 - placed)
    assert found.prefill_s == pytest.approx((500 - placed) * PROMPT_S, rel=0.01)
    assert found._replace(num_prefill_prompts=0, prefill_s=0) == Backlog()


def test_without_prefill_workers_prompts_wait_for_decode_workers() -> None:
    world = World(0, 2)
    placed = crowd(world, 500)
    assert placed < 20
    found = backlog(world)
    assert found.num_decode_prompts == pytest.approx(500 - placed)
    assert found.decode_s == pytest.approx((500 - placed) * PROMPT_S, rel=0.01)
    assert found._replace(num_decode_prompts=0, decode_s=0) == Backlog()


def test_each_prompt_counts_where_it_would_be_computed() -> None:
    """With both pools full of prompts, by where the router would have them."""
    world = World(1, 1)
    for leg, worker in ((Leg.PREFILL, world.prefill[0]), (Leg.DECODE, world.decode[0])):
        world.report(leg, worker, num_queued_tokens=3000)
    crowd(world, 100)
    found = backlog(world)
    assert found.num_prefill_prompts + found.num_decode_prompts == pytest.approx(100)
    assert found.prefill_s + found.decode_s == pytest.approx(100 * PROMPT_S, rel=0.01)
    assert found.prefill_s > 0
    assert found.num_sequences == 0


def test_what_is_cached_is_no_work_even_of_those_who_were_not_looked_at() -> None:
    world = busy(1, 1)
    p = world.prefill[0]
    world.hold(p, "a", 30)
    world.report(Leg.PREFILL, p, num_queued_tokens=10_000)
    for number in range(200):
        world.submit(f"r{number}", 520, keys=[*keys("a", 30), *keys(f"r{number}", 2)])
    assert not world.dispatch()
    found = backlog(world)
    assert found.num_prefill_prompts == pytest.approx(200)
    assert found.prefill_s == pytest.approx(200 * (0.040 + 0.04 * COSTS.step_s), rel=0.01)


def test_what_is_placed_or_withdrawn_is_not_in_it() -> None:
    world = busy(1, 1)
    first = crowd(world, 40)
    for number in range(20, 40):
        world.router.withdraw(f"r{number}", world.now)
    assert backlog(world).num_prefill_prompts == pytest.approx(20 - first)
    for number in range(40):
        world.router.withdraw(f"r{number}", world.now)
        world.router.ended(f"r{number}", world.now)
    assert backlog(world) == Backlog()
    assert world.router.num_waiting == 0


def test_sequences_wait_for_room() -> None:
    """Prompts there is time for; of the decode worker's 100 places two are free."""
    world = World(1, 1)
    world.report(Leg.DECODE, world.decode[0], max_sequences=100, num_running=98)
    placed = crowd(world, 52, num_tokens=64, num_new=200)
    assert placed == 2
    found = backlog(world)
    assert found.num_sequences == pytest.approx(50)
    assert found.sequence_use == pytest.approx(0.5)
    assert found.kv_use == pytest.approx(50 * (64 + 100) / 100_000)
    assert (found.num_prefill_prompts, found.prefill_s) == (0, 0)
    assert (found.num_decode_prompts, found.decode_s) == (0, 0)


def test_every_choice_is_a_sequence() -> None:
    world = World(1, 1)
    world.report(Leg.DECODE, world.decode[0], max_sequences=100, num_running=100)
    assert crowd(world, 10, num_tokens=64, num_choices=4, num_new=100) == 0
    found = backlog(world)
    assert found.num_sequences == pytest.approx(40)
    assert found.kv_use == pytest.approx(10 * (64 + 4 * 50) / 100_000)


def test_long_prompts_wait_for_blocks() -> None:
    world = busy(1, 1)
    world.report(Leg.DECODE, world.decode[0], num_free_tokens=5500)
    assert crowd(world, 20, num_tokens=1000) == 0
    assert backlog(world).kv_use == pytest.approx(0.2)


def test_who_would_slow_all_others_down_waits_for_room() -> None:
    world = World(1, 1, RouterConfig(inter_token_objective_s=0.0104 / AIMED))
    assert crowd(world, 12, num_tokens=16, num_new=100) == 2
    assert backlog(world).num_sequences == pytest.approx(10)


def test_more_workers_are_no_remedy_for_silent_ones() -> None:
    world = World(0, 0)
    crowd(world, 5)
    assert backlog(world) == Backlog()
    world = busy(1, 1, RouterConfig(may_stay=False))
    crowd(world, 50)
    assert backlog(world).num_prefill_prompts > 40
    world.now += SILENT_AFTER_S + 0.1
    assert backlog(world) == Backlog()


def test_sums_are_exact_whoever_leaves_in_whatever_order() -> None:
    world = busy(1, 1)
    crowd(world, 3 * MOST_LOOKED_AT, num_tokens=700)
    world.now += 0.3
    world.dispatch()
    for number in sorted(range(3 * MOST_LOOKED_AT), key=lambda number: number * 7 % 16):
        world.router.withdraw(f"r{number}", world.now)
        waiting = world.router.num_waiting
        found = backlog(world)
        if found != Backlog():
            assert found.num_prefill_prompts == pytest.approx(waiting)
            assert found.prefill_s == pytest.approx(waiting * (0.7 + COSTS.step_s), rel=0.01)
