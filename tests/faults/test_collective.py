"""Workers whose blocks go through communicators: one end dies or stops in the middle of a read.

What the other connectors go through at every point of a hand-off differs for this one only while
blobs are under way.
"""

import asyncio
import time

import pytest

from engine.errors import UnavailableError
from tests.engine.pair import Answer
from tests.faults.conftest import PARAMS, PROMPTS
from tests.faults.workers import NOTICED_HERE_S, Relay, kill_readers

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.parametrize("relay_of_module", ["collective"], indirect=True),
]

Expected = dict[str, Answer]


async def test_the_holder_is_killed(relay: Relay, expected: Expected) -> None:
    relay.first.set_faults("holder.chunk:2=kill")
    told = await relay.ask(PROMPTS["300"], PARAMS, salt="holder killed")
    told.check_equal(expected["300"])
    await relay.first.died()
    (link,) = {link.connector for link in (await relay.decode.load()).links}
    assert link == "collective"
    await relay.first.restart()


async def test_the_holder_is_stopped(relay: Relay, expected: Expected) -> None:
    relay.first.set_faults("holder.chunk:2=stop")
    peer = (await relay.first.load()).incarnation
    asked = asyncio.ensure_future(relay.ask(PROMPTS["300"], PARAMS, salt="holder stopped"))
    await relay.first.stopped()
    stopped = time.monotonic()
    await relay.decode.until_lost(peer)
    assert time.monotonic() - stopped < NOTICED_HERE_S
    (await asked).check_equal(expected["300"])
    relay.first.go_on()


async def test_the_reader_is_killed(relay: Relay) -> None:
    relay.decode.set_faults("puller.reading=kill")
    with pytest.raises(UnavailableError):
        await relay.ask(PROMPTS["300"], PARAMS, salt="reader killed")
    await relay.first.check_settled()
    await relay.decode.restart()
    await relay.reconnect()


async def test_the_reader_is_stopped(relay: Relay) -> None:
    relay.decode.set_faults("puller.reading=stop")
    with pytest.raises(UnavailableError):
        await relay.ask(PROMPTS["300"], PARAMS, salt="reader stopped")
    await relay.decode.stopped()
    await relay.first.check_settled()
    relay.decode.go_on()
    await relay.reconnect()


async def test_readers_are_killed(relay: Relay) -> None:
    """Every one of 20, five at once."""
    await kill_readers(relay.first, [5] * 4)
