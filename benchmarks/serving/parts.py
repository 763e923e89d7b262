"""The parts of the benchmark: what each asks of a system that runs, and the figures it gives."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

from benchmarks.process import Child
from benchmarks.serving import overload as overloading
from benchmarks.serving.loads import Asked, crowd, every, measure, steadiness
from benchmarks.serving.systems import Place, Running, System
from benchmarks.sides import KV_BYTES, Folders, ours
from benchmarks.workloads import SMALL, TINY, WEIGHT_BYTES, ModelShape
from cluster.bench.arrivals import ClosedLoop

PROMPT, OUTPUT = 512, 64
_MS, _MB = 1e3, 1e-6


@dataclass(frozen=True)
class Figures:
    """Of one system, in one turn. `case` tells rows of one system apart."""

    case: str
    values: dict[str, float]


@dataclass(frozen=True)
class Turn:
    system: System
    place: Place
    running: Running
    seeds: Iterator[int]
    quick: bool  # a few requests, to see that it works

    def requests(self, num: int, streams: int) -> int:
        return max(1, min(num, 2 * streams, 8)) if self.quick else num


def load(turn: Turn) -> Iterator[Figures]:
    """512 in, 64 out."""
    for streams, num in {1: 6, 8: 32, 32: 64}.items():
        asked = Asked(PROMPT, OUTPUT, ClosedLoop(streams), turn.requests(num, streams))
        summary = measure(turn.running, asked, next(turn.seeds))
        assert summary.ttft
        assert summary.tpot
        yield Figures(
            f"{streams}",
            {
                "tokens/s": summary.output_tokens_per_s,
                "mean first token, ms": summary.ttft.mean * _MS,
                "median token, ms": summary.tpot.median * _MS,
            },
        )


def steady(turn: Turn) -> Iterator[Figures]:
    """8 streams, and a prompt of 2,048 tokens every second: where one prompt holds up one token of
    each stream, at one in two seconds fewer than one gap in a hundred is long, and no percentile
    below the largest gap shows it."""
    seconds = 4.0 if turn.quick else 24.0
    streams = Asked(64, 256, ClosedLoop(8), duration_s=seconds)
    if turn.quick:
        streams = dataclasses.replace(streams, output=32)
    prompts = Asked(2048, 1, every(1.0), duration_s=seconds)
    running, disturbing = steadiness(turn.running, streams, prompts, next(turn.seeds))
    assert running.itl
    assert disturbing.ttft
    yield Figures(
        "8 + prompts",
        {
            "p50 gap, ms": running.itl.percentiles[50] * _MS,
            "p99 gap, ms": running.itl.percentiles[99] * _MS,
            "largest gap, ms": running.itl.largest * _MS,
            "tokens/s": running.output_tokens_per_s,
            "prompts' first token, ms": disturbing.ttft.mean * _MS,
        },
    )


def http(turn: Turn) -> Iterator[Figures]:
    """64 streams of 32 in, 64 out, then of one token."""
    for case, output, num in (("32 in, 64 out", 64, 512), ("32 in, 1 out", 1, 1024)):
        asked = Asked(32, output, ClosedLoop(64), turn.requests(num, 64))
        summary = measure(turn.running, asked, next(turn.seeds))
        assert summary.ttft
        yield Figures(
            case,
            {
                "tokens/s": summary.output_tokens_per_s,
                "requests/s": summary.requests_per_s,
                "median first token, ms": summary.ttft.median * _MS,
            },
        )


def added(turn: Turn) -> Iterator[Figures]:
    """One request at a time of 512 in, 1 out: through HTTP, and on the engine alone, in turns."""
    environment = {**ours().environment, **turn.running.family.environment}
    side = dataclasses.replace(ours(), environment=environment)
    folders = Folders(turn.place.model.parent, turn.place.logs)
    engine = side.start(turn.place.shape, folders, settled=True)
    alone, through = [], []
    try:
        for number in range(3 if turn.quick else 12):
            seed = next(turn.seeds)
            one = Asked(PROMPT, 1, ClosedLoop(1), 1)
            asked = measure(turn.running, one, seed)
            assert asked.ttft
            by_engine = _first_token_s(engine, seed)
            if number >= 2:  # what both warm up
                through.append(asked.ttft.median)
                alone.append(by_engine)
    finally:
        engine.close()
    yield Figures(
        "1",
        {
            "engine alone, ms": median(alone) * _MS,
            "through HTTP, ms": median(through) * _MS,
            "added, ms": (median(through) - median(alone)) * _MS,
        },
    )


def _first_token_s(engine: Child, seed: int) -> float:
    (first,) = engine.ask("prefill-512", seed)["first_token_s"]
    return float(first)


def streams(turn: Turn) -> Iterator[Figures]:
    """1,000 at once, of 32 in and 64 out."""
    num = 100 if turn.quick else 1000
    result = crowd(turn.running, Asked(32, 64, ClosedLoop(num), num), next(turn.seeds))
    summary = result.summary
    yield Figures(
        f"{num:,}",
        {
            "complete": summary.num_complete - summary.num_short,
            "of": summary.num_sent,
            "seconds": summary.span_s,
            "tokens/s": summary.output_tokens_per_s,
            "peak memory, MB": result.peak_bytes * _MB,
        },
    )


def routing(turn: Turn) -> Iterator[Figures]:
    """200 prompts of ten beginnings of 1,500 tokens and an end of their own, one a second; a
    worker's cache has room for five of the beginnings."""
    num = turn.requests(200, 4)
    asked = Asked(1600, 16, every(1.0), num, shared=1500, groups=10)
    summary = measure(turn.running, asked, next(turn.seeds))
    assert summary.ttft
    yield Figures(
        "1 a second",
        {
            "median first token, ms": summary.ttft.median * _MS,
            "p90 first token, ms": summary.ttft.percentiles[90] * _MS,
            "cached, %": 100 * summary.num_cached_tokens / summary.num_prompt_tokens,
        },
    )


def overload(turn: Turn) -> Iterator[Figures]:
    """A sweep of rates for the peak of goodput, and five times that rate, of long prompts with
    short answers, and the other way round."""
    running, excess = turn.running, overloading.EXCESS
    seconds = 4.0 if turn.quick else 20.0
    for lengths in overloading.LENGTHS:
        capacity = overloading.capacity(running, lengths, seconds, next(turn.seeds))
        peak, rate = 0.0, overloading.FIRST_SHARE * capacity
        for number in range(overloading.MOST_RATES):
            result = overloading.offered(running, lengths, rate, seconds, next(turn.seeds))
            peak = max(peak, result.good_per_s)
            yield Figures(f"{lengths}, rate {number + 1}", _offered(result, peak, []))
            if result.good_per_s < overloading.LEAST_GOOD * rate:
                break
            rate *= overloading.GROWTH
        with overloading.probing(running) as retry_s:
            rate = excess * peak
            result = overloading.offered(running, lengths, rate, seconds, next(turn.seeds))
        yield Figures(f"{lengths}, {excess} x the peak", _offered(result, peak, retry_s))


def _offered(result: overloading.Offered, peak: float, retry_s: list[float]) -> dict[str, float]:
    refusals = result.refusals
    return {
        "asked/s": result.rate,
        "good/s": result.good_per_s,
        "of the peak, %": 100 * result.good_per_s / peak if peak else 0.0,
        "answered": result.num_complete,
        "refused": refusals.num if refusals else 0,
        "failed": result.failures.total(),
        "refused in, p50 ms": refusals.median * _MS if refusals else 0.0,
        "p99 ms": refusals.percentiles[99] * _MS if refusals else 0.0,
        "first token p50, ms": result.ttft.median * _MS if result.ttft else 0.0,
        "first token p99, ms": result.ttft.percentiles[99] * _MS if result.ttft else 0.0,
        "a token p99, ms": result.tpot.percentiles[99] * _MS if result.tpot else 0.0,
        "sent late p99, ms": result.late.percentiles[99] * _MS if result.late else 0.0,
        "generator, % of a core": 100 * result.generator_cpu,
        "Retry-After p50, s": median(retry_s) if retry_s else 0.0,
    }


def start(turn: Turn) -> Iterator[Figures]:
    """From the first process to the first token; memory after what else was asked of it. Caches
    that no token has touched yet hold none, so the least that is beyond is told."""
    peer = turn.place.vllm if turn.system.needs_vllm else None
    model = turn.place.shape.num_parameters * (peer.weight_bytes if peer else WEIGHT_BYTES)
    known = turn.system.num_engines * (model + KV_BYTES)
    pss = turn.running.family.pss_bytes()
    yield Figures(
        turn.place.shape.name,
        {
            "first token, s": turn.running.start_s,
            "memory, MB": pss * _MB,
            "weights and caches, MB": known * _MB,
            "beyond them, MB": (pss - known) * _MB,
        },
    )


@dataclass(frozen=True)
class Part:
    """`systems` are those that it is about; `measure` runs once a turn on each."""

    shape: ModelShape
    systems: tuple[str, ...]
    measure: Callable[[Turn], Iterator[Figures]]


_OURS = ("kvrelay", "kvrelay-never", "kvrelay-colocated")
_ALL = (*_OURS, "vllm", "vllm-pair", "ray-llm")
# In the order in which a system that runs is asked; `start` reads its memory after the load.
PARTS = {
    "load": Part(SMALL, _ALL, load),
    "steady": Part(SMALL, _ALL, steady),
    "start": Part(SMALL, _ALL, start),
    "routing": Part(SMALL, ("kvrelay-2x2", "kvrelay-2x2-round-robin"), routing),
    "added": Part(SMALL, _OURS, added),
    "streams": Part(SMALL, ("kvrelay",), streams),
    "overload": Part(SMALL, ("kvrelay-objectives",), overload),
    "http": Part(TINY, ("kvrelay", "kvrelay-colocated", "vllm", "empty-ingress"), http),
}
