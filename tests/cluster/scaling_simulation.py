"""Pools under load, with a router before them, as the autoscaling policy would see them: time
passes here alone."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from cluster.autoscaling import (
    INGRESS,
    IngressLoad,
    Objectives,
    PoolSample,
    PoolState,
    WorkerLoad,
    decide,
)

STEP_S = 0.25
LOOK_BACK_S = 5.0  # what Serve reports is the mean of so long
IDLE = WorkerLoad(0, 0, 0, 0, 0, 0, 0.01, 0, 0)
NOTHING = IngressLoad(0, 0)
OBJECTIVES = Objectives(most_requests=32)


class Workers(Protocol):
    """A pool's workers for `STEP_S`, given how many there are now."""

    name: str

    def step(
        self, arrivals: Sequence[float], num_workers: int
    ) -> tuple[WorkerLoad, IngressLoad]: ...

    """The load of all of them together, and what waits at the router."""


@dataclass
class PrefillWorkers:
    """Each computes one prompt after the other; a prompt is so many seconds of work."""

    name: str = "prefill"
    efficiency: float = 1.0  # the most of its time that a worker can be at work
    backlog_s: float = 0.5  # of work that a worker is given; the rest waits at the router
    queue: deque[float] = field(default_factory=deque)
    under_way: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    queued_s: float = 0.0

    def step(self, arrivals: Sequence[float], num_workers: int) -> tuple[WorkerLoad, IngressLoad]:
        self.queue.extend(arrivals)
        self.queued_s += sum(arrivals)
        free_s = 0.0
        for _ in range(num_workers):
            left_s = STEP_S * self.efficiency
            if self.under_way:
                work_s = self.under_way.pop(0)
            elif self.queue:
                work_s = self.queue.popleft()
            else:
                free_s += left_s
                continue
            while work_s <= left_s:
                left_s -= work_s
                if not self.queue:
                    work_s = 0.0
                    break
                work_s = self.queue.popleft()
            if work_s > 0:
                self.under_way.append(work_s - left_s)
            else:
                free_s += left_s
        able_s = num_workers * STEP_S * self.efficiency
        self.queued_s = max(0.0, self.queued_s - (able_s - free_s))
        self.waits_s.append(self.queued_s / num_workers)
        given_s = min(self.queued_s, self.backlog_s * num_workers)
        share = 1 - given_s / self.queued_s if self.queued_s > 0 else 0.0
        num_waiting = share * len(self.queue)
        load = IDLE._replace(
            num_sequences=len(self.queue) + len(self.under_way) - num_waiting,
            queued_s=given_s,
            busy=(able_s - free_s) / STEP_S,
        )
        return load, NOTHING._replace(
            prefill_prompts=num_waiting, prefill_queued_s=self.queued_s - given_s
        )


@dataclass
class DecodeWorkers:
    """An arrival is an answer of so many tokens; workers share them evenly, and those for whom
    there is no place wait at the router."""

    name: str = "decode"
    base_s: float = 0.01
    sequence_s: float = 0.002
    max_num_seqs: int = 32
    kv_tokens: int = 16_000
    running: list[list[float]] = field(default_factory=list)  # done, whole
    nums_waiting: list[int] = field(default_factory=list)  # of each step, for room

    def step(self, arrivals: Sequence[float], num_workers: int) -> tuple[WorkerLoad, IngressLoad]:
        self.running += [[0.0, num_tokens] for num_tokens in arrivals]
        room = num_workers * self.max_num_seqs
        each = min(len(self.running), room) / num_workers
        step_s = self.base_s + self.sequence_s * each
        for sequence in self.running[:room]:
            sequence[0] += STEP_S / step_s
        self.running = [one for one in self.running if one[0] < one[1]]
        held = sum(500 + done for done, _ in self.running[:room])
        num_running = min(len(self.running), room)
        load = IDLE._replace(
            num_sequences=num_running,
            num_running=num_running,
            kv_use=held / self.kv_tokens,
            sequence_use=num_running / self.max_num_seqs,
            step_base_s=self.base_s,
            step_load_s=self.sequence_s * num_running,
        )
        num_waiting = len(self.running) - num_running
        self.nums_waiting.append(num_waiting)
        each = 500 + self.running[-1][1] / 2 if num_waiting else 0.0
        return load, NOTHING._replace(
            num_sequences=num_waiting,
            sequence_use=num_waiting / self.max_num_seqs,
            kv_use=num_waiting * each / self.kv_tokens,
        )


@dataclass
class Ingresses:
    """An arrival is a request that is open for so many seconds, however many there are of them."""

    name: str = INGRESS
    now: float = 0.0
    ends: list[float] = field(default_factory=list)

    def step(self, arrivals: Sequence[float], num_workers: int) -> tuple[WorkerLoad, IngressLoad]:
        self.now += STEP_S
        for seconds in arrivals:
            heapq.heappush(self.ends, self.now + seconds)
        while self.ends and self.ends[0] <= self.now:
            heapq.heappop(self.ends)
        return IDLE, NOTHING._replace(num_requests=len(self.ends))


class Change(NamedTuple):
    at: float
    before: int
    after: int


@dataclass
class Run:
    changes: list[Change]
    targets: list[int]  # of every second
    target: int

    def changes_after(self, at: float) -> list[Change]:
        return [change for change in self.changes if change.at >= at]


def simulate(
    workers: Workers,
    arrivals: Callable[[float], Sequence[float]],
    duration_s: float,
    most: int = 40,
    startup_s: float = 20.0,
    target: int = 1,
) -> Run:
    """`arrivals` of the step that begins then. Replicas begin `startup_s` after they are asked
    for; those that are to go are gone at once."""
    num_running, starting = target, list[float]()
    state, run = PoolState(), Run([], [], target)
    window: deque[WorkerLoad] = deque(maxlen=int(LOOK_BACK_S / STEP_S))
    waiting: deque[IngressLoad] = deque(maxlen=window.maxlen)
    for step in range(int(duration_s / STEP_S)):
        now = step * STEP_S
        num_running += sum(at <= now for at in starting)
        starting = [at for at in starting if at > now]
        load, at_router = workers.step(arrivals(now), num_running)
        waiting.append(at_router)
        window.append(load._replace(busy=load.busy / num_running))  # of those that are there
        if step % int(1 / STEP_S):
            continue
        all_requests = IngressLoad(*_means(waiting))
        if workers.name == INGRESS:
            each = all_requests.num_requests / num_running
            ingresses = [NOTHING._replace(num_requests=each, startup_s=startup_s)] * num_running
            samples = {INGRESS: PoolSample(num_running, run.target, 1, most, ingresses, OBJECTIVES)}
        else:
            loads = _shared(window, num_running, startup_s)
            samples = {
                workers.name: PoolSample(num_running, run.target, 1, most, loads),
                INGRESS: PoolSample(1, 1, 1, 1, [all_requests]),
            }
        targets, states = decide(samples, {workers.name: state}, now)
        state, wanted = states[workers.name], targets[workers.name]
        run.targets.append(wanted)
        if wanted == run.target:
            continue
        run.changes.append(Change(now, run.target, wanted))
        starting += [now + startup_s] * (wanted - run.target)
        while num_running + len(starting) > wanted:
            if starting:
                starting.pop()
            else:
                num_running -= 1
        run.target = wanted
    return run


def _shared(
    window: Sequence[WorkerLoad], num_workers: int, startup_s: float
) -> Sequence[WorkerLoad]:
    """Of a pool whose load is shared evenly, as Serve reports it."""
    mean = WorkerLoad(*(value / num_workers for value in _means(window)))._replace(
        busy=sum(load.busy for load in window) / len(window),
        step_base_s=window[-1].step_base_s,
        startup_s=startup_s,
    )
    return [mean] * num_workers


def _means(window: Sequence[tuple[float, ...]]) -> list[float]:
    return [sum(values) / len(window) for values in zip(*window, strict=True)]
