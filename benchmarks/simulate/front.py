"""An ingress: its own router, the requests that came to it, and what it does when workers die."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from benchmarks.simulate.clock import Clock
from benchmarks.simulate.decode import DecodeWorker
from benchmarks.simulate.flight import Flight
from benchmarks.simulate.sequence import Sequence as Answer
from benchmarks.simulate.traffic import Request
from benchmarks.simulate.worker import SimulatedWorker
from kv_cache.events import EventBatch
from router.admission import Refused
from router.ask import Ask, Placement
from router.workers import Leg, Load, Worker

_TICK_S = 0.05  # while anything waits at the router
DEADLINE_S = 600.0  # until it has been sent to a worker, or to another one


class Choosing(Protocol):
    """The part of `router.router.Router` that an ingress uses."""

    @property
    def num_waiting(self) -> int: ...
    def add(self, leg: Leg, worker: Worker) -> object: ...
    def remove(self, leg: Leg, worker: Worker) -> None: ...
    def note(self, leg: Leg, worker: Worker, load: Load) -> None: ...
    def submit(self, ask: Ask, now: float) -> None: ...
    def dispatch(self, now: float) -> list[tuple[Ask, Placement]]: ...
    def began(self, request_id: str, now: float) -> None: ...
    def ended(self, request_id: str, now: float) -> None: ...
    def withdraw(self, request_id: str, now: float) -> None: ...


class Front:
    """Owns its flights. A request that lost its decode worker is submitted again, with what its
    client has of the answer, until it is complete."""

    def __init__(
        self,
        clock: Clock,
        router: Choosing,
        apply: Callable[[Worker, EventBatch], None],
        message_s: float,
        block_tokens: int,
        finished: Callable[[Flight], None],
    ) -> None:
        self._clock = clock
        self._router = router
        self._apply = apply
        self._message_s = message_s
        self._block_tokens = block_tokens
        self._finished = finished
        self._workers: dict[Worker, SimulatedWorker] = {}
        self._flights: dict[str, Flight] = {}
        self._dispatching = False
        self._ticking = False

    # Who exists, and what is heard of them

    def add(self, worker: SimulatedWorker) -> None:
        self._workers[worker.identity] = worker
        self._router.add(worker.leg, worker.identity)
        self._dispatch_soon()

    def lost(self, worker: SimulatedWorker) -> None:
        """Its streams are broken."""
        del self._workers[worker.identity]
        self._router.remove(worker.leg, worker.identity)
        if isinstance(worker, DecodeWorker):
            for flight in [f for f in self._flights.values() if f.worker is worker]:
                self._submit_again(flight, worker)
        self._dispatch_soon()

    def note(self, worker: SimulatedWorker, load: Load) -> None:
        if worker.identity in self._workers:
            self._router.note(worker.leg, worker.identity, load)
            self._dispatch_soon()

    def apply(self, worker: SimulatedWorker, batches: Sequence[EventBatch]) -> None:
        if worker.identity in self._workers:
            for batch in batches:
                self._apply(worker.identity, batch)

    # Requests

    def arrive(self, request: Request) -> None:
        flight = Flight(request, self)
        self._flights[flight.request_id] = flight
        self._submit(flight)

    def began(self, flight: Flight) -> None:
        """Its prompt is computed, and a token has come: the first, or the first after a move."""
        if flight.first_at is None:
            flight.first_at = self._clock.now
        self._router.began(flight.request_id, self._clock.now)
        self._dispatch_soon()

    def ended(self, flight: Flight) -> None:
        flight.end_at = self._clock.now
        self._router.ended(flight.request_id, self._clock.now)
        self._forget(flight)
        self._dispatch_soon()

    def _submit(self, flight: Flight) -> None:
        if flight.request_id not in self._flights:
            return
        request, num_tokens = flight.request, flight.num_prompt
        ask = Ask(
            request_id=flight.request_id,
            num_tokens=num_tokens,
            keys=request.keys[: num_tokens // self._block_tokens],
            num_new=flight.num_left,
            tenant=request.tenant,
            arrived=request.at_s,
            moved=flight.num_attempts > 0,
        )
        expire = partial(self._expire, flight, flight.num_attempts)
        self._clock.at(self._clock.now + DEADLINE_S, expire)
        try:
            self._router.submit(ask, self._clock.now)
        except Refused:
            self._refuse(flight)
            return
        self._dispatch_soon()

    def _expire(self, flight: Flight, num_attempts: int) -> None:
        """Too late for one that no worker has had since it was submitted."""
        is_here = flight.request_id in self._flights
        if is_here and flight.worker is None and flight.num_attempts == num_attempts:
            self._router.withdraw(flight.request_id, self._clock.now)
            self._refuse(flight)

    def _refuse(self, flight: Flight) -> None:
        flight.refused = True
        self._forget(flight)

    def _forget(self, flight: Flight) -> None:
        del self._flights[flight.request_id]
        self._finished(flight)

    def _submit_again(self, flight: Flight, dead: DecodeWorker) -> None:
        flight.num_sent += dead.abandon(flight)
        flight.worker = None
        self._router.ended(flight.request_id, self._clock.now)
        self._submit(flight)

    # Dispatching

    def _dispatch_soon(self) -> None:
        """After whatever happens at this moment, so that no worker is changed in mid-change."""
        if not self._dispatching and self._router.num_waiting:
            self._dispatching = True
            self._clock.at(self._clock.now, self._dispatch)

    def _dispatch(self) -> None:
        self._dispatching = False
        for ask, placement in self._router.dispatch(self._clock.now):
            self._place(self._flights[ask.request_id], placement)
        if self._router.num_waiting and not self._ticking:
            self._ticking = True
            self._clock.at(self._clock.now + _TICK_S, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        self._dispatch_soon()

    def _place(self, flight: Flight, placement: Placement) -> None:
        worker = self._workers[placement.decode]
        assert isinstance(worker, DecodeWorker), "answers come from decode workers"
        flight.num_attempts += 1
        flight.worker = worker
        prefill = [self._workers[one] for one in placement.prefill if one in self._workers]
        source = placement.sources[0].worker if placement.sources else None
        answer = Answer(
            flight,
            flight.request.names,
            flight.num_prompt,
            flight.num_left,
            prefill,
            self._workers.get(source) if source is not None else None,
        )
        self._clock.after(self._message_s, partial(self._deliver, worker, answer))

    def _deliver(self, worker: DecodeWorker, answer: Answer) -> None:
        if answer.flight.worker is worker:
            worker.submit(answer)
