"""Makes a link: a channel of its own, a handshake, and the first READ of a connector."""

import logging
from collections.abc import Callable, Sequence

import grpc

from kv_transfer.compatible import check_holder
from kv_transfer.connector import Connector
from kv_transfer.errors import IncompatiblePeer, OneSidedRefused, TransferError, Unreachable
from kv_transfer.link import Link
from kv_transfer.probe import probe
from protos.worker_pb2 import DescribeRequest, WorkerDescription
from protos.worker_pb2_grpc import WorkerStub

logger = logging.getLogger(__name__)

DESCRIBE_TIMEOUT_S = 2.0  # a peer that is stopped takes the connection and says nothing


class LinkMaker:
    """Holds nothing open but what it is making."""

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

    async def make(self, address: str) -> Link:
        """Over a fresh channel: one that has failed waits before it connects again."""
        channel = self._open_channel(address)
        try:
            link = await self._connect(address, channel)
        except BaseException:  # a link that is given up while it is made leaves nothing behind
            await channel.close()
            raise
        self._report(link)
        return link

    async def incarnation(self, address: str) -> int:
        """Of whoever is there now."""
        async with self._open_channel(address) as channel:
            return (await self._describe(address, channel)).incarnation

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
            raise Unreachable(reason) from None

    async def _connect(self, address: str, channel: grpc.aio.Channel) -> Link:
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
            except BaseException:
                pool.disconnect()
                raise
            return Link(address, channel, description, connector.name, pool, figures)
        raise IncompatiblePeer(
            "connectors",
            f"{address} offers {sorted(offers)}, tried {tried},"
            f" this worker has {[c.name for c in self._connectors]}",
        )

    def _blob_bytes(self) -> int:
        return self._me.format.groups[0].blob_bytes

    def _report(self, link: Link) -> None:
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
