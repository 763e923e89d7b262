"""Goodput at its peak, and at five times that rate: what is answered in time, what is refused."""

import json
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.serving.loads import Asked, offer
from benchmarks.serving.systems import TPOT_OBJECTIVE_S, TTFT_OBJECTIVE_S, Running
from cluster.bench.arrivals import ClosedLoop, OpenLoop
from cluster.bench.measure import Objectives, Spread, spread
from cluster.bench.record import Record

OBJECTIVES = Objectives(ttft_s=TTFT_OBJECTIVE_S, tpot_s=TPOT_OBJECTIVE_S)
EXCESS = 5
# A sweep begins below what a closed loop is answered, and ends at a rate of which less is good.
FIRST_SHARE, GROWTH, LEAST_GOOD, MOST_RATES = 0.8, 1.25, 0.8, 12
_PROBE_S, _PROBE_TOKENS = 0.5, 256
_REFUSED = 429


class Lengths(NamedTuple):
    """`streams`: so many at a time are about what can be served."""

    prompt: int
    output: int
    streams: int

    def __str__(self) -> str:
        return f"{self.prompt} in, {self.output} out"


# What prompts take is scarce in the first, and places for answers in the second.
LENGTHS = (Lengths(256, 32, 8), Lengths(32, 128, 48))


@dataclass(frozen=True)
class Offered:
    """What came of an open loop. Rates are over the time in which it was sent."""

    rate: float
    num_sent: int
    good_per_s: float
    num_complete: int
    failures: Counter[str]  # that are no refusals
    refusals: Spread | None  # from sending to the end of the answer
    ttft: Spread | None
    tpot: Spread | None
    late: Spread | None
    generator_cpu: float  # of a core


def capacity(running: Running, lengths: Lengths, seconds: float, seed: int) -> float:
    """Requests a second that a few at a time are answered."""
    asked = Asked(lengths.prompt, lengths.output, ClosedLoop(lengths.streams), duration_s=seconds)
    began = time.perf_counter()
    records = offer(running, asked, seed)
    return sum(one.failure is None for one in records) / (time.perf_counter() - began)


def offered(running: Running, lengths: Lengths, rate: float, seconds: float, seed: int) -> Offered:
    asked = Asked(lengths.prompt, lengths.output, OpenLoop(rate), duration_s=seconds)
    cpu_s, began = time.process_time(), time.perf_counter()
    records = offer(running, asked, seed)
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - began
    return _result(records, rate, seconds, cpu_s / wall_s)


def _result(
    records: Sequence[Record], rate: float, seconds: float, generator_cpu: float
) -> Offered:
    complete = [one for one in records if one.failure is None]
    refused = [one for one in records if one.failure and one.failure.status == _REFUSED]
    others = [one.failure for one in records if one.failure and one.failure.status != _REFUSED]
    return Offered(
        rate,
        len(records),
        sum(map(OBJECTIVES.kept_by, records)) / seconds,
        len(complete),
        Counter(failure.label for failure in others),
        spread(one.total_s for one in refused),
        spread(one.ttft_s for one in complete),
        spread(one.tpot_s for one in complete),
        spread(one.late_s for one in records),
        generator_cpu,
    )


@contextmanager
def probing(running: Running) -> Iterator[list[float]]:
    """Asks now and then, for what the load generator does not read: the `Retry-After` of each
    refusal, in seconds; -1 where there is none."""
    over, said = threading.Event(), list[float]()

    def probe() -> None:
        while not over.wait(_PROBE_S):
            said.extend(_retry_after(running))

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield said
    finally:
        over.set()
        thread.join()


def _retry_after(running: Running) -> list[float]:
    body = {"model": running.model_name, "prompt": [5] * _PROBE_TOKENS, "max_tokens": 1}
    headers = {"Content-Type": "application/json"}
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{running.url}/v1/completions", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        if error.code == _REFUSED:
            return [float(error.headers.get("Retry-After", -1))]
    return []
