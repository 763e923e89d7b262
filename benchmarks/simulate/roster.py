"""Who is there: workers by their names, their deaths and their successors."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from benchmarks.simulate.decode import DecodeWorker
from benchmarks.simulate.front import Front
from benchmarks.simulate.prefill import PrefillWorker
from benchmarks.simulate.worker import SimulatedWorker, Surroundings, WorkerLimits
from router.workers import Leg, Worker

FINGERPRINT = "simulated"


@dataclass(frozen=True, slots=True)
class Death:
    """The worker of that leg and number dies; its successor is there `restart_s` after that."""

    at_s: float
    leg: Leg
    number: int
    restart_s: float | None = None


class Roster:
    """The workers of one cell, dead ones included; tells its fronts and its feed of them."""

    def __init__(
        self,
        around: Surroundings,
        limits: dict[Leg, WorkerLimits],
        fronts: list[Front],
        notice_s: float,
        incarnations: Iterator[int],
        name: str = "",
    ) -> None:
        self.everyone: list[SimulatedWorker] = []
        self._places: dict[tuple[Leg, int], SimulatedWorker] = {}
        self._around = around
        self._limits = limits
        self._fronts = fronts
        self._notice_s = notice_s
        self._incarnations = incarnations
        self._name = name

    def start(self, leg: Leg, number: int) -> None:
        incarnation = next(self._incarnations)
        identity = Worker(f"{self._name}{leg}-{number}", incarnation, FINGERPRINT)
        make = PrefillWorker if leg is Leg.PREFILL else DecodeWorker
        worker: SimulatedWorker = make(self._around, identity, self._limits[leg])
        self.everyone.append(worker)
        self._places[leg, number] = worker
        for front in self._fronts:
            front.add(worker)
        # Neighbours do not report at the same moments.
        self._around.feed.follow(worker, phase=incarnation * 0.618 % 1)

    def plan(self, death: Death) -> None:
        self._around.clock.at(death.at_s, partial(self._kill, death))

    def _kill(self, death: Death) -> None:
        worker = self._places[death.leg, death.number]
        if worker.alive:
            worker.die()
            clock = self._around.clock
            clock.at(clock.now + self._notice_s, partial(self._noticed, worker))
            if death.restart_s is not None:
                again = partial(self.start, death.leg, death.number)
                clock.at(clock.now + max(death.restart_s, self._notice_s), again)

    def _noticed(self, worker: SimulatedWorker) -> None:
        worker.known_dead = True
        for front in self._fronts:
            front.lost(worker)
        for other in self.everyone:
            if isinstance(other, DecodeWorker) and other.alive:
                other.prefill_worker_died(worker)
        self._around.feed.forget(worker)
