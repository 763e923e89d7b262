"""Which worker holds how much of a prompt. Pure."""

from collections.abc import Iterable, Sequence

from router.worker_index import NOTHING, UNKNOWN_CAPACITY, Match, WorkerIndex
from router.workers import CacheShape, Worker


class PrefixIndex:
    """An index for each worker; who exists and who answers is not its business."""

    def __init__(self, shape: CacheShape | None = None) -> None:
        self._shape = shape
        self._indexes: dict[Worker, WorkerIndex] = {}

    def set_shape(self, shape: CacheShape) -> None:
        """Before the first worker is followed: later, it is the same one."""
        assert shape == self._shape or not self._indexes, "two shapes in one index"
        self._shape = shape

    def of(self, worker: Worker) -> WorkerIndex:
        """Whoever feeds it keeps it; once removed, it counts no more."""
        index = self._indexes.get(worker)
        if index is None:
            assert self._shape is not None, "the shape of the cache is not known yet"
            index = self._indexes[worker] = WorkerIndex(self._shape, UNKNOWN_CAPACITY)
        return index

    def remove(self, worker: Worker) -> None:
        """It is gone."""
        self._indexes.pop(worker, None)

    def __len__(self) -> int:
        """Entries: blocks of workers."""
        return sum(map(len, self._indexes.values()))

    def matches(self, workers: Iterable[Worker], keys: Sequence[int], now: float) -> list[Match]:
        """What each has of a prompt's beginning."""
        known = self._indexes
        return [
            known[worker].match(keys, now) if worker in known else NOTHING for worker in workers
        ]
