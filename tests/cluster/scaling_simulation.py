"""Pools under load, as the autoscaling policy would see them: time passes here alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from cluster.autoscaling import PoolSample, PoolState, WorkerLoad, decide

STEP_S = 0.25
LOOK_BACK_S = 5.0  # what Serve reports is the mean of so long
IDLE = WorkerLoad(0, 0, 0, 0, 0, 0, 0.01, 0, 0)


class Workers(Protocol):
    """A pool's workers for `STEP_S`, given how many there are now."""

    name: str

    def step(self, arrivals: Sequence[float], num_workers: int) -> WorkerLoad: ...

    """The load of all of them together."""


@dataclass
class PrefillWorkers:
    """Each computes one prompt after the other; a prompt is so many seconds of work."""

    name: str = "prefill"
    efficiency: float = 1.0  # the most of its time that a worker can be at work
    queue: deque[float] = field(default_factory=deque)
    under_way: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    queued_s: float = 0.0

    def step(self, arrivals: Sequence[float], num_workers: int) -> WorkerLoad:
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
        return IDLE._replace(
            num_sequences=len(self.queue) + len(self.under_way),
            queued_s=self.queued_s,
            busy=(able_s - free_s) / STEP_S,
        )


@dataclass
class DecodeWorkers:
    """An arrival is an answer of so many tokens; workers share them evenly."""

    name: str = "decode"
    base_s: float = 0.01
    sequence_s: float = 0.002
    max_num_seqs: int = 32
    kv_tokens: int = 16_000
    running: list[list[float]] = field(default_factory=list)  # done, whole

    def step(self, arrivals: Sequence[float], num_workers: int) -> WorkerLoad:
        self.running += [[0.0, num_tokens] for num_tokens in arrivals]
        room = num_workers * self.max_num_seqs
        each = min(len(self.running), room) / num_workers
        step_s = self.base_s + self.sequence_s * each
        for sequence in self.running[:room]:
            sequence[0] += STEP_S / step_s
        self.running = [one for one in self.running if one[0] < one[1]]
        held = sum(500 + done for done, _ in self.running[:room])
        return IDLE._replace(
            num_sequences=len(self.running),
            num_running=min(len(self.running), room),
            kv_use=held / self.kv_tokens,
            sequence_use=len(self.running) / self.max_num_seqs,
            step_base_s=self.base_s,
            step_load_s=self.sequence_s * min(len(self.running), room),
        )


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
    for step in range(int(duration_s / STEP_S)):
        now = step * STEP_S
        num_running += sum(at <= now for at in starting)
        starting = [at for at in starting if at > now]
        load = workers.step(arrivals(now), num_running)
        window.append(load._replace(busy=load.busy / num_running))  # of those that are there
        if step % int(1 / STEP_S):
            continue
        loads = _shared(window, num_running, startup_s)
        sample = PoolSample(num_running, run.target, 1, most, loads)
        targets, states = decide({workers.name: sample}, {workers.name: state}, now)
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
    means = [sum(values) / len(window) / num_workers for values in zip(*window, strict=True)]
    mean = WorkerLoad(*means)._replace(
        busy=sum(load.busy for load in window) / len(window),
        step_base_s=window[-1].step_base_s,
        startup_s=startup_s,
    )
    return [mean] * num_workers
