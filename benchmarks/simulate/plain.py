"""Choices that the simulator is checked against: those of a small simulation of prefill queues.

One queue for each prefill worker, of which the router knows how long it is. Nothing else is
modelled; the policies of the product are in `router/`.
"""

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.simulate.device import Device, PromptWork
from kv_cache.events import EventBatch, Removed, Stored
from router.ask import Ask, Placement, key_of
from router.workers import Leg, Load, Worker

PLAIN_POLICIES = ("plain-alpha", "plain-round-robin", "plain-least-tokens")


@dataclass(slots=True)
class _Queue:
    """`predicted` is a cache of the same size, into which every prompt goes as it is chosen."""

    held: set[int] = field(default_factory=set)
    predicted: OrderedDict[int, None] = field(default_factory=OrderedDict)
    num_tokens: int = 0
    free_at: float = 0.0

    def num_cached(self, keys: Sequence[int]) -> int:
        return max(_leading(keys, self.held), _leading(keys, self.predicted))

    def predict(self, keys: Sequence[int], most: int) -> None:
        for key in reversed(keys):
            self.predicted[key] = None
            self.predicted.move_to_end(key)
        while len(self.predicted) > most:
            self.predicted.popitem(last=False)


class PlainRouter:
    """Sends every prompt at once: round robin, to the fewest queued tokens, or to the least of
    queue + alpha * its own time. The answer goes to the first decode worker."""

    num_waiting = 0

    def __init__(self, policy: str, alpha: float, device: Device, seed: int) -> None:
        self._policy = policy
        self._alpha = alpha
        self._device = device
        self._random = random.Random(seed)
        self._queues: dict[Worker, _Queue] = {}
        self._decode: list[Worker] = []
        self._given: dict[str, tuple[_Queue, int]] = {}
        self._asks: list[Ask] = []
        self._turn = 0

    def add(self, leg: Leg, worker: Worker) -> None:
        if leg is Leg.PREFILL:
            self._queues[worker] = _Queue()
        else:
            self._decode.append(worker)

    def remove(self, leg: Leg, worker: Worker) -> None:
        if leg is Leg.PREFILL:
            self._queues.pop(worker, None)
        else:
            self._decode.remove(worker)

    def note(self, leg: Leg, worker: Worker, load: Load) -> None:
        pass

    def apply(self, worker: Worker, batch: EventBatch) -> None:
        if worker not in self._queues:
            return
        held = self._queues[worker].held
        for event in batch.events:
            if isinstance(event, Stored):
                held.add(key_of(event.name))
            elif isinstance(event, Removed):
                held.discard(key_of(event.name))

    def submit(self, ask: Ask, now: float) -> None:
        self._asks.append(ask)
        self.num_waiting = len(self._asks)

    def withdraw(self, request_id: str, now: float) -> None:
        self._asks = [ask for ask in self._asks if ask.request_id != request_id]
        self.num_waiting = len(self._asks)

    def dispatch(self, now: float) -> list[tuple[Ask, Placement]]:
        if not self._queues or not self._decode:
            return []
        placed = [(ask, self._place(ask, now)) for ask in self._asks]
        self._asks.clear()
        self.num_waiting = 0
        return placed

    def began(self, request_id: str, now: float) -> None:
        given = self._given.pop(request_id, None)
        if given is not None:
            queue, num_tokens = given
            queue.num_tokens -= num_tokens

    def ended(self, request_id: str, now: float) -> None:
        self.began(request_id, now)

    def _place(self, ask: Ask, now: float) -> Placement:
        block = self._device.block_tokens
        cached = {
            worker: min(queue.num_cached(ask.keys) * block, ask.num_tokens - 1)
            for worker, queue in self._queues.items()
        }
        worker = self._choose(ask, cached, now)
        queue, num_cached = self._queues[worker], cached[worker]
        num_new = ask.num_tokens - num_cached
        queue.free_at = max(queue.free_at, now) + self._seconds(num_new, num_cached)
        queue.num_tokens += num_new
        queue.predict(ask.keys, self._device.num_blocks)
        self._given[ask.request_id] = queue, num_new
        return Placement(self._decode[0], (worker,), (), self._policy, ())

    def _choose(self, ask: Ask, cached: dict[Worker, int], now: float) -> Worker:
        workers = list(self._queues)
        if self._policy == "plain-round-robin":
            self._turn += 1
            return workers[self._turn % len(workers)]
        if self._policy == "plain-least-tokens":
            return min(
                workers, key=lambda one: (self._queues[one].num_tokens, self._random.random())
            )

        def cost_s(worker: Worker) -> float:
            own_s = self._seconds(ask.num_tokens - cached[worker], cached[worker])
            return max(self._queues[worker].free_at - now, 0.0) + self._alpha * own_s

        return min(workers, key=lambda one: (cost_s(one), self._random.random()))

    def _seconds(self, num_new: int, num_cached: int) -> float:
        return self._device.step_s(PromptWork().plus(num_new, num_cached, True))


def _leading(keys: Sequence[int], held: set[int] | OrderedDict[int, None]) -> int:
    for number, key in enumerate(keys):
        if key not in held:
            return number
    return len(keys)
