"""How a link is made: by a connector that both have and that reads, or it is refused by name."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace

import grpc
import pytest

from kv_transfer import link_maker, probe
from kv_transfer import links as links_module
from kv_transfer.errors import IncompatiblePeer, OneSidedRefused, TransferError, Unreachable
from kv_transfer.link import Link
from protos.events_pb2 import LoadReport, StepTimes, WorkerEvent
from protos.rpc import PROTOCOL, Plane
from protos.worker_pb2 import CacheFormat, WorkerDescription
from tests.kv_transfer.fakes import FakePeerPool, FakeRead, Memory
from tests.kv_transfer.linked_peers import Describer, FakeConnector, MakeLinks, Peer, begun


async def test_a_read_that_is_not_one_sided_leads_to_the_next_connector(
    peer: Peer, make_links: MakeLinks
) -> None:
    fast, plain = FakeConnector("fast", OneSidedRefused("emulated")), FakeConnector("plain")
    link = await make_links(fast, plain).get(peer.address)
    assert link.connector == "plain"
    assert fast.pools[0].disconnected
    assert not plain.pools[0].disconnected


async def test_a_first_read_that_fails_leads_to_the_next_connector(
    peer: Peer, make_links: MakeLinks
) -> None:
    fast, plain = FakeConnector("fast", TransferError("broken")), FakeConnector("plain")
    assert (await make_links(fast, plain).get(peer.address)).connector == "plain"
    assert fast.pools[0].disconnected


async def test_a_read_that_is_held_up_says_nothing_of_the_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or it would be taken for slow, and passed by, for as long as it lives."""
    now, held_up = 0.0, [0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.5]  # the first of each figure

    class Pool(FakePeerPool):
        def read(self, group: int, remote: Sequence[int], local: Sequence[int]) -> FakeRead:
            nonlocal now
            now += 1e-6 * len(remote) + (held_up.pop(0) if held_up else 0.0)
            return super().read(group, remote, local)

    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=lambda: now))
    figures = await probe.probe(Pool(Memory(1), Memory(1)), 4096)
    assert figures.latency_s == pytest.approx(1e-6)
    assert figures.bytes_per_s == pytest.approx(4096e6)


async def test_a_first_read_that_does_not_end_leads_to_the_next_connector(
    peer: Peer, make_links: MakeLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "FIRST_READ_TIMEOUT_S", 0.01)
    fast, plain = FakeConnector("fast", by_hand=True), FakeConnector("plain")
    assert (await make_links(fast, plain).get(peer.address)).connector == "plain"
    (read,) = fast.pools[0].reads
    assert fast.pools[0].disconnected
    assert not read.wanted
    assert [p[1] for p in read._pairs] == [probe.SCRATCH_BLOCK], "it may still be written"


async def test_a_connect_that_fails_leads_to_the_next_connector(
    peer: Peer, make_links: MakeLinks
) -> None:
    fast, plain = FakeConnector("fast"), FakeConnector("plain")
    fast.refusal = TransferError("no port is open")
    assert (await make_links(fast, plain).get(peer.address)).connector == "plain"


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed is tried again at once."""
    monkeypatch.setattr(link_maker, "FIRST_RETRY_S", 0.0)


async def read_by(link: Link, connector: str) -> None:
    async with asyncio.timeout(30):
        while link.connector != connector:
            await asyncio.sleep(0.001)


async def tried(connector: FakeConnector) -> int:
    """How often, once it is tried no more."""
    num_pools = 0
    async with asyncio.timeout(10):
        while num_pools != len(connector.pools):
            num_pools = len(connector.pools)
            await asyncio.sleep(0.05)
    return num_pools


@pytest.mark.usefixtures("soon")
async def test_a_connector_that_failed_in_passing_is_used_once_it_can(
    peer: Peer, make_links: MakeLinks
) -> None:
    fast, plain = FakeConnector("fast", TransferError("busy")), FakeConnector("plain")
    link = await make_links(fast, plain).get(peer.address)
    plain.pools[0].leave = True
    under_way = link.begin_read(0, [1], [1])
    while len(fast.pools) < 3:
        await asyncio.sleep(0.001)
    assert link.connector == "plain"
    fast.outcome = None
    await read_by(link, "fast")
    assert link.lost is None
    assert plain.pools[0].disconnected
    assert not under_way.ended.done(), "it ends where it began"
    await link.begin_read(0, [1], [1]).ended
    assert fast.pools[-1].reads[-1].ended.done()
    assert [pool.disconnected for pool in fast.pools[-2:]] == [True, False]
    num_pools = len(fast.pools)
    assert await tried(fast) == num_pools, "there is no better one"


@pytest.mark.usefixtures("soon")
async def test_what_was_refused_is_not_tried_again(peer: Peer, make_links: MakeLinks) -> None:
    never = FakeConnector("never", OneSidedRefused("emulated"))
    fast, plain = FakeConnector("fast", TransferError("busy")), FakeConnector("plain")
    peer.describer.description.connectors.add(name="never")
    link = await make_links(never, fast, plain).get(peer.address)
    while len(fast.pools) < 3:
        await asyncio.sleep(0.001)
    fast.outcome = OneSidedRefused("emulated")
    await tried(fast)
    assert (link.connector, len(never.pools)) == ("plain", 1)


@pytest.mark.usefixtures("soon")
async def test_a_first_read_that_has_not_ended_is_waited_for_before_the_next(
    peer: Peer, make_links: MakeLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "FIRST_READ_TIMEOUT_S", 0.01)
    fast, plain = FakeConnector("fast", by_hand=True), FakeConnector("plain")
    link = await make_links(fast, plain).get(peer.address)
    assert await tried(fast) == 1
    fast.by_hand = False
    fast.pools[0].reads[0].fail()
    await read_by(link, "fast")


@pytest.mark.usefixtures("soon")
async def test_so_is_one_of_a_peer_that_says_nothing_just_then(
    peer: Peer, make_links: MakeLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "FIRST_READ_TIMEOUT_S", 0.1)
    fast, plain = FakeConnector("fast", by_hand=True), FakeConnector("plain")
    link = await make_links(fast, plain).get(peer.address)
    fast.pools[0].reads[0].fail()
    while len(fast.pools) < 2:
        await asyncio.sleep(0.001)
    describer = peer.describer
    said, num_calls = describer.description, describer.calls
    describer.description = None  # type: ignore[assignment]
    while describer.calls == num_calls:
        await asyncio.sleep(0.001)
    describer.description = said
    assert await tried(fast) == 2
    assert link.lost is None
    fast.by_hand = False
    fast.pools[1].reads[0].fail()
    await read_by(link, "fast")


@pytest.mark.usefixtures("soon")
async def test_another_incarnation_is_read_by_no_old_link(
    peer: Peer, make_links: MakeLinks
) -> None:
    fast, plain = FakeConnector("fast", TransferError("busy")), FakeConnector("plain")
    link = await make_links(fast, plain).get(peer.address)
    peer.describer.description.incarnation += 1
    num_pools = await tried(fast)
    fast.outcome = None
    assert await tried(fast) == num_pools
    assert link.connector == "plain"


@pytest.mark.usefixtures("soon")
async def test_a_link_that_is_lost_is_not_improved_though_a_hand_off_is_left(
    peer: Peer, make_links: MakeLinks
) -> None:
    fast, plain = FakeConnector("fast", TransferError("busy")), FakeConnector("plain")
    link = await make_links(fast, plain).get(peer.address)
    call = link.open_handoff()
    link.lose("a test")
    num_pools = await tried(fast)
    fast.outcome = None
    assert await tried(fast) == num_pools
    assert not call.done()
    call.cancel()


async def test_a_peer_that_goes_during_the_first_read_is_not_tried_otherwise(
    peer: Peer, make_links: MakeLinks
) -> None:
    fast, plain = FakeConnector("fast", by_hand=True), FakeConnector("plain")
    making = asyncio.ensure_future(make_links(fast, plain).get(peer.address))
    async with asyncio.timeout(30):
        while not (fast.pools and fast.pools[0].reads):
            await asyncio.sleep(0)
        await peer.stop()
        fast.pools[0].reads[0].fail()
        with pytest.raises(Unreachable):
            await making
    assert plain.pools == []
    await peer.start()


async def test_a_peer_that_goes_during_a_first_read_that_does_not_end_is_not_waited_for(
    peer: Peer, make_links: MakeLinks
) -> None:
    """As of one that is stopped, which breaks all of its streams."""
    fast, plain = FakeConnector("fast", by_hand=True), FakeConnector("plain")
    making = asyncio.ensure_future(make_links(fast, plain).get(peer.address))
    async with asyncio.timeout(probe.FIRST_READ_TIMEOUT_S - 1):
        await begun(fast)
        await peer.stop()
        with pytest.raises(Unreachable, match="load reports broke off"):
            await making
    (read,) = fast.pools[0].reads
    assert not read.wanted
    assert fast.pools[0].disconnected
    assert plain.pools == []
    await peer.start()


async def test_another_incarnation_after_the_first_read_is_not_tried_otherwise(
    peer: Peer, make_links: MakeLinks
) -> None:
    fast, plain = FakeConnector("fast", by_hand=True), FakeConnector("plain")
    making = asyncio.ensure_future(make_links(fast, plain).get(peer.address))
    async with asyncio.timeout(30):
        while not (fast.pools and fast.pools[0].reads):
            await asyncio.sleep(0)
        peer.describer.description.incarnation = 7
        fast.pools[0].reads[0].fail()
        with pytest.raises(Unreachable, match="the wire was cut"):
            await making
    assert plain.pools == []


async def test_when_all_connectors_fail_each_is_named_and_tried_again(
    peer: Peer, make_links: MakeLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a pause, which lasts here until somebody has asked during it."""
    for name in ("FIRST_BACK_OFF_S", "USUAL_BACK_OFF_S"):
        monkeypatch.setattr(links_module, name, 60.0)
    fast = FakeConnector("fast", TransferError("broken"))
    plain = FakeConnector("plain", TransferError("cut", retryable=False))
    links = make_links(fast, plain)
    with pytest.raises(Unreachable, match="fast: broken; plain: cut"):
        await links.get(peer.address)
    with pytest.raises(TransferError, match="tried just now: fast: broken"):
        await links.get(peer.address)
    fast.outcome = None
    links._peers[peer.address].not_before = 0.0
    assert (await links.get(peer.address)).connector == "fast"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (WorkerDescription(protocol=PROTOCOL + 1), "protocol"),
        (WorkerDescription(format=CacheFormat(fingerprint="g")), "fingerprint"),
        (WorkerDescription(format=CacheFormat(block_size=16)), "block_size"),
    ],
)
async def test_a_peer_that_does_not_fit_is_refused_by_name(
    peer: Peer, make_links: MakeLinks, change: WorkerDescription, field: str
) -> None:
    peer.describer.description.MergeFrom(change)
    with pytest.raises(IncompatiblePeer) as refused:
        await make_links(FakeConnector("fast")).get(peer.address)
    assert refused.value.field == field


async def test_a_peer_without_a_common_connector_is_refused(
    peer: Peer, make_links: MakeLinks
) -> None:
    peer.describer.description.connectors.add(name="slow" * 100_000)
    with pytest.raises(IncompatiblePeer, match=r"connectors: .* this worker has") as refused:
        await make_links(FakeConnector("other")).get(peer.address)
    assert len(str(refused.value)) < 1200


async def test_nobody_there_is_an_error_at_once(peer: Peer, make_links: MakeLinks) -> None:
    await peer.stop()
    with pytest.raises(TransferError) as failed:
        await make_links(FakeConnector("fast")).get(peer.address)
    assert isinstance(failed.value, Unreachable)
    await peer.start()


async def test_a_slow_link_is_said_loudly(
    peer: Peer, make_links: MakeLinks, caplog: pytest.LogCaptureFixture
) -> None:
    await make_links(FakeConnector("fast"), slow_bytes_per_s=1e18).get(peer.address)
    assert any(r.levelname == "WARNING" and "is slow" in r.message for r in caplog.records)


async def test_a_link_knows_its_peers_load_and_its_end(peer: Peer, make_links: MakeLinks) -> None:
    link = await make_links(FakeConnector("fast")).get(peer.address)
    peer.reporter.reports.put_nowait(LoadReport(num_queued_tokens=5))
    async with asyncio.timeout(30):
        while link.load is None:
            await asyncio.sleep(0)
        assert link.load.num_queued_tokens == 5
        impossible = LoadReport(num_queued_tokens=6, step_times=StepTimes(base_s=math.nan))
        for report in (impossible, LoadReport(num_queued_tokens=7)):
            peer.reporter.reports.put_nowait(report)
        while (heard := link.load.num_queued_tokens) == 5:
            await asyncio.sleep(0)
        assert heard == 7
        await peer.stop()
        while link.lost is None:
            await asyncio.sleep(0)
    assert "load reports broke off" in link.lost


class Raw(grpc.GenericRpcHandler):
    """Says these bytes of itself, and reports these."""

    def __init__(self, description: bytes, *reports: bytes) -> None:
        self._description = description
        self._reports = reports

    def service(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes]":
        async def describe(request: bytes, context: object) -> bytes:
            return self._description

        async def report(request: bytes, context: object) -> AsyncIterator[bytes]:
            for report in self._reports:
                yield report
            await asyncio.Event().wait()

        if details.method.endswith("Describe"):
            return grpc.unary_unary_rpc_method_handler(describe)
        return grpc.unary_stream_rpc_method_handler(report)


async def test_a_peer_that_says_no_message_of_itself_is_refused(make_links: MakeLinks) -> None:
    async with raw(Raw(b"\xff")) as address:
        with pytest.raises(TransferError, match="what it says of itself is unreadable"):
            await make_links(FakeConnector("fast")).get(address)


async def test_a_report_that_is_no_message_is_none(make_links: MakeLinks) -> None:
    report = WorkerEvent(load=LoadReport(num_queued_tokens=7)).SerializeToString()
    described = Describer().description.SerializeToString()
    async with raw(Raw(described, b"\xff", report)) as address, asyncio.timeout(30):
        link = await make_links(FakeConnector("fast")).get(address)
        while link.load is None:
            await asyncio.sleep(0)
        assert link.load.num_queued_tokens == 7


@asynccontextmanager
async def raw(handler: Raw) -> AsyncIterator[str]:
    server = Plane().server()
    server.add_generic_rpc_handlers([handler])
    address = Plane().listen(server, "127.0.0.1:0")
    await server.start()
    yield address
    await server.stop(0)
