"""What an ingress says of its router: exact numbers."""

import time
from collections import Counter

import pytest

from router.admission import Refused
from router.config import RouterConfig
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


def test_sequences_are_shown_that_wait_for_a_router_s_decode_workers() -> None:
    world = World(1, 1)
    world.pass_time(time.monotonic() - world.now)
    world.report(Leg.DECODE, world.decode[0], max_sequences=100, num_running=100)
    for name in "abc":
        world.submit(name, 64, num_new=200)
    assert not world.dispatch()
    assert value(of_router(world), "router_waiting_sequences") == 3
