"""All links of one worker."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc

from kv_transfer.connector import Connector
from kv_transfer.errors import TransferError, Unreachable
from kv_transfer.link import Link
from kv_transfer.link_maker import LinkMaker
from protos.worker_pb2 import DescribeRequest

FIRST_BACK_OFF_S, USUAL_BACK_OFF_S, LONGEST_BACK_OFF_S = 0.1, 1.0, 5.0
LONG_MAKING_S = 1.0  # it takes some 10 ms
MAX_IDLE_PEERS = 256


@dataclass(slots=True)
class _Peer:
    """An address that somebody named."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_users: int = 0  # who ask for its link now
    link: Link | None = None
    making: asyncio.Task[Link] | None = None
    making_since: float = 0.0
    problem: TransferError | None = None  # of the last try
    back_off_s: float = 0.0
    not_before: float = 0.0

    @property
    def live(self) -> Link | None:
        return None if self.link is None or self.link.lost else self.link

    @property
    def is_idle(self) -> bool:
        return self.num_users == 0 and self.live is None and self.making is None


def next_back_off(previous_s: float, took_s: float) -> float:
    """Whoever is not there says so at once and is tried every second, so that it is found soon
    when it is back; a try that takes long is made less often."""
    usual_s = min(USUAL_BACK_OFF_S, 2 * previous_s or FIRST_BACK_OFF_S)
    return max(usual_s, min(LONGEST_BACK_OFF_S, 2 * took_s))


class Links:
    """The links of one worker, by address; each is made once, when it is needed first, and to the
    end though nobody waits for it any more: a connector that cannot is known after seconds.

    Addresses come from requests, so those without a live link are forgotten: some time after
    their back-off, or when there are too many.
    """

    def __init__(
        self,
        me: DescribeRequest,
        connectors: Sequence[Connector],  # in order of preference
        open_channel: Callable[[str], grpc.aio.Channel],
        slow_bytes_per_s: float = 0.0,  # below this a link is loudly reported
    ) -> None:
        self._maker = LinkMaker(me, connectors, open_channel, slow_bytes_per_s)
        self._peers: dict[str, _Peer] = {}
        self._closed = False

    async def get(self, address: str, incarnation: int = 0) -> Link:
        """The link to whoever is there, or to that incarnation; TransferError if there is none,
        Unreachable if there may be one soon."""
        with self._using(address) as peer:
            async with peer.lock:
                link = peer.live
                if link is None or await self._is_gone(link, incarnation):
                    link = await self._renew(address, peer)
        if incarnation not in (0, link.incarnation):
            raise TransferError(
                f"{address} is another incarnation than the one asked for", retryable=False
            )
        return link

    def known(self, address: str) -> Link | None:
        """The live link to the address, if there is one already."""
        peer = self._peers.get(address)
        return None if peer is None else peer.live

    def is_avoided(self, address: str) -> bool:
        """It was tried in vain just now, or has been tried for long."""
        peer, now = self._peers.get(address), time.monotonic()
        if peer is None or peer.live is not None:
            return False
        return now < peer.not_before or (
            peer.making is not None and now - peer.making_since > LONG_MAKING_S
        )

    def live(self) -> list[Link]:
        return [link for peer in self._peers.values() if (link := peer.live) is not None]

    async def close(self) -> None:
        self._closed = True
        for peer in list(self._peers.values()):  # whoever asks meanwhile adds to them
            if peer.making is not None:
                peer.making.cancel()
                await asyncio.wait({peer.making})
            if peer.link is not None:
                peer.link.end()
                await peer.link.closed()

    @contextmanager
    def _using(self, address: str) -> Iterator[_Peer]:
        peer = self._peers.get(address)
        if peer is None:
            self._forget_idle()
            peer = self._peers[address] = _Peer()
        peer.num_users += 1
        try:
            yield peer
        finally:
            peer.num_users -= 1

    def _forget_idle(self) -> None:
        """Back-offs grow from one try to the next, so they are remembered for a while."""
        idle = [(p.not_before, address) for address, p in self._peers.items() if p.is_idle]
        long_ago = time.monotonic() - LONGEST_BACK_OFF_S
        num_excess = len(idle) - MAX_IDLE_PEERS + 1
        for position, (not_before, address) in enumerate(sorted(idle)):
            if position < num_excess or not_before < long_ago:
                del self._peers[address]

    async def _is_gone(self, link: Link, wanted: int) -> bool:
        """Whether another incarnation than the link's is there now; asked only when somebody
        wants another one, and the link is not touched for one that is gone itself."""
        if wanted in (0, link.incarnation):
            return False
        return await self._maker.incarnation(link.address) != link.incarnation

    async def _renew(self, address: str, peer: _Peer) -> Link:
        if self._closed:
            raise TransferError("this worker's links are closed")
        now = time.monotonic()
        if peer.making is None:
            if peer.problem is not None and now < peer.not_before:
                raise _failed(f"{address} was tried just now: {peer.problem}", peer.problem)
            peer.making, peer.making_since = asyncio.ensure_future(self._make(address, peer)), now
            peer.making.add_done_callback(_note_end)
        return await asyncio.shield(peer.making)

    async def _make(self, address: str, peer: _Peer) -> Link:
        try:
            link = await self._maker.make(address)
        except TransferError as error:
            now = time.monotonic()
            peer.problem = error
            peer.back_off_s = next_back_off(peer.back_off_s, now - peer.making_since)
            peer.not_before = now + peer.back_off_s
            raise _failed(str(error), error) from None
        finally:
            peer.making = None
        if peer.link is not None:
            peer.link.lose("it was made anew")
        peer.link, peer.problem, peer.back_off_s = link, None, 0.0
        return link


def _note_end(making: asyncio.Task[Link]) -> None:
    """Whoever waited for it may have left. Then it fails for nobody, which is no error of ours
    that asyncio should log."""
    if not making.cancelled():
        making.exception()


def _failed(message: str, cause: TransferError) -> TransferError:
    """IncompatiblePeer and the like stay what they are."""
    if cause.retryable:
        return Unreachable(message)
    return cause if message == str(cause) else TransferError(message, retryable=False)
