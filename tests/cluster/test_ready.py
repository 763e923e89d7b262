"""What `/ready` proves of a relay over two pools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from cluster.http import build_app
from cluster.relay import Relay, RelayConfig
from decode_worker.answerer import LocalPrefill, Route
from engine.request import ChoiceDelta
from router.config import RouterConfig
from router.workers import Leg
from tests.cluster.fake_fleet import END, FakeWorker, Fleet, MakeFleet, request
from tests.cluster.fakes import small_model
from tests.decode_worker.fakes import PushedStream


@asynccontextmanager
async def front(relay: Relay) -> AsyncIterator[httpx.AsyncClient]:
    app, _ = build_app(relay, small_model())
    transport = httpx.ASGITransport(app, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


async def with_quick_decode(fleet: Fleet) -> FakeWorker:
    """It computes every prompt sooner than it is handed over."""
    decode = FakeWorker()
    decode.loads.report.step_times.prompt_token_s = 1e-6
    return await fleet.add(worker=decode)


async def with_slow_prefill(fleet: Fleet) -> FakeWorker:
    prefill = FakeWorker()
    prefill.loads.report.step_times.prompt_token_s = 0.01
    return await fleet.add(Leg.PREFILL, prefill)


def answer(stream: PushedStream) -> Route:
    """Two tokens; and where they were to come from."""
    stream.push(ChoiceDelta(0, [1]))
    stream.push(ChoiceDelta(0, [2], finish_reason=END))
    return stream.submitted.route


async def test_a_token_goes_through_both_pools_wherever_it_would_be_sooner(fleet: Fleet) -> None:
    decode, prefill = await with_quick_decode(fleet), await with_slow_prefill(fleet)
    usual = fleet.relay.submit(request())
    assert not (await decode.stream()).submitted.route.prefill_workers
    usual.close()
    async with front(fleet.relay) as client:
        asked = asyncio.create_task(client.get("/ready"))
        probe = await decode.stream(1)
        assert len(probe.submitted.request.prompt_token_ids) > 16, "a whole block, and one more"
        assert probe.submitted.request.cache_salt, "nobody has it cached"
        route = answer(probe)
        assert [worker.address for worker in route.prefill_workers] == [prefill.address]
        assert route.local_prefill is LocalPrefill.NEVER
        assert (await asked).status_code == 200
        assert (await client.get("/ready")).status_code == 200
        assert len(decode.answerer.streams) == 2


async def test_who_lives_is_enough_where_decode_workers_may_compute(fleet: Fleet) -> None:
    decode = await with_quick_decode(fleet)
    async with front(fleet.relay) as client:
        asked = asyncio.create_task(client.get("/ready"))
        route = answer(await decode.stream())
        assert (route.prefill_workers, route.local_prefill) == ((), LocalPrefill.AUTO)
        assert (await asked).status_code == 200


async def test_a_prefill_worker_that_comes_later_has_yet_to_hand_over(fleet: Fleet) -> None:
    """What the decode worker did by itself is no proof of that; once is enough."""
    decode = await with_quick_decode(fleet)
    async with front(fleet.relay) as client:
        asked = asyncio.create_task(client.get("/ready"))
        answer(await decode.stream())
        assert (await asked).status_code == 200
        prefill = await with_slow_prefill(fleet)
        asked = asyncio.create_task(client.get("/ready"))
        route = answer(await decode.stream(1))
        assert [worker.address for worker in route.prefill_workers] == [prefill.address]
        assert route.local_prefill is LocalPrefill.NEVER
        assert (await asked).status_code == 200
        fleet.remove(prefill, Leg.PREFILL)
        await with_slow_prefill(fleet)
        assert (await client.get("/ready")).status_code == 200
        assert len(decode.answerer.streams) == 2


async def test_with_never_nothing_is_well_without_prefill_workers(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(RelayConfig(LocalPrefill.NEVER), RouterConfig(may_stay=False))
    decode, prefill = await with_quick_decode(fleet), await with_slow_prefill(fleet)
    async with front(fleet.relay) as client:
        asked = asyncio.create_task(client.get("/ready"))
        answer(await decode.stream())
        assert (await asked).status_code == 200
        fleet.remove(prefill, Leg.PREFILL)
        for path in ("/ready", "/health"):
            refused = await client.get(path)
            assert refused.status_code == 503
            assert "no prefill worker answers" in refused.text
        await with_slow_prefill(fleet)
        assert (await client.get("/ready")).status_code == 200


async def test_a_prefill_worker_that_leaves_before_it_is_asked(make_fleet: MakeFleet) -> None:
    """The one who asked is told; the next one needs it no more."""
    fleet = make_fleet(RelayConfig(max_alone_s=0.5))
    decode, prefill = await with_quick_decode(fleet), await with_slow_prefill(fleet)
    decode.loads.report.step_times.prompt_token_s = 1.0
    decode.loads.report.num_queued_tokens = prefill.loads.report.num_queued_tokens = 5000
    prefill.loads.report.max_step_tokens = 1000
    await fleet.hear(decode)
    await fleet.hear(prefill, Leg.PREFILL)
    async with front(fleet.relay) as client:
        asked = asyncio.create_task(client.get("/ready"))
        while not fleet.relay.router.num_waiting:
            await asyncio.sleep(0.005)
        fleet.remove(prefill, Leg.PREFILL)
        refused = await asked
        assert refused.status_code == 503
        assert "no prefill worker answers" in refused.text
        asked = asyncio.create_task(client.get("/ready"))
        answer(await decode.stream())
        assert (await asked).status_code == 200
