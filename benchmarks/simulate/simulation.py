"""One run: a cluster, its traffic, and what became of every request."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from benchmarks.simulate.cells import CellChoice
from benchmarks.simulate.clock import Clock
from benchmarks.simulate.cluster import ClusterPlan
from benchmarks.simulate.decode import fits_alone
from benchmarks.simulate.device import Device
from benchmarks.simulate.feed import Feed
from benchmarks.simulate.flight import Flight
from benchmarks.simulate.front import Choosing, Front
from benchmarks.simulate.network import Network
from benchmarks.simulate.roster import Roster
from benchmarks.simulate.traffic import Request
from benchmarks.simulate.worker import SimulatedWorker, Surroundings, WorkerLimits
from engine.errors import ConfigError
from kv_cache.events import EventBatch
from router.router import Router
from router.workers import CacheShape, Leg, StepCosts, Worker

ENDLESS_BLOCKS = 100_000

Apply = Callable[[Worker, EventBatch], None]
MakeRouter = Callable[[ClusterPlan, Device, int], tuple[Choosing, Apply]]


@dataclass(frozen=True)
class Run:
    """Everything is done: no request is under way, no worker has anything left of one."""

    flights: Sequence[Flight]  # in the order of their requests
    workers: Sequence[SimulatedWorker]
    end_s: float
    num_bytes: int  # sent between workers
    num_spilled: int  # requests that did not go to the cell of their key


def limits_of(plan: ClusterPlan, device: Device) -> dict[Leg, WorkerLimits]:
    prefill = WorkerLimits(
        plan.prefill_step_tokens, plan.max_sequences, device.num_blocks, device.prefill_costs()
    )
    decode = WorkerLimits(
        plan.decode_step_tokens, plan.max_sequences, device.num_blocks, device.decode_costs()
    )
    return {Leg.PREFILL: prefill, Leg.DECODE: endless(decode) if plan.endless_decode else decode}


def endless(limits: WorkerLimits) -> WorkerLimits:
    """Its own steps take next to nothing; a prompt there would take for ever."""
    costs = StepCosts(step_s=1e-12, prompt_token_s=1.0, sequence_s=1e-12)
    return replace(
        limits, max_sequences=1 << 30, num_blocks=ENDLESS_BLOCKS, costs=costs, caches=False
    )


def our_router(plan: ClusterPlan, device: Device, seed: int) -> tuple[Choosing, Apply]:
    """The router itself, and how it hears of caches."""
    router = Router(plan.router, random.Random(seed))
    router.set_shape(CacheShape(device.block_tokens, device.block_bytes))

    def apply(worker: Worker, batch: EventBatch) -> None:
        index = router.index.of(worker)
        index.capacity = device.num_blocks  # as its load reports say
        index.apply(batch)

    return router, apply


class Simulation:
    """Owns the clock. Cells share nothing but the network and the choice between them."""

    def __init__(
        self,
        plan: ClusterPlan,
        device: Device,
        requests: Sequence[Request],
        make_router: MakeRouter = our_router,
    ) -> None:
        self._plan = plan
        self._device = device
        self._requests = requests
        self._make_router = make_router
        self._clock = Clock()
        self._network = Network(device.link)
        self._choice = CellChoice(plan.num_cells)
        self._limits = limits_of(plan, device)
        self._check()
        self._done: list[Flight] = []
        self._cells: list[list[Front]] = []
        self._rosters: list[Roster] = []
        self._feeds: list[Feed] = []
        self._random = random.Random(f"routers {plan.seed}")
        self._cell_of: dict[int, int] = {}
        incarnations = count(1)
        for number in range(plan.num_cells):
            self._add_cell(number, incarnations)

    def run(self) -> Run:
        self._arrive_from(0)
        self._clock.run()
        workers = [worker for roster in self._rosters for worker in roster.everyone]
        for worker in workers:
            if worker.alive:
                worker.check_idle()
        self._done.sort(key=lambda flight: flight.request.number)
        return Run(
            self._done,
            workers,
            max((flight.end_at or 0.0 for flight in self._done), default=0.0),
            self._network.num_bytes,
            self._choice.num_spilled,
        )

    def _check(self) -> None:
        block = self._device.block_tokens
        for request in self._requests:
            for limits in self._limits.values():
                if not fits_alone(limits, block, request.num_tokens, request.num_output):
                    raise ConfigError(
                        "trace",
                        f"request {request.number} has {request.num_tokens} tokens and an answer "
                        f"of {request.num_output}, more than the cache of any worker",
                    )

    def _add_cell(self, number: int, incarnations: Iterator[int]) -> None:
        plan, device = self._plan, self._device
        feed = Feed(self._clock, plan.delays, None if plan.endless_decode else device.link)
        around = Surroundings(self._clock, device, self._network, feed)
        fronts = [
            Front(
                self._clock,
                *self._make_router(plan, device, plan.seed * 1000 + number * plan.num_routers + i),
                plan.message_s,
                device.block_tokens,
                self._finished,
            )
            for i in range(plan.num_routers)
        ]
        for front in fronts:
            feed.listen(front)
        name = f"cell-{number}/" if plan.num_cells > 1 else ""
        roster = Roster(around, self._limits, fronts, plan.notice_s, incarnations, name)
        for leg, size in ((Leg.PREFILL, plan.num_prefill), (Leg.DECODE, plan.num_decode)):
            for place in range(size):
                roster.start(leg, place)
        if number == 0:
            for death in plan.deaths:
                roster.plan(death)
        self._cells.append(fronts)
        self._rosters.append(roster)
        self._feeds.append(feed)

    def _arrive_from(self, number: int) -> None:
        """One arrival is planned at a time: the queue of what is to happen stays short."""
        if number < len(self._requests):
            request = self._requests[number]
            self._clock.at(request.at_s, partial(self._arrive, number))

    def _arrive(self, number: int) -> None:
        request = self._requests[number]
        cell = self._choice.choose(request)
        self._cell_of[request.number] = cell
        self._random.choice(self._cells[cell]).arrive(request)
        self._arrive_from(number + 1)

    def _finished(self, flight: Flight) -> None:
        self._done.append(flight)
        self._choice.ended(self._cell_of.pop(flight.request.number), flight.request)
        if len(self._done) == len(self._requests):
            for feed in self._feeds:
                feed.stop()


def simulate(
    plan: ClusterPlan,
    device: Device,
    requests: Sequence[Request],
    make_router: MakeRouter = our_router,
) -> Run:
    return Simulation(plan, device, requests, make_router).run()
