"""The links that a worker has: made once, found again, renewed, forgotten, closed."""

import asyncio
import gc

import grpc
import pytest

from kv_transfer import links as links_module
from kv_transfer.errors import TransferError, Unreachable
from kv_transfer.links import MAX_IDLE_PEERS, Links, next_back_off
from protos.rpc import PROTOCOL, Plane
from protos.worker_pb2 import DescribeRequest
from tests.kv_transfer.linked_peers import FORMAT, FakeConnector, MakeLinks, Peer, begun


@pytest.fixture
def long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a first failure too: one of a tenth of a second may be over before anybody looks."""
    for name in ("FIRST_BACK_OFF_S", "USUAL_BACK_OFF_S"):
        monkeypatch.setattr(links_module, name, 60.0)


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


async def test_many_who_need_a_link_at_once_make_one(peer: Peer, make_links: MakeLinks) -> None:
    connector = FakeConnector("fast")
    links = make_links(connector)
    first, *others = await asyncio.gather(*(links.get(peer.address) for _ in range(5)))
    assert all(link is first for link in others)
    assert peer.describer.calls == 1
    assert (first.connector, first.incarnation) == ("fast", 1)
    whole = (16 << 20) // 4096
    assert [len(r._pairs) for r in connector.pools[0].reads] == [1] * 6 + [whole] * 2
    assert links.live() == [first]


@pytest.mark.usefixtures("long_pauses")
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
    with pytest.raises(Unreachable, match="is lost: a test"):
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


async def test_a_new_process_is_found_before_the_old_ones_end_is_noticed(
    peer: Peer, make_links: MakeLinks
) -> None:
    links = make_links(FakeConnector("fast"))
    first = await links.get(peer.address, 1)
    peer.describer.description.incarnation = 7
    assert (await links.get(peer.address, 7)).incarnation == 7
    assert first.lost == "it was made anew"


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


@pytest.mark.usefixtures("long_pauses")
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
