"""An engine's figures. Asks nothing of the engine's thread, which may be in a long step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import Metric

from cluster.metrics.families import counter, counters, gauge, gauges
from kv_cache.cache import GroupStats

if TYPE_CHECKING:
    from engine.engine import Engine

_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


class EngineCollector:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        figures, groups = self._engine.figures(), self._engine.cache_stats().groups
        tokens = (
            figures.num_computed_tokens,
            figures.num_cached_tokens,
            figures.num_pulled_tokens,
        )
        yield gauge("num_requests_running", "Sequences in the batch.", figures.num_running)
        yield gauge("num_requests_waiting", "Sequences in the queue.", figures.num_waiting)
        yield gauge(
            "num_requests_fetching", "Sequences whose cache is on its way.", figures.num_fetching
        )
        yield gauge(
            "kv_cache_usage_perc",
            "Share of the blocks that is held, of the fullest group; 1 is all.",
            max((group.held + group.quarantined) / group.total for group in groups),
        )
        yield _blocks(groups)
        yield _reserved(groups)
        yield counters(
            "kv_cache_evictions",
            "Cached blocks whose memory was needed.",
            ["group"],
            {(str(number),): group.evicted for number, group in enumerate(groups)},
        )
        queries = figures.num_prompt_tokens
        yield counter("prefix_cache_queries", "Tokens looked for in the cache.", queries)
        yield counter("prefix_cache_hits", "Of them, those found.", figures.num_cached_tokens)
        yield counters(
            "prompt_tokens_by_source",
            "Tokens of prompts that were read, by where their cache came from.",
            ["source"],
            {(source,): number for source, number in zip(_SOURCES, tokens, strict=True)},
        )
        yield counter("drawn_tokens", "Tokens that were drawn here.", figures.num_drawn_tokens)
        yield counter("num_preemptions", "Sequences that gave up blocks.", figures.num_preemptions)
        yield gauge("swapped_blocks", "Of preempted ones, on the host.", figures.num_swapped_blocks)
        yield counter("engine_steps", "Steps that were made.", self._engine.num_steps)
        yield counter(
            "engine_steps_ahead",
            "Of them, planned while the one before ran.",
            self._engine.num_steps_ahead,
        )
        yield counter("engine_step_seconds", "Time that they took.", self._engine.steps_s)


def _blocks(groups: tuple[GroupStats, ...]) -> Metric:
    samples: dict[tuple[str, ...], float] = {}
    for number, group in enumerate(groups):
        for state in ("free", "held", "cached", "quarantined"):
            samples[str(number), state] = getattr(group, state)
    return gauges("kv_cache_blocks", "Blocks of each group.", ["group", "state"], samples)


def _reserved(groups: tuple[GroupStats, ...]) -> Metric:
    samples = {(str(number),): float(group.reserved) for number, group in enumerate(groups)}
    return gauges("kv_cache_reserved_blocks", "Held by hand-offs.", ["group"], samples)
