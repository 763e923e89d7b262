"""Links: made once, compatible or refused by name, read from before they are used."""

import asyncio
import gc
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest

from kv_transfer import links as links_module
from kv_transfer import probe
from kv_transfer.connector import PeerPool
from kv_transfer.errors import IncompatiblePeer, OneSidedRefused, TransferError, Unreachable
from kv_transfer.links import MAX_IDLE_PEERS, Links, next_back_off
from protos.events_pb2 import LoadReport, StepTimes, SubscribeRequest, WorkerEvent
from protos.events_pb2_grpc import WorkerEventsServicer, add_WorkerEventsServicer_to_server
from protos.rpc import PROTOCOL, Plane
from protos.worker_pb2 import (
    CacheFormat,
    CacheGroup,
    ConnectorOffer,
    DescribeRequest,
    WorkerDescription,
)
from protos.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from tests.kv_transfer.fakes import FakePeerPool, FakeRead, Memory

FORMAT = CacheFormat(fingerprint="f", block_size=8, groups=[CacheGroup(blob_bytes=4096)])


class Describer(WorkerServicer):
    """A worker that only says what it is."""

    def __init__(self) -> None:
        self.calls = 0
        self.description = WorkerDescription(
            protocol=PROTOCOL,
            incarnation=1,
            format=FORMAT,
            connectors=[ConnectorOffer(name=n) for n in ("fast", "plain")],
        )

    async def Describe(  # noqa: N802
        self, request: DescribeRequest, context: object
    ) -> WorkerDescription:
        self.calls += 1
        return self.description

    async def CheckHealth(self, request: object, context: object) -> None:  # type: ignore[override]  # noqa: N802
        raise NotImplementedError

    async def Drain(self, request: object, context: object) -> None:  # type: ignore[override]  # noqa: N802
        raise NotImplementedError


class Reporter(WorkerEventsServicer):
    """Reports a load as often as it is told to."""

    def __init__(self) -> None:
        self.reports: asyncio.Queue[LoadReport] = asyncio.Queue()

    async def Subscribe(  # noqa: N802
        self, request: SubscribeRequest, context: object
    ) -> AsyncIterator[WorkerEvent]:
        while True:
            yield WorkerEvent(load=await self.reports.get())


class FakeConnector:
    """Its peers' reads end as the test says."""

    def __init__(self, name: str, outcome: Exception | None = None, by_hand: bool = False) -> None:
        self.name = name
        self.by_hand = by_hand
        self.outcome = outcome
        self.refusal: TransferError | None = None
        self.pools: list[FakePeerPool] = []

    def metadata(self) -> bytes:
        return b""

    async def connect(self, incarnation: int, metadata: bytes) -> PeerPool:
        if self.refusal:
            raise self.refusal
        pool = _Pool(self.outcome, self.by_hand)
        self.pools.append(pool)
        return pool

    def expect_peer(self) -> None:
        pass

    def problem(self) -> None:
        pass

    async def close(self) -> None:
        pass


class _Pool(FakePeerPool):
    def __init__(self, outcome: Exception | None, by_hand: bool) -> None:
        super().__init__(Memory(2), Memory(2), by_hand=True)
        self._outcome = outcome
        self._leave = by_hand

    def read(self, *pairs: object) -> FakeRead:
        read = super().read(*pairs)  # type: ignore[arg-type]
        if self._leave:
            return read
        if self._outcome is None:
            read.finish()
        else:
            read.ended.set_exception(self._outcome)
        return read


class Peer:
    """A describer behind a port that can go away and come back."""

    def __init__(self) -> None:
        self.describer = Describer()
        self.reporter = Reporter()
        self.address = "127.0.0.1:0"

    async def start(self) -> None:
        self._server = Plane().server()
        add_WorkerServicer_to_server(self.describer, self._server)
        add_WorkerEventsServicer_to_server(self.reporter, self._server)
        self.address = Plane().listen(self._server, self.address)
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)


MakeLinks = Callable[..., Links]


class Channels:
    """All that were opened, in order."""

    def __init__(self) -> None:
        self.opened: list[grpc.aio.Channel] = []

    def open(self, address: str) -> grpc.aio.Channel:
        self.opened.append(Plane().channel(address))
        return self.opened[-1]

    @property
    def num_open(self) -> int:
        states = [channel.get_state() for channel in self.opened]
        return sum(state is not grpc.ChannelConnectivity.SHUTDOWN for state in states)


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    peer = Peer()
    await peer.start()
    yield peer
    await peer.stop()


@pytest.fixture
async def make_links() -> AsyncIterator[MakeLinks]:
    made: list[Links] = []

    def make(*connectors: FakeConnector, slow_bytes_per_s: float = 0.0) -> Links:
        me = DescribeRequest(protocol=PROTOCOL, incarnation=2, format=FORMAT)
        channel: Callable[[str], grpc.aio.Channel] = Plane().channel
        made.append(Links(me, connectors, channel, slow_bytes_per_s))
        return made[-1]

    yield make
    for links in made:
        await links.close()


async def test_many_who_need_a_link_at_once_make_one(peer: Peer, make_links: MakeLinks) -> None:
    connector = FakeConnector("fast")
    links = make_links(connector)
    first, *others = await asyncio.gather(*(links.get(peer.address) for _ in range(5)))
    assert all(link is first for link in others)
    assert peer.describer.calls == 1
    assert (first.connector, first.incarnation) == ("fast", 1)
    assert [len(r._pairs) for r in connector.pools[0].reads] == [1, 1, (16 << 20) // 4096]
    assert links.live() == [first]


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
    peer: Peer, make_links: MakeLinks
) -> None:
    fast = FakeConnector("fast", TransferError("broken"))
    plain = FakeConnector("plain", TransferError("cut", retryable=False))
    links = make_links(fast, plain)
    with pytest.raises(Unreachable, match="fast: broken; plain: cut"):
        await links.get(peer.address)
    with pytest.raises(TransferError, match="tried just now: fast: broken"):
        await links.get(peer.address)
    fast.outcome = None
    async with asyncio.timeout(30):
        while not links.live():
            try:
                await links.get(peer.address)
            except TransferError:
                await asyncio.sleep(0.01)
    assert links.live()[0].connector == "fast"


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


async def test_addresses_without_a_peer_are_forgotten_but_for_the_last(peer: Peer) -> None:
    channels = Channels()
    me = DescribeRequest(protocol=PROTOCOL, incarnation=2, format=FORMAT)
    links = Links(me, [FakeConnector("fast")], channels.open)
    link = await links.get(peer.address)
    nobody = [f"127.1.{i // 256}.{i % 256}:9" for i in range(MAX_IDLE_PEERS + 20)]
    for address in nobody:
        with pytest.raises(Unreachable):
            await links.get(address)
    assert len(links._peers) <= MAX_IDLE_PEERS + 1
    assert links.is_avoided(nobody[-1])
    assert links.known(peer.address) is link
    assert len(channels.opened) == 1 + len(nobody)
    assert channels.num_open == 1
    await links.close()
    assert channels.num_open == 0


async def test_a_link_that_is_lost_closes_its_channel_after_its_last_hand_off(peer: Peer) -> None:
    channels = Channels()
    me = DescribeRequest(protocol=PROTOCOL, incarnation=2, format=FORMAT)
    links = Links(me, [FakeConnector("fast")], channels.open)
    link = await links.get(peer.address)
    call = link.open_handoff()
    link.lose("a test")
    await asyncio.sleep(0)
    assert channels.num_open == 1, "its reader would be cancelled with it"
    with pytest.raises(TransferError, match="is lost: a test"):
        link.open_handoff()
    call.cancel()
    async with asyncio.timeout(30):
        while channels.num_open:
            await asyncio.sleep(0)
    assert await links.get(peer.address) is not link
    await links.close()


@pytest.mark.parametrize(
    ("took_s", "expected"),
    [
        (0.0, [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]),  # nobody listens: that costs nothing
        (2.0, [4.0, 4.0]),  # a stopped process
        (60.0, [5.0, 5.0]),
    ],
)
def test_pauses_grow_with_what_a_try_costs(took_s: float, expected: list[float]) -> None:
    pauses = [0.0]
    for _ in expected:
        pauses.append(next_back_off(pauses[-1], took_s))
    assert pauses[1:] == expected


async def test_a_peer_that_comes_back_is_found_at_once_by_who_asks_after_the_pause(
    peer: Peer, make_links: MakeLinks
) -> None:
    """gRPC's own pauses, which grow to seconds, do not come on top of ours."""
    links = make_links(FakeConnector("fast"))
    await peer.stop()
    for _ in range(4):
        while links.is_avoided(peer.address):
            await asyncio.sleep(0.01)
        with pytest.raises(Unreachable):
            await links.get(peer.address)
    await peer.start()
    while links.is_avoided(peer.address):
        await asyncio.sleep(0.01)
    assert (await links.get(peer.address)).lost is None


async def test_another_incarnation_at_the_address_is_another_link(
    peer: Peer, make_links: MakeLinks
) -> None:
    links = make_links(FakeConnector("fast"))
    first = await links.get(peer.address, 1)
    peer.describer.description.incarnation = 7
    first.lose("its process died")
    assert first.pool.disconnected  # type: ignore[attr-defined]
    with pytest.raises(TransferError, match="another incarnation"):
        await links.get(peer.address, 1)
    second = await links.get(peer.address, 7)
    assert (second.incarnation, await links.get(peer.address)) == (7, second)
    with pytest.raises(TransferError, match="another incarnation"):
        await links.get(peer.address, 1)
    assert second.lost is None


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


async def begun(connector: FakeConnector) -> None:
    async with asyncio.timeout(30):
        while not (connector.pools and connector.pools[0].reads):
            await asyncio.sleep(0)


async def test_links_that_are_closed_while_one_is_made_leave_nothing(
    peer: Peer, make_links: MakeLinks
) -> None:
    slow = FakeConnector("fast", by_hand=True)
    links = make_links(slow)
    asking = asyncio.ensure_future(links.get(peer.address))
    await begun(slow)
    await links.close()
    assert slow.pools[0].disconnected
    assert links.live() == []
    await asyncio.wait({asking})
    assert asking.cancelled()


async def test_a_link_is_made_though_nobody_waits_for_it_any_more(
    peer: Peer, make_links: MakeLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or else those with less patience than a probe has would never get one. Who can do without
    does, while it takes long."""
    monkeypatch.setattr(links_module, "LONG_MAKING_S", 0.0)
    slow, plain = FakeConnector("fast", by_hand=True), FakeConnector("plain")
    links = make_links(slow, plain)
    asking = asyncio.ensure_future(links.get(peer.address))
    await begun(slow)
    assert links.is_avoided(peer.address)
    asking.cancel()
    await asyncio.wait({asking})
    slow.pools[0].reads[0].fail()
    link = await links.get(peer.address)
    assert (link.connector, links.known(peer.address)) == ("plain", link)
    assert len(slow.pools) == 1, "it was made once"
    assert not links.is_avoided(peer.address)


async def test_a_link_that_fails_when_nobody_waits_for_it_is_no_error(
    peer: Peer, make_links: MakeLinks, caplog: pytest.LogCaptureFixture
) -> None:
    slow = FakeConnector("fast", by_hand=True)
    links = make_links(slow)
    asking = asyncio.ensure_future(links.get(peer.address))
    await begun(slow)
    asking.cancel()
    await asyncio.wait({asking})
    slow.pools[0].reads[0].fail()
    async with asyncio.timeout(30):
        while not links.is_avoided(peer.address):
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    gc.collect()  # asyncio complains of a task whose end nobody saw when that is gone
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def test_whoever_asks_while_links_are_closed_leaves_none_open(
    peer: Peer, make_links: MakeLinks
) -> None:
    plain, slow = FakeConnector("plain"), FakeConnector("fast", by_hand=True)
    links = make_links(slow, plain)
    asking = asyncio.ensure_future(links.get(peer.address))
    await begun(slow)
    closing = asyncio.ensure_future(links.close())
    await asyncio.sleep(0)
    late = asyncio.ensure_future(links.get("127.0.0.1:1"))
    await asyncio.wait_for(closing, 30)
    with pytest.raises(TransferError, match="links are closed"):
        await late
    await asyncio.wait({asking})
