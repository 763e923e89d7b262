"""What every connector does, with both pools in this process."""

import asyncio
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_cache.events import new_incarnation
from kv_transfer import nixl
from kv_transfer.connector import Connector, PeerPool, PoolRegion
from kv_transfer.errors import IncompatiblePeer, LinkLost, OneSidedRefused, TransferError
from kv_transfer.nixl_connector import NixlConfig, NixlConnector
from kv_transfer.nixl_lane import Lane
from kv_transfer.pool_description import PoolDescription
from kv_transfer.registry import NAMES, ConnectorConfig, open_connector
from tests.kv_transfer.pools import GROUPS, Pool
from tests.waiting import until

CONFIG = ConnectorConfig(secret=b"cluster")


@dataclass
class Side:
    pool: Pool
    connector: Connector
    incarnation: int


@dataclass
class Pair:
    reader: Side
    holder: Side


async def open_side(name: str, seed: int | None) -> Side:
    pool = Pool(seed=seed)
    incarnation = new_incarnation()
    connector = await open_connector(name, pool.regions, incarnation, CONFIG)
    return Side(pool, connector, incarnation)


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Connectors are bound to no event loop, so they are opened once for all tests."""
    made = Pair(
        asyncio.run(open_side(request.param, None)), asyncio.run(open_side(request.param, 1))
    )
    made.holder.connector.expect_peer()
    yield made
    asyncio.run(made.reader.connector.close())
    asyncio.run(made.holder.connector.close())


async def ended(future: asyncio.Future[None]) -> None:
    await asyncio.wait_for(asyncio.shield(future), 30)


async def test_blobs_arrive_where_they_were_asked(pair: Pair) -> None:
    rng = np.random.default_rng(5)
    ours, theirs = pair.reader.pool, pair.holder.pool
    peer = await pair.reader.connector.connect(
        pair.holder.incarnation, pair.holder.connector.metadata()
    )
    for blobs in ours.blobs:
        blobs[:] = 0
    want = [blobs.copy() for blobs in ours.blobs]
    reads = []
    for group, (num_blocks, blob_bytes) in enumerate(GROUPS):
        local = rng.permutation(num_blocks)  # every read has places of its own
        for part in np.array_split(local[: num_blocks - 3], 5):
            remote = rng.integers(0, num_blocks, len(part))
            want[group][part] = theirs.blobs[group][remote]
            read = peer.read(group, remote.tolist(), part.tolist())
            assert read.num_bytes == len(part) * blob_bytes
            reads.append(read)
    for read in reads:
        await ended(read.ended)
    for blobs, expected in zip(ours.blobs, want, strict=True):
        assert np.array_equal(blobs, expected)
    peer.disconnect()


async def test_an_empty_read_has_ended(pair: Pair) -> None:
    peer = await pair.reader.connector.connect(
        pair.holder.incarnation, pair.holder.connector.metadata()
    )
    await ended(peer.read(1, [], []).ended)
    peer.disconnect()
    peer.disconnect()


@pytest.mark.parametrize(
    ("group", "remote", "local"),
    [
        (0, [48], [0]),
        (0, [0], [48]),
        (0, [-1], [0]),
        (0, [0], [-1]),
        (1, [20], [0]),
        (0, [2**31], [0]),
        (0, [2**80], [0]),
        (2, [0], [0]),
        (-1, [0], [0]),
        (0, [0, 1], [0]),
    ],
)
async def test_blocks_that_are_not_there_fail_their_read_only(
    pair: Pair, group: int, remote: list[int], local: list[int]
) -> None:
    peer = await pair.reader.connector.connect(
        pair.holder.incarnation, pair.holder.connector.metadata()
    )
    good, bad = peer.read(0, [3], [4]), peer.read(group, remote, local)
    with pytest.raises(TransferError):
        await ended(bad.ended)
    await ended(good.ended)
    assert np.array_equal(pair.reader.pool.blobs[0][4], pair.holder.pool.blobs[0][3])
    peer.disconnect()


async def test_a_read_that_was_given_up_ends_and_writes_no_more(pair: Pair) -> None:
    peer = await pair.reader.connector.connect(
        pair.holder.incarnation, pair.holder.connector.metadata()
    )
    blocks = list(range(20))
    ours = pair.reader.pool.blobs[1]
    for _ in range(10):
        read = peer.read(1, blocks, blocks)
        read.give_up()
        read.give_up()
        await asyncio.wait([read.ended], timeout=30)
        if read.ended.exception() is None:  # it was over before it was given up
            assert np.array_equal(ours, pair.holder.pool.blobs[1])
        ours[:] = 77
        await ended(peer.read(0, [0], [0]).ended)
        assert (ours == 77).all()
    peer.disconnect()


async def test_reads_go_on_after_a_disconnect_and_none_begin(pair: Pair) -> None:
    peer = await pair.reader.connector.connect(
        pair.holder.incarnation, pair.holder.connector.metadata()
    )
    blocks = list(range(20))
    begun = peer.read(1, blocks, blocks)
    peer.disconnect()
    late = peer.read(1, blocks, blocks)
    await ended(begun.ended)
    with pytest.raises(LinkLost, match="disconnected"):
        await ended(late.ended)
    again = await pair.reader.connector.connect(
        pair.holder.incarnation, pair.holder.connector.metadata()
    )
    await ended(again.read(1, blocks, blocks).ended)
    again.disconnect()


async def test_links_to_one_holder_live_side_by_side(pair: Pair) -> None:
    """As of a worker that is known by two addresses, or of one whose link is made anew while the
    old one's reads go on."""

    async def connect() -> PeerPool:
        metadata = pair.holder.connector.metadata()
        return await pair.reader.connector.connect(pair.holder.incarnation, metadata)

    blocks = list(range(20))
    ours, theirs = pair.reader.pool.blobs[1], pair.holder.pool.blobs[1]
    first = await connect()
    await ended(first.read(1, blocks, blocks).ended)
    under_way = first.read(1, blocks, blocks)
    second = await connect()
    await ended(under_way.ended)
    for peer in (second, first, second):
        ours[:] = 0
        await ended(peer.read(1, blocks, blocks).ended)
        assert np.array_equal(ours, theirs)
    first.disconnect()
    await ended(second.read(1, blocks, blocks).ended)
    second.disconnect()


async def test_a_connect_that_is_cancelled_leaves_the_connector_well(pair: Pair) -> None:
    holder = pair.holder
    for turns in range(4):
        connecting = asyncio.ensure_future(
            pair.reader.connector.connect(holder.incarnation, holder.connector.metadata())
        )
        for _ in range(turns):
            await asyncio.sleep(0)
        connecting.cancel()
        await asyncio.wait([connecting])
    peer = await pair.reader.connector.connect(holder.incarnation, holder.connector.metadata())
    await ended(peer.read(0, [5], [6]).ended)
    peer.disconnect()


async def test_another_incarnation_is_refused(pair: Pair) -> None:
    with pytest.raises(IncompatiblePeer) as refusal:
        await pair.reader.connector.connect(
            pair.holder.incarnation ^ 1, pair.holder.connector.metadata()
        )
    assert refusal.value.field == "incarnation"


def test_damaged_metadata_is_refused_and_does_no_harm(pair: Pair) -> None:
    good = pair.holder.connector.metadata()

    @settings(max_examples=60)
    @given(
        st.one_of(
            st.binary(max_size=400),
            st.integers(0, len(good) - 1).map(lambda n: good[:n]),
            st.tuples(st.integers(0, len(good) - 1), st.integers(1, 255)).map(
                lambda at: good[: at[0]] + bytes([good[at[0]] ^ at[1]]) + good[at[0] + 1 :]
            ),
        )
    )
    def refused(metadata: bytes) -> None:
        with pytest.raises(TransferError):
            asyncio.run(
                asyncio.wait_for(
                    pair.reader.connector.connect(pair.holder.incarnation, metadata), 30
                )
            )

    refused()

    async def still_works() -> None:
        peer = await pair.reader.connector.connect(pair.holder.incarnation, good)
        await ended(peer.read(0, [1], [2]).ended)
        peer.disconnect()

    asyncio.run(still_works())


async def test_another_connector_is_named(pair: Pair) -> None:
    name = "socket" if pair.reader.connector.name != "socket" else "inprocess"
    other = await open_connector(name, pair.reader.pool.regions, new_incarnation(), CONFIG)
    with pytest.raises(IncompatiblePeer) as refusal:
        await pair.reader.connector.connect(pair.holder.incarnation, other.metadata())
    assert refusal.value.field == "connector"
    await other.close()


@pytest.mark.parametrize(
    ("groups", "field"),
    [(((48, 4096), (20, 8192)), "blob_bytes"), (((48, 4096),), "groups")],
)
async def test_what_differs_is_named(
    pair: Pair, groups: tuple[tuple[int, int], ...], field: str
) -> None:
    pool = Pool(groups)
    incarnation = new_incarnation()
    name = pair.reader.connector.name
    differs = await open_connector(name, pool.regions, incarnation, CONFIG)
    with pytest.raises(IncompatiblePeer) as refusal:
        await pair.reader.connector.connect(incarnation, differs.metadata())
    assert refusal.value.field == field
    await differs.close()


@pytest.mark.parametrize("name", NAMES)
async def test_another_secret_is_refused(name: str) -> None:
    pool = Pool(groups=((4, 4096),))
    incarnation = new_incarnation()
    ours = await open_connector(name, pool.regions, new_incarnation(), ConnectorConfig(b"one"))
    theirs = await open_connector(name, pool.regions, incarnation, ConnectorConfig(b"other"))
    with pytest.raises(TransferError, match="secret"):
        await ours.connect(incarnation, theirs.metadata())
    await ours.close()
    await theirs.close()


@pytest.mark.parametrize("name", ["inprocess", "socket"])
async def test_memory_that_a_connector_cannot_move_is_named(name: str) -> None:
    region = PoolRegion(4096, 1, 4096, memory="cuda")
    with pytest.raises(TransferError, match="memory: 'cuda'"):
        await open_connector(name, [region], 1, CONFIG)


async def test_nixl_may_be_kept_to_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = [Pool(groups=((4, 4096),), seed=seed) for seed in (None, 1)]
    config = replace(CONFIG, nixl=NixlConfig(beyond_host=False))
    ours = await open_connector("nixl", pools[0].regions, 1, config)
    theirs = await open_connector("nixl", pools[1].regions, 2, CONFIG)
    theirs.expect_peer()
    metadata = theirs.metadata()
    peer = await ours.connect(2, metadata)
    await ended(peer.read(0, [0], [0]).ended)
    monkeypatch.setattr("kv_transfer.nixl_connector._host", lambda: bytes(16))
    with pytest.raises(OneSidedRefused, match="another host"):
        await ours.connect(2, metadata)
    await ours.close()
    await theirs.close()


async def test_an_unknown_connector_is_named() -> None:
    with pytest.raises(TransferError, match="pigeon"):
        await open_connector("pigeon", Pool().regions, 1, CONFIG)


def test_a_gpu_may_be_read_from_whatever_memory_the_reader_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_PROTO_EMULATION_ENABLE", "n")
    monkeypatch.delenv("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", raising=False)
    nixl.prepare_environment()
    assert os.environ["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] == "on"


async def test_a_nixl_holder_that_expects_nobody_is_asked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer's first READ with an agent needs the holder, whose thread may sleep for long; the next
    do not."""
    config = NixlConfig(lanes=1, idle_period_s=60.0)
    own, pool = Pool(), Pool(seed=3)
    alone = NixlConfig(lanes=1)  # another lane would have a first READ of its own
    reader = await NixlConnector.open(own.regions, new_incarnation(), CONFIG.secret, alone)
    incarnation = new_incarnation()
    pause, pauses = Lane._pause, defaultdict[float, list[float]](list)

    def note_pause(lane: Lane) -> float:
        pause_s = pause(lane)
        pauses[lane._period_s].append(pause_s)
        return pause_s

    monkeypatch.setattr(Lane, "_pause", note_pause)
    holder = await NixlConnector.open(pool.regions, incarnation, CONFIG.secret, config)
    slept, turned = pauses[config.idle_period_s], pauses[alone.idle_period_s]
    await until(lambda: slept == [60.0])
    peer = await reader.connect(incarnation, holder.metadata())
    first = peer.read(0, [3], [4])
    num_turns = len(turned)
    await until(lambda: len(turned) > num_turns + 1000)  # in which the reader asks how it goes
    assert not first.ended.done(), "then there is nothing to hurry for"
    assert slept == [60.0]
    holder.expect_peer()
    await ended(first.ended)
    await until(lambda: len(slept) > 1 and slept[-1] == 60.0)  # it sleeps again
    await ended(peer.read(0, [5], [6]).ended)
    assert np.array_equal(own.blobs[0][[4, 6]], pool.blobs[0][[3, 5]])
    await reader.close()
    await holder.close()


async def test_a_nixl_agent_whose_name_is_no_text_is_refused_and_does_no_harm() -> None:
    pools = [Pool(groups=((4, 4096),), seed=seed) for seed in (None, 1)]
    ours = await open_connector("nixl", pools[0].regions, 1, CONFIG)
    theirs = await open_connector("nixl", pools[1].regions, 2, CONFIG)
    theirs.expect_peer()
    told = PoolDescription.decode(theirs.metadata(), "nixl", CONFIG.secret)
    size = (32).to_bytes(8, "little")  # of its name, which is 32 characters
    at = told.payload.index(size) + len(size)
    payload = told.payload[:at] + b"\xff" * 32 + told.payload[at + 32 :]
    with pytest.raises(TransferError, match="its name is no text"):
        await ours.connect(2, replace(told, payload=payload).encode(CONFIG.secret))
    peer = await ours.connect(2, theirs.metadata())
    await ended(peer.read(0, [0], [0]).ended)
    await ours.close()
    await theirs.close()


@pytest.mark.parametrize("name", NAMES)
async def test_a_closed_connector_has_ended_its_reads(name: str) -> None:
    reader, holder = await open_side(name, None), await open_side(name, 2)
    holder.connector.expect_peer()
    peer = await reader.connector.connect(holder.incarnation, holder.connector.metadata())
    await ended(peer.read(0, [1], [1]).ended)
    blocks = list(range(48))
    reads = [peer.read(0, blocks, blocks) for _ in range(20)]
    await reader.connector.close()
    await asyncio.wait([read.ended for read in reads], timeout=30)
    assert all(read.ended.done() for read in reads)
    await holder.connector.close()
