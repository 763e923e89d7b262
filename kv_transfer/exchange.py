"""A worker's cache among its peers': handed out by its holder, taken in over its links."""

import time
from collections.abc import Callable, Sequence
from weakref import WeakSet

import grpc

from kv_cache.handover import HeldRange
from kv_cache.transfers import TransferHold
from kv_transfer.checksum import CHECKSUMS_OF_CPU, checksum
from kv_transfer.config import ExchangeConfig
from kv_transfer.connector import Connector, PoolRegion
from kv_transfer.errors import ConnectorUnavailable
from kv_transfer.faults import Faults
from kv_transfer.holder import Holder, HolderConfig
from kv_transfer.link import Link
from kv_transfer.links import Links
from kv_transfer.puller import HandOff, PullerConfig
from kv_transfer.quarantine import Quarantine
from kv_transfer.source import PromptSource
from kv_transfer.tally import PullTally
from protos.events_pb2 import LinkReport, TransferLoad
from protos.handoff_pb2 import Ask
from protos.worker_pb2 import ConnectorOffer, DescribeRequest


class Exchange:
    """Made on a running event loop, closed on it; owns what it was given but the memory.

    It knows blocks and peers; what a prompt is, whoever computes or wants it knows.
    """

    def __init__(
        self,
        config: ExchangeConfig,
        block_size: int,
        me: DescribeRequest,
        regions: Sequence[PoolRegion],
        connectors: Sequence[Connector],
        open_channel: Callable[[str], grpc.aio.Channel],
        source: PromptSource,
        end_quarantine: Callable[[TransferHold], None],
        faults: Faults,
    ) -> None:
        if config.checksums and any(region.memory != "cpu" for region in regions):
            raise ConnectorUnavailable(CHECKSUMS_OF_CPU)
        self._puller = PullerConfig(block_size, config.stuck_after_s)
        self._regions = regions
        self._connectors = connectors
        self._faults = faults
        num_blocks = sum(region.num_blocks for region in regions)
        self.quarantine = Quarantine(int(num_blocks * config.max_quarantined_share), end_quarantine)
        self._hand_offs: WeakSet[HandOff] = WeakSet()
        self.pulls = {connector.name: PullTally() for connector in connectors}
        self.links = Links(me, connectors, open_channel, config.slow_bytes_per_s)
        self.holder = Holder(
            HolderConfig(me.incarnation, config.max_leases),
            source,
            self._checksum if config.checksums else None,
            faults,
        )

    def offers(self) -> list[ConnectorOffer]:
        memory = self._regions[0].memory
        return [
            ConnectorOffer(name=c.name, memory=memory, metadata=c.metadata())
            for c in self._connectors
        ]

    def expect_peer(self) -> None:
        """One that was told of the offers."""
        for connector in self._connectors:
            connector.expect_peer()

    def hand_off(self, link: Link, ask: Ask, target: HeldRange, timeout_s: float | None) -> HandOff:
        """To be run once by the caller, who owns the target's blocks."""
        hand_off = HandOff(
            self._puller,
            link,
            ask,
            target,
            self._checksum,
            self._faults,
            None if timeout_s is None else time.monotonic() + timeout_s,
            self.pulls[link.connector],
        )
        self._hand_offs.add(hand_off)
        return hand_off

    def problem(self) -> str | None:
        """Why the worker should be replaced."""
        problems = (self.quarantine.problem, *(c.problem() for c in self._connectors))
        return next((problem for problem in problems if problem is not None), None)

    def load(self) -> TransferLoad:
        """Reads that were not wanted any more are in quarantine, not in the backlog."""
        wanted = [hand_off.backlog for hand_off in self._hand_offs]
        return TransferLoad(
            num_reads=sum(len(reads) for reads in wanted),
            num_bytes=sum(read.num_bytes for reads in wanted for read in reads),
            num_quarantined_reads=self.quarantine.num_reads,
        )

    def link_reports(self) -> list[LinkReport]:
        return [
            LinkReport(
                peer_incarnation=link.incarnation,
                connector=link.connector,
                transport=link.pool.transport,
                bytes_per_s=link.figures.bytes_per_s,
                latency_s=link.figures.latency_s,
            )
            for link in self.links.live()
        ]

    async def close(self) -> None:
        await self.links.close()
        for connector in self._connectors:
            await connector.close()

    def _checksum(self, group: int, block: int) -> int:
        return checksum(self._regions[group], block)
