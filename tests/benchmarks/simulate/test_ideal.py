"""Prefill queues alone, against a simulation of their own."""

from collections import OrderedDict
from collections.abc import Sequence

import pytest

from benchmarks.simulate.arrivals import Arrivals
from benchmarks.simulate.bench import Bench
from benchmarks.simulate.cluster import ClusterPlan
from benchmarks.simulate.device import load_device
from benchmarks.simulate.equal import equal_device, equal_plan
from benchmarks.simulate.figures import Objective, ttft_s
from benchmarks.simulate.synthetic import Sessions
from benchmarks.simulate.traffic import Request

DEVICE = equal_device(load_device())
BENCH = Bench(DEVICE, Objective())
PLAN = equal_plan(ClusterPlan())


def seconds(num_new: int, num_cached: int) -> float:
    """Of an H200 at 60 % with Llama-3.1-8B."""
    pairs = num_new * num_cached + num_new**2 / 2
    return (2 * 6.979e9 * num_new + 4 * 32 * 32 * 128 * pairs) / (790e12 * 0.6) + 0.004


class Queue:
    """One prompt after the other; what was computed is cached, least recently used goes first."""

    def __init__(self) -> None:
        self.free_at = 0.0
        self._cache: OrderedDict[bytes, None] = OrderedDict()

    def num_cached(self, request: Request) -> int:
        prompt = request.names[: request.num_tokens // 512]
        hit = next((i for i, name in enumerate(prompt) if name not in self._cache), len(prompt))
        return min(hit * 512, request.num_tokens - 1)

    def serve(self, request: Request) -> float:
        """Its time to the first token."""
        cached = self.num_cached(request)
        start = max(self.free_at, request.at_s)
        self.free_at = start + seconds(request.num_tokens - cached, cached)
        for name in reversed(request.names[: request.num_tokens // 512]):
            self._cache[name] = None
            self._cache.move_to_end(name)
        while len(self._cache) > 1699:
            self._cache.popitem(last=False)
        return self.free_at - request.at_s


def oracle(requests: Sequence[Request], alpha: float | None) -> list[float]:
    """Round robin, or the least of queue + alpha * own time."""
    queues = [Queue() for _ in range(8)]
    times = []
    for number, request in enumerate(requests):
        queue = queues[(number + 1) % 8]
        if alpha is not None:

            def cost(one: Queue, request: Request = request) -> float:
                cached = one.num_cached(request)
                own = seconds(request.num_tokens - cached, cached)
                return max(one.free_at - request.at_s, 0.0) + alpha * own

            queue = min(queues, key=cost)
        times.append(queue.serve(request))
    return times


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return Sessions().requests(Arrivals(rate=12.0, seconds=60.0), seed=3)


def test_round_robin_is_the_same_to_the_microsecond(requests: list[Request]) -> None:
    run, _ = BENCH.run(PLAN, requests, "plain-round-robin")
    assert [ttft_s(flight) for flight in run.flights] == pytest.approx(
        oracle(requests, None), abs=1e-6
    )


def test_a_choice_by_cost_is_the_same_but_for_draws_between_equals(
    requests: list[Request],
) -> None:
    _, figures = BENCH.run(PLAN, requests, "plain-alpha")
    expected = sorted(oracle(requests, 3.0))
    assert figures.ttft.mean == pytest.approx(sum(expected) / len(expected), rel=0.06)
    assert figures.ttft.percentiles[90] == pytest.approx(expected[len(expected) * 9 // 10], rel=0.1)


def test_our_policy_is_no_worse_than_the_plain_choice(requests: list[Request]) -> None:
    ours, plain = (
        BENCH.run(PLAN, requests, policy)[1].ttft.mean for policy in ("cost", "plain-alpha")
    )
    assert ours < 1.02 * plain
