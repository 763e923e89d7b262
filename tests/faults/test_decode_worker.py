"""A decode worker dies, stops or fails at every point of a hand-off; clients leave at any."""

import asyncio

import pytest

from engine.errors import UnavailableError
from engine.request import GenerationRequest, RequestId
from tests.engine.pair import Answer
from tests.faults.conftest import PARAMS, PROMPTS
from tests.faults.workers import Relay

pytestmark = pytest.mark.asyncio(loop_scope="module")

Expected = dict[str, Answer]
POINTS = ["puller.chunk:2", "puller.reading", "puller.finished", "puller.commit"]


@pytest.mark.parametrize("point", POINTS)
async def test_killed(relay: Relay, point: str) -> None:
    relay.decode.set_faults(f"{point}=kill")
    with pytest.raises(UnavailableError):
        await relay.ask(PROMPTS["300"], PARAMS, salt=f"kill {point}")
    await relay.first.check_settled()
    await relay.decode.restart()
    await relay.reconnect()


async def test_stopped(relay: Relay) -> None:
    relay.decode.set_faults("puller.reading=stop")
    with pytest.raises(UnavailableError):
        await relay.ask(PROMPTS["300"], PARAMS, salt="stop")
    await relay.decode.stopped()
    await relay.first.check_settled()
    relay.decode.go_on()
    await relay.reconnect()


@pytest.mark.parametrize("point", POINTS)
async def test_a_failure_is_another_ones_turn(relay: Relay, expected: Expected, point: str) -> None:
    relay.decode.set_faults(f"{point}=fail")
    told = await relay.ask(PROMPTS["300"], PARAMS, salt=f"fail {point}")
    told.check_equal(expected["300"])


async def test_clients_that_leave_at_any_time(relay: Relay) -> None:
    async def leave(after_s: float) -> None:
        name = f"leaving {after_s}"
        asked = asyncio.ensure_future(relay.ask(PROMPTS["300"], PARAMS, salt=name))
        await asyncio.wait({asked}, timeout=after_s)
        asked.cancel()
        await asyncio.wait({asked})

    for turn in range(4):
        await asyncio.gather(*(leave(0.004 * i + 0.001 * turn) for i in range(12)))


async def test_a_session_that_breaks(relay: Relay) -> None:
    streams = [
        relay.session.submit(
            GenerationRequest(RequestId(f"broken {i}"), PROMPTS["300"], PARAMS, cache_salt=f"b{i}")
        )
        for i in range(6)
    ]
    await relay.session.stop()
    for stream in streams:
        with pytest.raises(UnavailableError):
            async for _ in stream:
                pass
    await relay.connect()
