"""What several files about hand-offs and links need."""

from collections.abc import AsyncIterator, Callable

import grpc
import pytest

from kv_transfer.links import Links
from protos.rpc import PROTOCOL, Plane
from protos.worker_pb2 import DescribeRequest
from tests.kv_transfer.handoff_pair import Pair
from tests.kv_transfer.linked_peers import FORMAT, FakeConnector, MakeLinks, Peer


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    await pair.start()
    yield pair
    await pair.stop()


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
