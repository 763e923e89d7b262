"""All links of one worker."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from kv_transfer.compatible import check_holder
from kv_transfer.connector import Connector
from kv_transfer.errors import IncompatiblePeer, OneSidedRefused, TransferError
from kv_transfer.link import Link
from kv_transfer.probe import probe
from protos.worker_pb2 import DescribeRequest, WorkerDescription
from protos.worker_pb2_grpc import WorkerStub

logger = logging.getLogger(__name__)

DESCRIBE_TIMEOUT_S = 5.0
FIRST_BACK_OFF_S, LONGEST_BACK_OFF_S = 0.1, 5.0


@dataclass(slots=True)
class _Peer:
    channel: grpc.aio.Channel
    lock: asyncio.Lock
    link: Link | None = None
    back_off_s: float = 0.0
    not_before: float = 0.0
    problem: str = ""


class Links:
    """The links of one worker, by address; each is made once, by whoever needs it first."""

    def __init__(
        self,
        me: DescribeRequest,
        connectors: Sequence[Connector],  # in order of preference
        open_channel: Callable[[str], grpc.aio.Channel],
        slow_bytes_per_s: float = 0.0,  # below this a link is loudly reported
    ) -> None:
        self._me = me
        self._connectors = connectors
        self._open_channel = open_channel
        self._slow = slow_bytes_per_s
        self._peers: dict[str, _Peer] = {}

    async def get(self, address: str, incarnation: int = 0) -> Link:
        """The link to whoever is there, or to that incarnation; TransferError if there is none."""
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = _Peer(self._open_channel(address), asyncio.Lock())
        async with peer.lock:
            link = peer.link
            if link is None or link.lost or await self._is_gone(peer, link, incarnation):
                link = await self._renew(address, peer)
        if incarnation not in (0, link.incarnation):
            raise TransferError(f"{address} is another incarnation than the one asked for")
        return link

    async def _is_gone(self, peer: _Peer, link: Link, wanted: int) -> bool:
        """Whether another incarnation than the link's is there now; asked only when somebody
        wants another one, and the link is not touched for one that is gone itself."""
        if wanted in (0, link.incarnation):
            return False
        description = await self._describe(link.address, peer.channel)
        return description.incarnation != link.incarnation

    def known(self, address: str) -> Link | None:
        """The live link to the address, if there is one already."""
        peer = self._peers.get(address)
        link = peer.link if peer is not None else None
        return None if link is None or link.lost else link

    def live(self) -> list[Link]:
        links = [peer.link for peer in self._peers.values()]
        return [link for link in links if link is not None and link.lost is None]

    async def close(self) -> None:
        for peer in self._peers.values():
            if peer.link is not None:
                peer.link.end()
            await peer.channel.close()

    async def _renew(self, address: str, peer: _Peer) -> Link:
        now = time.monotonic()
        if now < peer.not_before:
            raise TransferError(f"{address} was tried just now: {peer.problem}")
        try:
            link = await self._make(address, peer.channel)
        except TransferError as error:
            peer.problem = str(error)
            peer.back_off_s = min(LONGEST_BACK_OFF_S, 2 * peer.back_off_s or FIRST_BACK_OFF_S)
            peer.not_before = time.monotonic() + peer.back_off_s
            raise
        if peer.link is not None:
            peer.link.lose("it was made anew")
        peer.link, peer.back_off_s = link, 0.0
        link.watch()
        return link

    async def _make(self, address: str, channel: grpc.aio.Channel) -> Link:
        description = await self._describe(address, channel)
        check_holder(self._me.format, description)
        offers = {offer.name: offer for offer in description.connectors}
        tried = []
        for connector in self._connectors:
            offer = offers.get(connector.name)
            if offer is None:
                continue
            tried.append(connector.name)
            pool = await connector.connect(description.incarnation, offer.metadata)
            try:
                figures = await probe(pool, self._blob_bytes())
            except OneSidedRefused as refusal:
                pool.disconnect()
                logger.info("%s: no %s: %s", address, connector.name, refusal)
                continue
            except BaseException:  # a cancelled link leaves nothing behind either
                pool.disconnect()
                raise
            return self._report(Link(address, channel, description, connector.name, pool, figures))
        raise IncompatiblePeer(
            "connectors",
            f"{address} offers {sorted(offers)}, tried {tried},"
            f" this worker has {[c.name for c in self._connectors]}",
        )

    def _blob_bytes(self) -> int:
        return self._me.format.groups[0].blob_bytes

    async def _describe(self, address: str, channel: grpc.aio.Channel) -> WorkerDescription:
        try:
            return await WorkerStub(channel).Describe(self._me, timeout=DESCRIBE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            reason = f"{address}: {error.details()}"
            match error.code():
                case grpc.StatusCode.FAILED_PRECONDITION:
                    raise IncompatiblePeer("peer", reason) from None
                case grpc.StatusCode.UNAUTHENTICATED:
                    raise TransferError(reason, retryable=False) from None
            raise TransferError(reason) from None

    def _report(self, link: Link) -> Link:
        figures = link.figures
        logger.info(
            "linked to %s by %s (%s): %.2f GB/s, %.2f ms",
            link.address,
            link.connector,
            link.pool.transport,
            figures.bytes_per_s / 1e9,
            figures.latency_s * 1e3,
        )
        if figures.bytes_per_s < self._slow:
            logger.warning(
                "the link to %s is slow: %.2f GB/s by %s (%s), at least %.2f were expected",
                link.address,
                figures.bytes_per_s / 1e9,
                link.connector,
                link.pool.transport,
                self._slow / 1e9,
            )
        return link
