"""What an ingress says of its router: exact numbers."""

import time
from collections import Counter

import pytest

from router.admission import Refused
from router.config import RouterConfig
from router.pairing import Reason
from router.workers import Leg
from tests.cluster.metrics.samples import Samples, read, value
from tests.cluster.metrics.test_worker import relay_page
from tests.router.world import World, busy

REROUTES = {"died": 2, "left": 3, "refused": 4, "stuck": 5}


def of_router(world: World) -> Samples:
    return read(relay_page(Counter(REROUTES), world.router).render())


def test_what_waits_at_a_router_is_shown_and_what_became_of_it() -> None:
    world = busy(1, 1, RouterConfig(max_waiting=3))
    world.pass_time(time.monotonic() - world.now)
    holder = world.prefill[0]
    world.hold(holder, "x", 30)
    world.place("a", 500)
    world.report(Leg.PREFILL, holder, num_queued_tokens=10_000)
    for name in "bcd":
        world.submit(name, 500)
    assert not world.dispatch()
    with pytest.raises(Refused):
        world.submit("e", 500)
    own = of_router(world)
    for reason, number in REROUTES.items():
        assert value(own, "reroutes_total", reason=reason) == number
    assert value(own, "router_placements_total", reason="remote") == 1
    assert value(own, "router_refusals_total", reason="full") == 1
    assert value(own, "router_waiting") == 3
    waiting_s = world.router.backlog(world.now).prefill_s
    assert value(own, "router_waiting_prompt_seconds", computed_by="prefill") == waiting_s > 0
    assert value(own, "router_waiting_prompt_seconds", computed_by="decode") == 0
    assert value(own, "router_index_blocks") == len(world.router.index) >= 30
    assert value(own, "router_expired_total") == 0
    world.now += RouterConfig().max_wait_s
    world.dispatch()
    own = of_router(world)
    assert (value(own, "router_waiting"), value(own, "router_expired_total")) == (0, 3)


@pytest.mark.parametrize(
    ("world", "reason"),
    [
        (busy(1, 1), "remote"),
        (World(1, 1), "local-sooner"),
        (World(0, 1), "no-prefill-worker"),
        (busy(1, 1, RouterConfig("round-robin")), "policy"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_each_reason_of_a_placement_is_counted(world: World, reason: str) -> None:
    world.place("a", 500)
    own = of_router(world)
    placed = {one.value: value(own, "router_placements_total", reason=one.value) for one in Reason}
    assert placed == {**dict.fromkeys(placed, 0), reason: 1}


def test_who_would_be_late_is_counted_and_decode_workers_time_is_shown() -> None:
    world = World(0, 1, RouterConfig(ttft_objective_s=6.0))
    world.pass_time(time.monotonic() - world.now)
    world.report(Leg.DECODE, world.decode[0], num_queued_tokens=5000)
    world.submit("a", 500)
    assert not world.dispatch()
    own = of_router(world)
    waiting_s = world.router.backlog(world.now).decode_s
    assert value(own, "router_waiting_prompt_seconds", computed_by="decode") == waiting_s > 0
    with pytest.raises(Refused):
        world.submit("b", 2000)
    assert value(of_router(world), "router_refusals_total", reason="late") == 1


def test_sequences_are_shown_that_wait_for_a_router_s_decode_workers() -> None:
    world = World(1, 1)
    world.pass_time(time.monotonic() - world.now)
    world.report(Leg.DECODE, world.decode[0], max_sequences=100, num_running=100)
    for name in "abc":
        world.submit(name, 64, num_new=200)
    assert not world.dispatch()
    assert value(of_router(world), "router_waiting_sequences") == 3
