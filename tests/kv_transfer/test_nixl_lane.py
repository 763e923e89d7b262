"""A lane's thread over an agent whose READs end as the test says."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from kv_transfer import nixl_lane, probe
from kv_transfer.block_pairs import Blocks
from kv_transfer.connector import PoolRegion, Read
from kv_transfer.errors import LinkLost, OneSidedRefused, TransferError
from kv_transfer.faults import POSTED, Faults
from kv_transfer.nixl import ReadRefused, RemoteName, Transfer
from kv_transfer.nixl_connector import NixlConfig, NixlConnector, NixlPeer
from kv_transfer.pool_description import PoolDescription
from tests.kv_transfer.pools import GROUPS, Pool
from tests.waiting import until

HOST = bytes(16)
HUNG, GOOD = b"hung", b"good"


class FakeAgent:
    """READs of the peer named "hung" stay under way; those of others end at once. Blocks are of
    the peer as it was added: those of one that was removed are of no use."""

    def __init__(self, regions: Sequence[PoolRegion]) -> None:
        self.posted: list[RemoteName] = []
        self.num_bytes: list[int] = []  # of each post
        self.blob_bytes = [region.blob_bytes for region in regions]
        self.added: list[RemoteName] = []
        self.removed: list[RemoteName] = []
        self.prepared: set[FakeBlocks] = set()
        self.failed: set[RemoteName] = set()  # until they are removed
        self.lost: set[RemoteName] = set()  # whose READs under way have failed
        self.broken = False

    def metadata(self) -> bytes:
        return b"ours"

    def add_peer(self, metadata: bytes) -> RemoteName:
        self.added.append(RemoteName(metadata.decode()))
        return self.added[-1]

    def remove_peer(self, name: RemoteName) -> None:
        self.removed.append(name)
        self.failed.discard(name)
        self.prepared = {blocks for blocks in self.prepared if blocks.name != name}

    def peer_blocks(self, name: RemoteName, region: PoolRegion) -> "FakeBlocks":
        blocks = FakeBlocks(name)
        self.prepared.add(blocks)
        return blocks

    def post(
        self, group: int, local: Blocks, peer_blocks: "FakeBlocks", remote: Blocks
    ) -> Transfer | None:
        if peer_blocks not in self.prepared:
            raise TransferError("NIXL_ERR_NOT_FOUND")
        if peer_blocks.name in self.failed:
            raise ReadRefused("NIXL_ERR_REMOTE_DISCONNECT")
        self.posted.append(peer_blocks.name)
        self.num_bytes.append(len(local) * self.blob_bytes[group])
        return Transfer(peer_blocks.name) if peer_blocks.name == HUNG.decode() else None

    def poll(self, transfer: Transfer) -> bool:
        if transfer.handle in self.lost:
            raise LinkLost("the READ failed")
        return False

    def progress(self) -> None:
        if self.broken:
            raise ZeroDivisionError("a library's mistake")

    def release_blocks(self, peer_blocks: "FakeBlocks") -> None:
        self.prepared.discard(peer_blocks)

    def close(self) -> None:
        pass


class FakeBlocks:
    def __init__(self, name: RemoteName) -> None:
        self.name = name


@pytest.fixture
async def connector(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[NixlConnector]:
    monkeypatch.setattr(nixl_lane, "Agent", FakeAgent)
    monkeypatch.setattr(nixl_lane, "_CLOSE_S", 0.0)
    monkeypatch.setattr(nixl_lane, "_abandoned", [])
    pool = Pool(getattr(request, "param", GROUPS))
    connector = await NixlConnector.open(pool.regions, 1, b"", NixlConfig(lanes=1))
    yield connector
    await connector.close()


@pytest.fixture
async def with_lanes(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NixlConnector]:
    monkeypatch.setattr(nixl_lane, "Agent", FakeAgent)
    connector = await NixlConnector.open(Pool(GROUPS).regions, 1, b"", NixlConfig(lanes=3))
    yield connector
    await connector.close()


async def linked(connector: NixlConnector, agent: bytes) -> NixlPeer:
    description = PoolDescription("nixl", 2, connector.regions, HOST + agent)
    return await connector.connect(2, description.encode(b""))


async def reading(connector: NixlConnector, agent: bytes) -> Callable[[int], Read]:
    """Reads that many blocks of the peer with that agent."""
    peer = await linked(connector, agent)
    return lambda count: peer.read(0, list(range(count)), list(range(count)))


def agents(connector: NixlConnector) -> list[FakeAgent]:
    found = [lane._agent for lane in connector._lanes]
    assert all(isinstance(agent, FakeAgent) for agent in found)
    return found  # type: ignore[return-value]


def agent(connector: NixlConnector) -> FakeAgent:
    (found,) = agents(connector)
    return found


def posted(connector: NixlConnector) -> list[RemoteName]:
    return agent(connector).posted


@pytest.mark.parametrize("connector", [((16, 4 << 20),)], indirect=True)
async def test_a_post_is_of_32_mib_at_most(connector: NixlConnector) -> None:
    good = await reading(connector, GOOD)
    await asyncio.wait_for(good(16).ended, 30)
    assert agent(connector).num_bytes == [32 << 20, 32 << 20]


async def test_every_lane_has_its_connection_when_a_first_read_has_ended(
    with_lanes: NixlConnector,
) -> None:
    """The holder helps with a connection, and may be stopped when a lane has its first share."""
    good = await reading(with_lanes, GOOD)
    await asyncio.wait_for(good(1).ended, 30)
    assert all(agent.posted for agent in agents(with_lanes))
    await asyncio.wait_for(good(1).ended, 30)
    assert sum(len(agent.posted) for agent in agents(with_lanes)) == 3 + 1 + 1


async def test_a_peer_whose_reads_never_end_holds_up_nobody_else(connector: NixlConnector) -> None:
    hung, good = await reading(connector, HUNG), await reading(connector, GOOD)
    reads = [hung(1) for _ in range(2 * nixl_lane._MAX_OPEN)]
    await until(lambda: len(posted(connector)) == nixl_lane._MAX_OPEN)
    for _ in range(3):
        await asyncio.wait_for(good(2).ended, 30)
    assert posted(connector).count(RemoteName("hung")) == nixl_lane._MAX_OPEN
    assert not any(read.ended.done() for read in reads)


async def test_a_read_that_holds_up_its_thread_leaves_others_one_however_few_cores_there_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(nixl_lane, "Agent", FakeAgent)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    file = tmp_path / "faults"
    file.write_text("")
    faults = Faults(f"@{file}")
    connector = await NixlConnector.open(Pool(GROUPS).regions, 1, faults=faults)
    good = await reading(connector, GOOD)
    await asyncio.wait_for(good(1).ended, 30)
    file.write_text(f"{POSTED}=hold")
    held = good(1)
    await until(lambda: f"held at {POSTED}" in caplog.messages)
    for _ in range(3):
        await asyncio.wait_for(good(1).ended, 30)
    assert not held.ended.done()
    file.write_text("")
    await asyncio.wait_for(held.ended, 30)
    await connector.close()


async def test_reads_that_were_given_up_hold_up_nobody_of_their_own_peer(
    connector: NixlConnector,
) -> None:
    hung = await reading(connector, HUNG)
    first = [hung(1) for _ in range(nixl_lane._MAX_OPEN)]
    await until(lambda: len(posted(connector)) == nixl_lane._MAX_OPEN)
    hung(1)
    for read in first:
        read.give_up()
    await until(lambda: len(posted(connector)) == nixl_lane._MAX_OPEN + 1)
    assert not any(read.ended.done() for read in first), "their blocks may still be written to"


async def test_a_lost_link_leaves_its_connection_to_the_next(with_lanes: NixlConnector) -> None:
    for _ in range(3):
        peer = await linked(with_lanes, GOOD)
        await asyncio.wait_for(peer.read(0, [1], [1]).ended, 30)
        peer.disconnect()
    assert [(a.added, a.removed) for a in agents(with_lanes)] == [(["good"], [])] * 3
    await until(lambda: not any(a.prepared for a in agents(with_lanes)))  # which take memory


async def test_a_connection_of_which_a_read_has_failed_is_made_anew_in_all_lanes(
    with_lanes: NixlConnector,
) -> None:
    peer = await linked(with_lanes, GOOD)
    await asyncio.wait_for(peer.read(0, [1], [1]).ended, 30)
    for one in agents(with_lanes):
        one.failed.add(RemoteName("good"))
    with pytest.raises(LinkLost):
        await asyncio.wait_for(peer.read(0, [1], [1]).ended, 30)
    peer.disconnect()
    again = await linked(with_lanes, GOOD)
    await asyncio.wait_for(again.read(0, [1], [1]).ended, 30)
    assert [(a.added, a.removed) for a in agents(with_lanes)] == [(["good"] * 2, ["good"])] * 3


@pytest.mark.parametrize("number", range(3))
async def test_a_connection_that_failed_while_nobody_read_is_made_anew_in_all_lanes(
    with_lanes: NixlConnector, number: int
) -> None:
    peer = await linked(with_lanes, GOOD)
    await asyncio.wait_for(peer.read(0, [1], [1]).ended, 30)
    peer.disconnect()
    agents(with_lanes)[number].failed.add(RemoteName("good"))
    again = await linked(with_lanes, GOOD)
    await asyncio.wait_for(again.read(0, [1], [1]).ended, 30)
    assert [(a.added, a.removed) for a in agents(with_lanes)] == [(["good"] * 2, ["good"])] * 3
    again.disconnect()
    await until(lambda: not any(lane._peers for lane in with_lanes._lanes))


async def test_a_process_that_refuses_a_connections_first_read_is_asked_once(
    with_lanes: NixlConnector,
) -> None:
    for one in agents(with_lanes):
        one.failed.add(RemoteName("good"))
    peer = await linked(with_lanes, GOOD)
    with pytest.raises(OneSidedRefused):
        await asyncio.wait_for(peer.read(0, [1], [1]).ended, 30)
    peer.disconnect()
    for _ in range(3):
        with pytest.raises(OneSidedRefused):
            await linked(with_lanes, GOOD)
    assert [(a.added, a.removed) for a in agents(with_lanes)] == [(["good"], [])] * 3


async def test_a_connection_that_hung_and_then_failed_is_made_anew(
    connector: NixlConnector,
) -> None:
    hung = await linked(connector, HUNG)
    read = hung.read(0, [1], [1])
    await until(lambda: len(posted(connector)) == 1)
    hung.disconnect()
    agent(connector).failed.add(RemoteName("hung"))
    agent(connector).lost.add(RemoteName("hung"))
    with pytest.raises(LinkLost):
        await asyncio.wait_for(read.ended, 30)
    again = await linked(connector, HUNG)
    agent(connector).failed.add(RemoteName("hung"))
    with pytest.raises(OneSidedRefused):
        await asyncio.wait_for(again.read(0, [1], [1]).ended, 30)
    again.disconnect()
    with pytest.raises(OneSidedRefused):  # now that its first READ was refused
        await linked(connector, HUNG)
    assert agent(connector).added == ["hung"] * 2


async def test_a_connection_is_kept_while_any_link_has_it(
    connector: NixlConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_lane, "_MAX_KEPT", 0)
    first, second = [await linked(connector, GOOD) for _ in range(2)]
    first.disconnect()
    await asyncio.wait_for(second.read(0, [1], [1]).ended, 30)
    assert not agent(connector).removed
    second.disconnect()
    await until(lambda: agent(connector).removed == ["good"])


async def test_connections_without_a_link_are_kept_for_so_many_processes(
    connector: NixlConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_lane, "_MAX_KEPT", 2)
    for name in (b"a", b"b", b"a", b"c", b"d"):
        (await linked(connector, name)).disconnect()
    (await linked(connector, b"d")).disconnect()
    assert agent(connector).removed == ["b", "a"]


async def test_a_connection_is_made_anew_but_not_under_a_read_that_may_still_write(
    connector: NixlConnector,
) -> None:
    """Of any link: the one that fails is no reason to."""
    hung = await linked(connector, HUNG)
    hung.read(0, [1], [1])
    await until(lambda: len(posted(connector)) == 1)
    agent(connector).failed.add(RemoteName("hung"))
    for _ in range(2):
        again = await linked(connector, HUNG)
        with pytest.raises(TransferError):
            await asyncio.wait_for(again.read(0, [1], [1]).ended, 30)
    assert not agent(connector).removed


async def test_there_is_no_link_over_a_connection_that_hangs(
    connector: NixlConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "FIRST_READ_TIMEOUT_S", 0.05)
    hung = await linked(connector, HUNG)
    hung.read(0, [1], [1])
    await until(lambda: len(posted(connector)) == 1)
    with pytest.raises(TransferError, match="did not end"):
        await linked(connector, HUNG)
    assert len(posted(connector)) == 2
    assert not agent(connector).removed


async def test_links_to_one_process_live_side_by_side(connector: NixlConnector) -> None:
    first = await reading(connector, GOOD)
    await first(1).ended
    second = await reading(connector, GOOD)
    for read in (first, second, first):
        await asyncio.wait_for(read(2).ended, 30)
    assert not agent(connector).removed
    agent(connector).failed.add(RemoteName("good"))
    third = await reading(connector, GOOD)
    for read in (first, second, third):
        await asyncio.wait_for(read(2).ended, 30)
    assert agent(connector).removed == ["good"]


async def test_a_peer_that_was_read_from_and_is_not_any_more_is_lost(
    connector: NixlConnector,
) -> None:
    first = await reading(connector, GOOD)
    await first(1).ended
    agent(connector).prepared.clear()
    with pytest.raises(LinkLost, match="the peer is gone"):
        await asyncio.wait_for(first(1).ended, 30)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_thread_that_fails_is_the_connectors_problem(connector: NixlConnector) -> None:
    assert connector.problem() is None
    agent(connector).broken = True
    await until(lambda: connector.problem() is not None)
    with pytest.raises(TransferError, match="thread has failed"):
        await asyncio.wait_for(reading(connector, GOOD), 5)
