"""A prefill worker dies, stops, is stuck or lies, at every point of a hand-off."""

import asyncio
import time

import pytest

from decode_worker.answerer import LocalPrefill
from engine.errors import UnavailableError
from tests.engine.pair import Answer
from tests.faults.conftest import PARAMS, PROMPTS
from tests.faults.workers import NOTICED_S, SLACK_S, Relay

pytestmark = pytest.mark.asyncio(loop_scope="module")

Expected = dict[str, Answer]
POINTS = ["holder.ask", "holder.chunk:2", "holder.finished", "holder.commit"]


@pytest.mark.parametrize("point", POINTS)
async def test_killed(relay: Relay, expected: Expected, point: str) -> None:
    relay.first.set_faults(f"{point}=kill")
    told = await relay.ask(PROMPTS["300"], PARAMS, salt=f"kill {point}")
    told.check_equal(expected["300"])
    await relay.first.died()
    steps = (await relay.second.load()).num_steps
    assert steps > 0
    await relay.first.restart()
    # another incarnation at the same address is another peer, and serves
    told = await relay.ask(PROMPTS["33"], PARAMS, relay.first, salt=f"after {point}")
    told.check_equal(expected["33"])
    assert (await relay.second.load()).num_steps == steps


@pytest.mark.parametrize("point", POINTS)
async def test_stopped(relay: Relay, expected: Expected, point: str) -> None:
    relay.first.set_faults(f"{point}=stop")
    started = time.monotonic()
    told = await relay.ask(PROMPTS["300"], PARAMS, salt=f"stop {point}")
    assert time.monotonic() - started < NOTICED_S + SLACK_S
    told.check_equal(expected["300"])
    await relay.first.stopped()
    again = asyncio.ensure_future(relay.ask(PROMPTS["250"], PARAMS, salt=f"during {point}"))
    relay.first.go_on()
    (await again).check_equal(expected["250"])


async def test_an_engine_that_is_stuck_behind_a_loop_that_answers(
    relay: Relay, expected: Expected
) -> None:
    relay.first.set_faults("source.open=stuck")
    started = time.monotonic()
    told = await relay.ask(PROMPTS["300"], PARAMS, salt="stuck")
    told.check_equal(expected["300"])
    assert 1.0 < time.monotonic() - started < 1.0 + SLACK_S


async def test_a_lease_that_was_released_early_shows_not_one_token(relay: Relay) -> None:
    relay.first.set_faults("holder.commit=release")
    with pytest.raises(UnavailableError, match="let go too early"):
        await relay.ask(PROMPTS["300"], PARAMS, relay.first, salt="early")


@pytest.mark.parametrize("point", ["holder.chunk:2", "holder.finished", "holder.commit"])
async def test_an_error_is_another_ones_turn(relay: Relay, expected: Expected, point: str) -> None:
    relay.first.set_faults(f"{point}=fail")
    told = await relay.ask(PROMPTS["300"], PARAMS, salt=f"fail {point}")
    told.check_equal(expected["300"])


async def test_without_another_one_the_prompt_is_computed_here(
    relay: Relay, expected: Expected
) -> None:
    relay.first.set_faults("holder.chunk:2=fail")
    told = await relay.ask(
        PROMPTS["300"], PARAMS, relay.first, local=LocalPrefill.AUTO, salt="here"
    )
    told.check_equal(expected["300"])


async def test_nobody_there_and_nobody_else(relay: Relay) -> None:
    address, relay.first.address = relay.first.address, "127.0.0.1:9"
    try:
        with pytest.raises(UnavailableError, match="no prefill worker could serve"):
            await relay.ask(PROMPTS["33"], PARAMS, relay.first, salt="nobody")
    finally:
        relay.first.address = address
