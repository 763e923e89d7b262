"""Makes a link: a channel of its own, a handshake, and the first READ of a connector."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

import grpc

from kv_transfer.compatible import check_holder
from kv_transfer.connector import Connector, PeerPool
from kv_transfer.errors import IncompatiblePeer, OneSidedRefused, TransferError, Unreachable
from kv_transfer.link import Link, LoadCall, report_load
from kv_transfer.probe import LinkFigures, NotEnded, probe
from protos.limits import shortened
from protos.worker_pb2 import DescribeRequest, WorkerDescription
from protos.worker_pb2_grpc import WorkerStub

T = TypeVar("T")

logger = logging.getLogger(__name__)

DESCRIBE_TIMEOUT_S = 2.0  # a peer that is stopped takes the connection and says nothing
FIRST_RETRY_S, LONGEST_RETRY_S = 30.0, 600.0  # of a connector that failed beside one that did not


class _Choice(NamedTuple):
    connector: str
    pool: PeerPool
    figures: LinkFigures


_Failures = dict[str, TransferError]  # by connector


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
            description = await self._describe(address, channel)
            check_holder(self._me.format, description)
            reports = report_load(channel)
            failures: _Failures = {}
            choosing = self._choose(address, channel, description, self._connectors, failures)
            choice = await _while_it_lives(choosing, reports)
            if choice is None:
                raise self._none(address, description, failures)
        except BaseException:  # a link that is given up while it is made leaves nothing behind
            await channel.close()
            raise
        link = Link(address, channel, description, *choice)
        link.watch(reports)
        self._report(link)
        if _worth_retrying(failures):
            link.improve(self._improve(link, channel, failures))
        return link

    async def incarnation(self, address: str) -> int:
        """Of whoever is there now."""
        async with self._open_channel(address) as channel:
            return (await self._describe(address, channel)).incarnation

    async def _describe(self, address: str, channel: grpc.aio.Channel) -> WorkerDescription:
        try:
            said = await WorkerStub(channel).Describe(self._me, timeout=DESCRIBE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            reason = f"{address}: {error.details()}"
            match error.code():
                case grpc.StatusCode.FAILED_PRECONDITION:  # `ours` is its own there
                    words = f"{address} says: {error.details()}"
                    raise IncompatiblePeer("peer", words) from None
                case grpc.StatusCode.UNAUTHENTICATED:
                    raise TransferError(reason, retryable=False) from None
            raise Unreachable(reason) from None
        if not isinstance(said, WorkerDescription):  # but None: gRPC could not read it
            raise TransferError(f"{address}: what it says of itself is unreadable", retryable=False)
        return said

    async def _choose(
        self,
        address: str,
        channel: grpc.aio.Channel,
        description: WorkerDescription,
        connectors: Sequence[Connector],
        failures: _Failures,
    ) -> _Choice | None:
        """The first connector that can; `failures` gets those of the others, also if none can
        because the peer is gone. One that fails while the peer still answers, as behind a
        firewall, leads to the next like one that is refused."""
        offers = {offer.name: offer for offer in description.connectors}
        for connector in connectors:
            offer = offers.get(connector.name)
            if offer is None:
                continue
            try:
                pool, figures = await self._try(connector, description.incarnation, offer.metadata)
            except OneSidedRefused as refusal:
                logger.info("%s: no %s: %s", address, connector.name, refusal)
                failures[connector.name] = refusal
            except TransferError as error:
                logger.warning("%s: %s failed: %s", address, connector.name, error)
                failures[connector.name] = error
                if (await self._describe(address, channel)).incarnation != description.incarnation:
                    raise
            else:
                return _Choice(connector.name, pool, figures)
        return None

    async def _improve(self, link: Link, channel: grpc.aio.Channel, failures: _Failures) -> None:
        """What failed may have done so in passing, and the link lives as long as its peer.

        A READ that has not ended is waited for: there is never more than one to look after.
        """
        pause_s = FIRST_RETRY_S
        while names := _worth_retrying(failures):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_RETRY_S)
            unended = {e.ended for e in failures.values() if isinstance(e, NotEnded)}
            if unended:
                await asyncio.wait(unended)
            better = [connector for connector in self._connectors if connector.name in names]
            news: _Failures = {}
            try:
                description = await self._describe(link.address, channel)
                if description.incarnation != link.incarnation:
                    return  # as the link's reports will find out
                choice = await self._choose(link.address, channel, description, better, news)
            except TransferError as error:  # the link ends soon, or the peer will be heard again
                logger.info("%s: no other way than %s: %s", link.address, link.connector, error)
                failures |= news
                continue
            failures = news
            if choice is not None:
                link.read_by(*choice)
                self._report(link)

    async def _try(
        self, connector: Connector, incarnation: int, metadata: bytes
    ) -> tuple[PeerPool, LinkFigures]:
        pool = await connector.connect(incarnation, metadata)
        try:
            return pool, await probe(pool, self._blob_bytes())
        except BaseException:
            pool.disconnect()
            raise

    def _none(
        self, address: str, description: WorkerDescription, failures: _Failures
    ) -> TransferError:
        broken = {n: e for n, e in failures.items() if not isinstance(e, OneSidedRefused)}
        if len(broken) == 1:
            return next(iter(broken.values()))
        if broken:
            reasons = "; ".join(f"{name}: {error}" for name, error in broken.items())
            return TransferError(reasons, retryable=any(e.retryable for e in broken.values()))
        offered = shortened(str(sorted(offer.name for offer in description.connectors)))
        ours = [connector.name for connector in self._connectors]
        return IncompatiblePeer(
            "connectors", f"{address} offers {offered}, tried {[*failures]}, this worker has {ours}"
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


def _worth_retrying(failures: _Failures) -> set[str]:
    """A peer that cannot be read in one way never can."""
    return {
        name
        for name, error in failures.items()
        if error.retryable and not isinstance(error, OneSidedRefused)
    }


async def _while_it_lives(making: Coroutine[Any, Any, T], reports: LoadCall) -> T:
    """Unreachable as soon as the peer's reports break off: a READ from one that is stopped does
    not end."""
    ended = asyncio.Event()
    reports.add_done_callback(lambda _: ended.set())
    task, gone = asyncio.ensure_future(making), asyncio.ensure_future(ended.wait())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Unreachable(f"its load reports broke off: {await reports.details()}")
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
