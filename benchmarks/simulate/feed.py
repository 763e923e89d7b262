"""What routers hear of workers: events of their caches and load reports, each after its delay."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.simulate.clock import Clock
from kv_cache.events import EventBatch
from router.workers import LinkSpeed, Load

if TYPE_CHECKING:
    from benchmarks.simulate.front import Front
    from benchmarks.simulate.worker import SimulatedWorker


@dataclass(frozen=True, slots=True)
class Delays:
    """Seconds. `at_once`: every change of a worker's load is known as it happens, besides."""

    events_s: float = 0.01
    reports_s: float = 0.001
    report_period_s: float = 0.5
    at_once: bool = False


class Feed:
    """Streams keep their order: all of them take equally long. Without a `link` nobody has
    measured one: then nothing is fetched, and a hand-off is taken to be free."""

    def __init__(self, clock: Clock, delays: Delays, link: LinkSpeed | None) -> None:
        self._clock = clock
        self._delays = delays
        self._link = link
        self._fronts: list[Front] = []
        self._stopped = False
        self.links: dict[int, LinkSpeed] = {}  # from every worker, as all of them report it

    def listen(self, front: "Front") -> None:
        self._fronts.append(front)

    def follow(self, worker: "SimulatedWorker", phase: float) -> None:
        """Reports begin now; `phase` of a period passes until the second one."""
        if self._link is not None:
            self.links[worker.identity.incarnation] = self._link
        self._report(worker)
        wait_s = self._delays.report_period_s * phase
        self._clock.at(self._clock.now + wait_s, partial(self._report_on, worker))

    def forget(self, worker: "SimulatedWorker") -> None:
        self.links.pop(worker.identity.incarnation, None)

    def batches(self, worker: "SimulatedWorker", batches: Sequence[EventBatch]) -> None:
        self._clock.after(self._delays.events_s, partial(self._apply, worker, batches))

    def changed(self, worker: "SimulatedWorker") -> None:
        if self._delays.at_once:
            self._report(worker)

    def stop(self) -> None:
        """No reports any more: there is nobody left to route."""
        self._stopped = True

    def _report_on(self, worker: "SimulatedWorker") -> None:
        if worker.alive and not self._stopped:
            self._report(worker)
            period_s = self._delays.report_period_s
            self._clock.at(self._clock.now + period_s, partial(self._report_on, worker))

    def _report(self, worker: "SimulatedWorker") -> None:
        load = worker.load()
        self._clock.after(
            self._delays.reports_s, lambda: self._note(worker, replace(load, at=self._clock.now))
        )

    def _apply(self, worker: "SimulatedWorker", batches: Sequence[EventBatch]) -> None:
        for front in self._fronts:
            front.apply(worker, batches)

    def _note(self, worker: "SimulatedWorker", load: Load) -> None:
        for front in self._fronts:
            front.note(worker, load)
