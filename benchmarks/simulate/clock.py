"""Simulated time: what is to happen when. Nothing here knows what happens."""

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Clock:
    """Runs actions in the order of their times; those of one moment in the order they came."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Action]] = []
        self._number = 0

    def at(self, time: float, action: Action) -> None:
        """`time` in the past is now."""
        self._number += 1
        heapq.heappush(self._queue, (max(time, self.now), self._number, action))

    def after(self, delay_s: float, action: Action) -> None:
        """Without a delay the action runs at once, inside this call."""
        if delay_s > 0:
            self.at(self.now + delay_s, action)
        else:
            action()

    def run(self) -> None:
        """Until nothing is to happen any more."""
        queue = self._queue
        while queue:
            self.now, _, action = heapq.heappop(queue)
            action()
