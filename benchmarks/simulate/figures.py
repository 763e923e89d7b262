"""Figures of a run, from what became of its requests. Pure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.simulate.flight import Flight
from benchmarks.simulate.simulation import Run
from benchmarks.simulate.worker import SimulatedWorker
from cluster.bench.measure import Spread, percentile
from router.workers import Leg

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Objective:
    """What a request must keep to be a good one; those that were refused keep nothing."""

    ttft_s: float = 2.0
    tpot_s: float = 0.025

    def kept_by(self, flight: Flight) -> bool:
        first_s, token_s = ttft_s(flight), tpot_s(flight)
        if flight.refused:
            return False
        if first_s is None or first_s > self.ttft_s:
            return False
        return token_s is None or token_s <= self.tpot_s


@dataclass(frozen=True)
class Figures:
    """Shares are of all requests, hits of all prompt tokens that a worker had to have, some of
    them twice where a worker died. Times are of those that were answered. `imbalance`: the
    busiest worker's work over the mean of its leg."""

    num_requests: int
    num_refused: int
    rate: float  # asked a second
    ttft: Spread
    tpot: Spread
    total: Spread
    good_share: float
    goodput: float  # good requests a second
    hit_share: float  # in the cache of the worker that computed the rest
    fetch_share: float  # read from another worker's cache
    local_share: float  # of the requests whose prompt a decode worker computed, asking nobody else
    imbalance: dict[str, float]
    busy_share: dict[str, float]
    gpu_s: float  # all workers, as long as they lived
    busy_gpu_s: float
    num_moved: int  # submitted again since their worker had died
    num_preemptions: int
    num_spilled: int
    sent_gb: float
    span_s: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def ttft_s(flight: Flight) -> float | None:
    return None if flight.first_at is None else flight.first_at - flight.request.at_s


def tpot_s(flight: Flight) -> float | None:
    """A single token has no next one."""
    if flight.first_at is None or flight.end_at is None or flight.request.num_output < 2:
        return None
    return (flight.end_at - flight.first_at) / (flight.request.num_output - 1)


def total_s(flight: Flight) -> float | None:
    return None if flight.end_at is None else flight.end_at - flight.request.at_s


def figures_of(run: Run, objective: Objective) -> Figures:
    flights = run.flights
    span_s = flights[-1].request.at_s - flights[0].request.at_s or 1.0
    num_tokens = sum(
        flight.num_computed + flight.num_own_cached + flight.num_fetched for flight in flights
    )
    num_good = sum(map(objective.kept_by, flights))
    by_leg = {
        leg: [worker for worker in run.workers if worker.leg is leg]
        for leg in Leg
        if any(worker.leg is leg for worker in run.workers)
    }
    lives = {worker: life_s(worker, run.end_s) for worker in run.workers}
    return Figures(
        num_requests=len(flights),
        num_refused=sum(flight.refused for flight in flights),
        rate=len(flights) / span_s,
        ttft=_spread(map(ttft_s, flights)),
        tpot=_spread(map(tpot_s, flights)),
        total=_spread(map(total_s, flights)),
        good_share=num_good / len(flights),
        goodput=num_good / span_s,
        hit_share=sum(flight.num_own_cached for flight in flights) / max(1, num_tokens),
        fetch_share=sum(flight.num_fetched for flight in flights) / max(1, num_tokens),
        local_share=sum(map(_is_local, flights)) / len(flights),
        imbalance={leg.value: _imbalance(workers) for leg, workers in by_leg.items()},
        busy_share={
            leg.value: sum(one.busy_s for one in workers)
            / max(1e-9, sum(lives[one] for one in workers))
            for leg, workers in by_leg.items()
        },
        gpu_s=sum(lives.values()),
        busy_gpu_s=sum(worker.busy_s for worker in run.workers),
        num_moved=sum(max(0, flight.num_attempts - 1) for flight in flights),
        num_preemptions=sum(flight.num_preemptions for flight in flights),
        num_spilled=run.num_spilled,
        sent_gb=run.num_bytes / 1e9,
        span_s=span_s,
    )


def _is_local(flight: Flight) -> bool:
    return flight.num_begun > 0 and not flight.num_prefill_workers


def life_s(worker: SimulatedWorker, end_s: float) -> float:
    died_at = end_s if worker.died_at is None else min(worker.died_at, end_s)
    return max(0.0, died_at - worker.born_at)


def _imbalance(workers: Sequence[SimulatedWorker]) -> float:
    busy = [worker.busy_s for worker in workers]
    return max(busy) * len(busy) / sum(busy) if any(busy) else 1.0


def _spread(values: "map[float | None]") -> Spread:
    ordered = sorted(value for value in values if value is not None) or [0.0]
    return Spread(
        len(ordered),
        sum(ordered) / len(ordered),
        {share: percentile(ordered, share) for share in PERCENTILES},
        ordered[-1],
    )
