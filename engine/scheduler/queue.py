"""Sequences that wait to be admitted, in order of their keys."""

import heapq

from engine.scheduler.sequence import Sequence, SequenceState


class WaitingQueue:
    """A heap; those that finished meanwhile do not count. They are dropped when they come up,
    and all at once when they are the most of it.

    A preempted sequence keeps its key, so it goes before all that arrived later.
    """

    def __init__(self) -> None:
        self._heap: list[Sequence] = []
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, sequence)
        self._num_waiting += 1

    def peek(self) -> Sequence | None:
        while self._heap and self._heap[0].state is SequenceState.FINISHED:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def pop(self) -> Sequence:
        """What `peek` showed last."""
        self._num_waiting -= 1
        return heapq.heappop(self._heap)

    def forget(self) -> None:
        """One that waited here has finished."""
        self._num_waiting -= 1
        if len(self._heap) > 2 * self._num_waiting + 16:
            self._heap = [s for s in self._heap if s.state is not SequenceState.FINISHED]
            heapq.heapify(self._heap)
