"""What both legs have in common: an engine among peers, behind one gRPC server."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from engine.async_engine import AsyncEngine
from engine.describe_worker import describe_format, describe_worker
from engine.engine import Engine
from engine.errors import EngineError, UnavailableError
from engine.handoff import Reservation
from kv_transfer.config import ExchangeConfig
from kv_transfer.connector import Connector, PoolRegion
from kv_transfer.errors import ConnectorUnavailable
from kv_transfer.event_service import EventService
from kv_transfer.exchange import Exchange
from kv_transfer.faults import Faults
from kv_transfer.registry import ConnectorConfig, open_connector
from kv_transfer.worker_service import WorkerService
from prefill_worker.fetching import Fetcher
from prefill_worker.reporting import Reporter, stats_of
from prefill_worker.source import EngineSource
from protos.address import Address
from protos.cores import Cores
from protos.events_pb2_grpc import add_WorkerEventsServicer_to_server
from protos.handoff_pb2_grpc import add_HandOffServicer_to_server
from protos.rpc import PROTOCOL, Plane
from protos.version import version
from protos.worker_pb2 import (
    ROLE_PREFILL,
    DescribeRequest,
    DrainProgress,
    HealthReport,
    Role,
    WorkerDescription,
)
from protos.worker_pb2_grpc import add_WorkerServicer_to_server

logger = logging.getLogger(__name__)

DRAIN_PERIOD_S = 0.1
STOP_GRACE_S = 0.5  # for last words that are on their way
LEASE_POLL_S = 0.005
INTEGRITY_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class NodeConfig:
    """`connectors` in order of preference; those that this process cannot use are left out,
    unless there is only one."""

    listen: str = "127.0.0.1:0"
    advertise: str | None = None  # the host that peers are told, if not that of `listen`
    role: Role.ValueType = ROLE_PREFILL
    max_num_seqs: int = 0  # for the description
    connectors: tuple[str, ...] = ("nixl", "socket")
    connector: ConnectorConfig = ConnectorConfig()
    exchange: ExchangeConfig = ExchangeConfig()
    stall_timeout_s: float = 60.0
    plane: Plane = field(default_factory=Plane)


class Node:
    """Started and stopped on one event loop; a leg adds its own services to `server`.

    Draining takes no new ask; what is under way goes on.
    """

    def __init__(self, config: NodeConfig, engine: Engine, faults: Faults | None = None) -> None:
        self.config = config
        self.engine = AsyncEngine(engine, config.stall_timeout_s, self._on_reserved)
        self.incarnation = engine.incarnation
        self.cores = _cores(engine)
        self.draining = False
        self.server = config.plane.server()
        self._faults = faults or Faults.of_environment()
        self.source = EngineSource(self.engine, config.role == ROLE_PREFILL, self._faults)

    async def start(self) -> None:
        """Everything but the server, which begins with `serve`."""
        stats = stats_of(self.engine.engine)  # while its thread has not begun
        self.engine.start()
        regions = _regions(self.engine.engine)
        connectors = await self._open_connectors(regions)
        info = self.engine.engine.info
        me = DescribeRequest(
            protocol=PROTOCOL,
            version=version(),
            incarnation=self.incarnation,
            format=describe_format(info.fingerprint, info.cache.layouts),
        )
        self.exchange = Exchange(
            self.config.exchange,
            info.shape.block_size,
            me,
            regions,
            connectors,
            self.config.plane.channel,
            self.source,
            self.engine.end_quarantine,
            self._faults,
        )
        patience_s = self.config.exchange.unreachable_patience_s
        self.fetcher = Fetcher(self.engine, self.exchange, self.incarnation, patience_s)
        self.source.fetcher = self.fetcher
        self.description = self._describe()
        self.reporter = Reporter(self, stats)
        add_HandOffServicer_to_server(self.exchange.holder, self.server)
        add_WorkerServicer_to_server(WorkerService(self), self.server)
        self.events = EventService(self.reporter)
        add_WorkerEventsServicer_to_server(self.events, self.server)

    async def serve(self) -> str:
        """The address at which peers reach this worker."""
        bound = Address.parse(self.config.plane.listen(self.server, self.config.listen))
        address = str(Address(self.config.advertise or bound.host, bound.port))
        await self.server.start()
        self.fetcher.address = address
        return address

    async def stop(self) -> None:
        """Ends what is left; nothing of ours runs any more when it returns."""
        await self.server.stop(STOP_GRACE_S)
        await self.fetcher.close()
        await self.exchange.close()
        await self.engine.end()

    def _on_reserved(self, reservation: Reservation) -> None:
        self.fetcher.on_reserved(reservation)

    @property
    def num_leases(self) -> int:
        return self.exchange.holder.num_leases

    @property
    def num_queued_tokens(self) -> int:
        """Of prompts that are computed here for others."""
        return self.source.num_queued_tokens

    @property
    def num_prefix_tokens(self) -> int:
        return self.fetcher.num_prefix_tokens

    def problem(self) -> str | None:
        """Why this worker should be replaced."""
        try:
            self.engine.check_health()
        except UnavailableError as error:
            return str(error)
        return self.exchange.problem()

    def expect_peer(self) -> None:
        self.exchange.expect_peer()

    async def check_health(self, check_integrity: bool) -> HealthReport:
        problem = self.problem()
        if problem is None and check_integrity:
            problem = await self._integrity_problem()
        return HealthReport(
            healthy=problem is None, reason=problem or "", num_steps=self.engine.engine.num_steps
        )

    async def _integrity_problem(self) -> str | None:
        try:
            async with asyncio.timeout(INTEGRITY_TIMEOUT_S):
                return await self.engine.ask(_find_inconsistency)
        except TimeoutError:
            return f"the engine did not answer within {INTEGRITY_TIMEOUT_S:.0f} s"
        except EngineError as error:
            return str(error)

    def begin_drain(self) -> None:
        self.draining = True
        self.exchange.holder.drain()

    async def drain(
        self,
        deadline_s: float | None,
        move_after_s: float = math.inf,
        succession_s: float = 0.0,
    ) -> AsyncIterator[DrainProgress]:
        """Until no lease is left; those left at the deadline end with their streams, as a lease
        cannot be moved. For `succession_s` at most new ones are granted, while an ingress follows
        this worker: those that know a successor leave it by themselves."""
        began = time.monotonic()
        end = math.inf if deadline_s is None else began + deadline_s
        while (now := time.monotonic()) < end:
            if not self.draining and (now >= began + succession_s or self.events.is_left()):
                self.begin_drain()
            if self.draining and not self.num_leases:
                break
            yield DrainProgress(num_leases=self.num_leases)
            await asyncio.sleep(DRAIN_PERIOD_S)
        self.begin_drain()
        await self._end_leases()
        yield DrainProgress(num_leases=self.num_leases, done=True)

    async def _end_leases(self) -> None:
        """Their streams end, and what they held is let go of."""
        self.exchange.holder.end_leases()
        end = time.monotonic() + STOP_GRACE_S
        while self.num_leases and time.monotonic() < end:
            await asyncio.sleep(LEASE_POLL_S)

    async def _open_connectors(self, regions: Sequence[PoolRegion]) -> list[Connector]:
        opened, problems = [], []
        for name in self.config.connectors:
            try:
                connector = await open_connector(
                    name, regions, self.incarnation, self.config.connector, self._faults
                )
            except ConnectorUnavailable as error:
                if len(self.config.connectors) == 1:
                    raise
                logger.warning("without %s: %s", name, error)
                problems.append(f"{name}: {error}")
                continue
            opened.append(connector)
        if not opened:
            raise ConnectorUnavailable("; ".join(problems))
        return opened

    def _describe(self) -> WorkerDescription:
        return describe_worker(
            self.engine.engine.info,
            self.config.role,
            version(),
            self.incarnation,
            self.config.max_num_seqs,
            self.exchange.offers(),
        )


def _find_inconsistency(engine: Engine) -> str | None:
    try:
        engine.check_integrity()
    except AssertionError as error:
        return f"the cache is inconsistent: {error}"
    return None


def _cores(engine: Engine) -> Cores | None:
    shape = engine.info.shape
    return Cores.of_this_process(shape.num_threads) if shape.device.type == "cpu" else None


def _regions(engine: Engine) -> list[PoolRegion]:
    return [
        PoolRegion(
            slab.data.data_ptr(),
            slab.num_blocks,
            slab.layout.blob_bytes,
            slab.data.device.type,
            slab.data.device.index or 0,
            owner=slab,
        )
        for slab in engine.slabs
    ]
