"""What is refused before it costs anything, and who gets a core to say so."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from cluster.pools import Pools
from cluster.relay import Relay, RelayConfig
from cluster.replicas.worker_replica import NICENESS, give_way
from engine.errors import QueueFullError
from engine.request import GenerationRequest, RequestId
from engine.sampling import SamplingParams
from protos.rpc import Plane
from router.config import RouterConfig
from router.router import Router
from router.workers import Leg
from tests.router.world import World


async def test_a_full_waiting_room_is_told_without_a_request() -> None:
    router = Router(RouterConfig(max_waiting=1), Random(0))
    relay = Relay(Pools(Plane(), "r", router))
    relay.check_open("")
    waits = relay.submit(GenerationRequest(RequestId("a"), [1, 2, 3], SamplingParams()))
    with pytest.raises(QueueFullError, match="too many requests wait") as refused:
        relay.check_open("")
    assert refused.value.retry_after_s >= 1
    waits.close()
    relay.check_open("")
    assert relay.num_open == 0


async def test_who_may_go_before_all_that_wait_is_let_in() -> None:
    """In half a second there is a place for one, and a second later for the next."""
    world = World(0, 1, RouterConfig(ttft_objective_s=0.6, max_backlog_steps=0.0))
    world.now = time.monotonic()
    world.report(Leg.DECODE, world.decode[0], max_sequences=1)
    world.place("answers", 16, num_new=100)
    world.router.began("answers", world.now - 0.5)
    world.submit("waits", 16, num_new=100)
    pools = Pools(Plane(), "r", world.router)
    with pytest.raises(QueueFullError, match="later than"):
        Relay(pools).check_open("")
    Relay(pools, RelayConfig(soonest_priority=-1)).check_open("")
    world.submit("soonest", 16, num_new=100, priority=-1)


def test_workers_give_way_to_the_front() -> None:
    """In a thread of its own: niceness is a thread's, and is never taken back."""

    def nicer() -> tuple[int, int]:
        give_way()
        once = os.getpriority(os.PRIO_PROCESS, 0)
        give_way()
        return once, os.getpriority(os.PRIO_PROCESS, 0)

    with ThreadPoolExecutor(1) as other:
        once, twice = other.submit(nicer).result()
    assert once == twice >= NICENESS
