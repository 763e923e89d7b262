"""What is asked of a system, by the load generator that users have."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.serving.systems import Running
from cluster.bench.arrivals import Arrivals, ClosedLoop, OpenLoop
from cluster.bench.lengths import Fixed
from cluster.bench.load import Load, run_load
from cluster.bench.measure import Summary, summarise
from cluster.bench.record import Record
from cluster.bench.workload import Synthetic

_FIRST_ID = 3  # below it are the tokens that end and pad
_OTHER_SEED = 1_000_000
_SAMPLE_S = 2.0  # reading a cluster's memory takes tens of milliseconds


class LoadError(Exception):
    """Some answers were not whole, so there is no figure."""


@dataclass(frozen=True)
class Asked:
    prompt: int
    output: int
    arrivals: Arrivals
    num_requests: int | None = None
    duration_s: float | None = None
    shared: int = 0  # of a prompt's tokens, one of `groups` beginnings
    groups: int = 1


@dataclass(frozen=True)
class Crowd:
    """What many streams at once came to; failures are told, not raised."""

    summary: Summary
    peak_bytes: int


def measure(running: Running, asked: Asked, seed: int) -> Summary:
    return _whole(asyncio.run(_ask(running, asked, seed)))


def offer(running: Running, asked: Asked, seed: int) -> tuple[Record, ...]:
    """Whatever became of each; failures are told, not raised."""
    return asyncio.run(_records(running, asked, seed))


def warm_up(running: Running, seed: int) -> None:
    measure(running, Asked(64, 4, ClosedLoop(1), 4), seed)


def steadiness(
    running: Running, streams: Asked, disturbing: Asked, seed: int
) -> tuple[Summary, Summary]:
    """Of the streams, and of the prompts that come meanwhile."""

    async def both() -> tuple[Summary, Summary]:
        others = _ask(running, disturbing, seed + _OTHER_SEED)
        first, second = await asyncio.gather(_ask(running, streams, seed), others)
        return first, second

    first, second = asyncio.run(both())
    return _whole(first), _whole(second)


def crowd(running: Running, asked: Asked, seed: int) -> Crowd:
    async def ask() -> Crowd:
        peak = [0]
        watching = asyncio.create_task(_watch(running.family.pss_bytes, peak))
        summary = await _ask(running, asked, seed)
        watching.cancel()
        return Crowd(summary, peak[0])

    return asyncio.run(ask())


async def _watch(read: Callable[[], int], peak: list[int]) -> None:
    while True:
        peak[0] = max(peak[0], await asyncio.to_thread(read))
        await asyncio.sleep(_SAMPLE_S)


async def _ask(running: Running, asked: Asked, seed: int) -> Summary:
    return summarise(await _records(running, asked, seed))


async def _records(running: Running, asked: Asked, seed: int) -> tuple[Record, ...]:
    load = Load(
        running.url,
        Synthetic(
            Fixed(asked.prompt),
            Fixed(asked.output),
            seed=seed,
            prefix_share=asked.shared / asked.prompt,
            prefix_groups=asked.groups,
        ),
        asked.arrivals,
        asked.num_requests,
        asked.duration_s,
        model=running.model_name,
        token_ids=range(_FIRST_ID, running.vocab_size),
        seed=seed,
    )
    return (await run_load(load)).records


def _whole(summary: Summary) -> Summary:
    if summary.num_complete != summary.num_sent or summary.num_short or not summary.num_sent:
        raise LoadError(
            f"{summary.num_complete} of {summary.num_sent} answers, {summary.num_short} of them "
            f"short; {summary.failure_messages}"
        )
    return summary


def every(seconds: float) -> OpenLoop:
    """One prompt in so many seconds."""
    return OpenLoop(1 / seconds, burstiness=None)
