"""Runs that are short enough to be computed by hand."""

from dataclasses import replace

import pytest

from benchmarks.simulate.cluster import ClusterPlan
from benchmarks.simulate.feed import Delays
from benchmarks.simulate.flight import Flight
from benchmarks.simulate.simulation import Run, our_router, simulate
from benchmarks.simulate.traffic import Request
from kv_cache.events import EventBatch
from router.ask import Ask, Placement, Source
from router.config import RouterConfig
from router.router import Router
from router.workers import Leg, Load, Worker
from tests.benchmarks.simulate.made_up import plain_device, request

# One token takes 1 ms of arithmetic wherever it is in a step, a decoded one too.
PAIR = ClusterPlan(
    num_prefill=1,
    num_decode=1,
    prefill_step_tokens=64,
    decode_step_tokens=64,
    message_s=0.001,
    delays=Delays(events_s=0.0, reports_s=0.0, at_once=True),
    # Both prompts of a test go where the test wants them: to the prefill worker, at once.
    router=RouterConfig(policy="round-robin", max_backlog_steps=None),
)
ALONE = replace(PAIR, num_prefill=0)


def run(plan: ClusterPlan, *requests: Request) -> Run:
    return simulate(plan, plain_device(), requests)


def times(flight: Flight) -> tuple[float, float]:
    assert flight.first_at is not None
    assert flight.end_at is not None
    return flight.first_at, flight.end_at


def test_a_prompt_is_computed_in_chunks_and_handed_over_meanwhile() -> None:
    (flight,) = run(PAIR, request(0, 0.0, 100, 4)).flights
    # The message 1 ms; 10 + 64 and 10 + 36 ms; 3.6 ms for the last 36 tokens, and 5 ms.
    first = 0.001 + 0.074 + 0.046 + 0.0036 + 0.005
    assert times(flight) == pytest.approx((first, first + 3 * 0.021))
    assert flight.num_computed == 100


def test_prompts_share_a_step_of_the_prefill_worker() -> None:
    one, two = run(PAIR, request(0, 0.0, 40, 1), request(1, 0.0, 40, 1)).flights
    # The first one's step has begun when the second one comes.
    first = 0.001 + 0.010 + 0.040
    assert times(one)[0] == pytest.approx(first + 0.004 + 0.005)
    assert times(two)[0] == pytest.approx(first + 0.010 + 0.040 + 0.004 + 0.005)


def test_a_shared_beginning_is_computed_once() -> None:
    one = request(0, 0.0, 64, 1, "text", 4)
    two = request(1, 1.0, 80, 1, "text", 4)
    first, second = run(PAIR, one, two).flights
    assert (first.num_own_cached, second.num_own_cached) == (0, 64)
    # Only the 16 new tokens are computed, and only they cross: the decode worker has the others.
    assert times(second)[0] == pytest.approx(1.001 + 0.026 + 0.0016 + 0.005)


def test_a_colocated_step_carries_the_prompt_and_everybody_s_next_token() -> None:
    one, two = run(ALONE, request(0, 0.0, 32, 20), request(1, 0.05, 64, 2)).flights
    # Alone: 10 + 32 ms. A token of a sequence that runs is 1 ms of arithmetic in any step.
    first = 0.001 + 0.042
    assert times(one)[0] == pytest.approx(first)
    # A decode step takes 20 + 1 ms; the one under way when the second prompt comes at 0.051 ends
    # at 0.064. Its budget of 64 leaves 63 tokens to the prompt, then the last one.
    mixed = first + 0.021
    assert times(two)[0] == pytest.approx(mixed + (0.010 + 0.063 + 0.001) + (0.010 + 0.002))
    # Its second token comes with a step of both; the first one goes on alone: 19 steps in all.
    assert times(two)[1] == pytest.approx(times(two)[0] + 0.022)
    assert times(one)[1] == pytest.approx(times(two)[1] + 15 * 0.021)


def test_an_answer_of_one_token_ends_with_its_prompt() -> None:
    (flight,) = run(ALONE, request(0, 0.0, 32, 1)).flights
    assert times(flight) == pytest.approx((0.043, 0.043))


def test_a_span_of_steps_is_as_long_as_its_steps() -> None:
    """Steps that read more and more, one by one and all at once."""
    device = replace(plain_device(), kv_token_bytes=100, flops_per_s=1e12)
    (flight,) = simulate(ALONE, device, [request(0, 0.0, 32, 50)]).flights
    prompt = 0.001 + 0.010
    # Step k reads 33 + k tokens of 100 bytes at a MB/s.
    decoding = sum(0.02 + 1e-4 * (33 + k) for k in range(49))
    assert times(flight)[1] == pytest.approx(prompt + decoding, rel=1e-6)


def test_who_ends_with_a_step_makes_room_for_who_goes_on() -> None:
    """Four blocks, two for each. With the sixteenth step of the first one its second block is full,
    and the other one ends: nobody has to be computed again."""
    two_blocks = (request(0, 0.0, 16, 30), request(1, 0.0, 16, 16))
    one, two = simulate(ALONE, plain_device(num_blocks=4), two_blocks).flights
    assert (one.num_preemptions, two.num_preemptions) == (0, 0)
    # The prompts come in two steps, the second one with a token of the first answer.
    first, second = 0.001 + 0.026, 0.001 + 0.026 + 0.027
    assert times(two) == pytest.approx((second, second + 15 * 0.022))
    assert times(one) == pytest.approx((first, second + 15 * 0.022 + 13 * 0.021))


class _Told:
    """Sends every request at once, where the test says: to which workers, and whose prefix is
    read."""

    def __init__(self, places: dict[str, tuple[str, str, str | None]]) -> None:
        self._places = places
        self._workers: dict[str, Worker] = {}
        self._asks: list[Ask] = []
        self.loads: list[tuple[Worker, Load]] = []

    @property
    def num_waiting(self) -> int:
        return len(self._asks)

    def add(self, leg: Leg, worker: Worker) -> None:
        self._workers[worker.address] = worker

    def submit(self, ask: Ask, now: float) -> None:
        self._asks.append(ask)

    def dispatch(self, now: float) -> list[tuple[Ask, Placement]]:
        asks, self._asks = self._asks, []
        return [(ask, self._place(ask)) for ask in asks]

    def _place(self, ask: Ask) -> Placement:
        prefill, decode, holder = self._places[ask.request_id]
        sources = () if holder is None else (Source(self._workers[holder], 64),)
        named = (self._workers[prefill],)
        return Placement(self._workers[decode], named, sources, "told", ())

    def note(self, leg: Leg, worker: Worker, load: Load) -> None:
        self.loads.append((worker, load))

    def remove(self, leg: Leg, worker: Worker) -> None: ...
    def began(self, request_id: str, now: float) -> None: ...
    def ended(self, request_id: str, now: float) -> None: ...
    def withdraw(self, request_id: str, now: float) -> None: ...


def test_a_prompt_that_waits_for_blocks_begins_when_a_peer_has_read_them() -> None:
    """Half of the blocks of a prefill worker are being read by the other one when a prompt comes
    that takes all of them."""
    router = _Told(
        {
            "0": ("prefill-0", "decode-0", None),
            "1": ("prefill-1", "decode-0", "prefill-0"),
            "2": ("prefill-0", "decode-1", None),
            "3": ("prefill-0", "decode-0", None),
        }
    )
    requests = [
        request(0, 0.0, 64, 1, "text", 4),
        request(1, 1.0, 80, 1, "text", 4),
        request(2, 1.002, 100, 1),
        request(3, 9.0, 16, 1),
    ]
    plan = replace(PAIR, num_prefill=2, num_decode=2)
    flights = simulate(
        plan, plain_device(num_blocks=8), requests, lambda *_: (router, lambda *_: None)
    ).flights
    assert flights[1].num_fetched == 64
    # 64 tokens have been read 6.4 and 5 ms after 1.001 s; then 100 are computed in two steps, and
    # the last 36 of them cross.
    read = 1.001 + 0.0064 + 0.005
    assert flights[2].first_at == pytest.approx(read + 0.074 + 0.046 + 0.0036 + 0.005)


def test_a_worker_tells_of_the_steps_that_it_has_made() -> None:
    """Two of 2 s, during which it reports every half second."""
    router = _Told({"0": ("prefill-0", "decode-0", None), "1": ("prefill-0", "decode-0", None)})
    requests = [request(0, 0.0, 1990, 1), request(1, 0.1, 1990, 1)]
    plan = replace(PAIR, prefill_step_tokens=None)
    simulate(plan, plain_device(), requests, lambda *_: (router, lambda *_: None))
    told = [load.num_steps for worker, load in router.loads if worker.address == "prefill-0"]
    assert told == sorted(told)
    assert set(told) == {0, 1, 2}


def test_a_router_knows_how_much_a_worker_holds() -> None:
    router, apply = our_router(PAIR, plain_device(num_blocks=7), 0)
    worker = Worker("prefill-0", 1, "simulated")
    apply(worker, EventBatch(incarnation=1, number=1, events=(), digests=(0,)))
    assert isinstance(router, Router)
    assert router.index.of(worker).capacity == 7
