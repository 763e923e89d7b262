"""A worker's cache events and load, as subscribers get them."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from engine.async_engine import AsyncEngine
from engine.engine import Engine
from engine.errors import EngineError
from engine.scheduler.pace import Pace
from engine.scheduler.scheduler import SchedulerStats
from kv_cache.cache import CacheStats
from kv_cache.events import EventBatch, Gap, Snapshot
from kv_transfer.event_service import ANSWER_S
from kv_transfer.exchange import Exchange
from protos.cores import Cores
from protos.events_pb2 import BlockCounts, LoadReport, StepTimes

Stats = tuple[SchedulerStats, CacheStats]
Answer = TypeVar("Answer")


class Reported(Protocol):
    """The worker that the reports are of."""

    engine: AsyncEngine
    exchange: Exchange
    incarnation: int
    cores: Cores | None
    draining: bool

    @property
    def num_queued_tokens(self) -> int: ...

    @property
    def num_prefix_tokens(self) -> int: ...

    def problem(self) -> str | None: ...


class Reporter:
    """Asks the engine's thread, and does not wait for the end of a long step: it is reported too,
    as a stuck engine is, with the last figures that were given.

    The thread carries out whatever it was asked, also what nobody waits for any more, so the
    subscribers share a question for as long as it is open.
    """

    def __init__(self, worker: Reported, first: Stats) -> None:
        """`first`: no report is without figures, whatever the engine is at by then."""
        self._worker = worker
        self._last = first
        self._stats: asyncio.Task[None] | None = None
        self._snapshot: asyncio.Task[Snapshot | None] | None = None

    @property
    def incarnation(self) -> int:
        return self._worker.incarnation

    async def events_since(self, number: int) -> Sequence[EventBatch] | Gap:
        """Only news are worth the engine's time."""
        if self._worker.engine.engine.events.latest == number:
            return ()
        batches = await self._ask(lambda engine: engine.events.since(number))
        return () if batches is None else batches

    async def newer(self, number: int) -> None:
        await self._worker.engine.newer_events(number)

    async def snapshot(self) -> Snapshot | None:
        if self._snapshot is None:
            self._snapshot = asyncio.ensure_future(self._take_snapshot())
        return await self._snapshot

    async def _take_snapshot(self) -> Snapshot | None:
        try:
            return await self._ask(lambda engine: engine.snapshot())
        finally:
            self._snapshot = None

    async def _take_stats(self) -> None:
        """Also those that come late are newer than the last."""
        try:
            self._last = await self._ask(stats_of) or self._last
        finally:
            self._stats = None

    async def load(self) -> LoadReport:
        worker, engine = self._worker, self._worker.engine.engine
        if self._stats is None:
            self._stats = asyncio.ensure_future(self._take_stats())
        stats = self._stats
        await asyncio.wait({stats}, timeout=ANSWER_S)
        if stats.done():
            stats.result()  # raises what is a bug of ours
        report = LoadReport(
            incarnation=worker.incarnation,
            num_steps=engine.num_steps,
            num_leases=worker.exchange.holder.num_leases,
            num_queued_tokens=worker.num_queued_tokens,
            step_times=_step_times(engine),
            transfer=worker.exchange.load(),
            links=worker.exchange.link_reports(),
            draining=worker.draining,
            unhealthy=worker.problem() or "",
            num_prefix_tokens=worker.num_prefix_tokens,
            max_sequences=engine.limits.max_num_seqs,
            max_step_tokens=_step_tokens(engine, self._last[0]),
            max_model_len=engine.limits.max_model_len,
            block_size=engine.info.shape.block_size,
            still_s=worker.engine.still_s,
            step_s=engine.expected_s,
        )
        if worker.cores is not None:
            worker.cores.write(report.cores)
        _add_stats(report, *self._last)
        figures = engine.figures()
        report.num_hit_tokens = figures.num_cached_tokens
        report.num_query_tokens = figures.num_prompt_tokens
        return report

    async def _ask(self, question: Callable[[Engine], Answer]) -> Answer | None:
        try:
            return await self._worker.engine.ask(question)
        except EngineError:
            return None


def stats_of(engine: Engine) -> Stats:
    return engine.scheduler_stats(), engine.cache_stats()


def _step_tokens(engine: Engine, stats: SchedulerStats) -> int:
    """Of a prompt that a step computes now: all that its budget allows, or what a pause does."""
    limits, block_size = engine.limits, engine.info.shape.block_size
    pace = Pace(
        engine.step_times.careful_costs,
        limits.max_pause_s,
        block_size,
        stats.num_drawing,
        stats.num_drawing_context,
    )
    return pace.most(0, limits.max_num_batched_tokens)


def _step_times(engine: Engine) -> StepTimes:
    return StepTimes(**engine.step_times.costs._asdict())


def _add_stats(report: LoadReport, stats: SchedulerStats, cache: CacheStats) -> None:
    # Prompts of others count from their arrival on, its own as the engine has them.
    report.num_queued_tokens = max(report.num_queued_tokens, stats.num_queued_tokens)
    report.num_running = stats.num_running
    report.num_waiting = stats.num_waiting
    report.num_fetching = stats.num_fetching
    report.num_context_tokens = stats.num_context_tokens
    for group in cache.groups:
        report.blocks.append(
            BlockCounts(
                total=group.total,
                free=group.free,
                held=group.held,
                cached=group.cached,
                quarantined=group.quarantined,
                reserved=group.reserved,
            )
        )
