"""Id lists of different lengths, one for each slot, in one flat array that a kernel can read."""

import numpy as np
import numpy.typing as npt


class Ragged:
    """A slot's list is replaced as a whole; `starts` and `counts` are columns of the owner's.

    Replaced lists leave holes, which are squeezed out when the array is full, so that a
    replacement costs its own length on average.
    """

    def __init__(self, starts: npt.NDArray[np.int32], counts: npt.NDArray[np.int32]) -> None:
        self.ids = np.zeros(64, np.int32)
        self.values = np.zeros(64, np.float32)
        self._starts = starts
        self._counts = counts
        self._end = 0

    def put(
        self,
        slot: int,
        ids: npt.NDArray[np.int32],
        values: npt.NDArray[np.float32] | None = None,
    ) -> None:
        self._counts[slot] = 0
        if self._end + ids.size > self.ids.size:
            self._squeeze(room_for=ids.size)
        end = self._end + ids.size
        self.ids[self._end : end] = ids
        self.values[self._end : end] = 0.0 if values is None else values
        self._starts[slot], self._counts[slot] = self._end, ids.size
        self._end = end

    def _squeeze(self, room_for: int) -> None:
        live = int(self._counts.sum()) + room_for
        ids = np.zeros(max(self.ids.size, 2 * live), np.int32)
        values = np.zeros(ids.size, np.float32)
        end = 0
        for slot in np.flatnonzero(self._counts):
            count, start = self._counts[slot], self._starts[slot]
            ids[end : end + count] = self.ids[start : start + count]
            values[end : end + count] = self.values[start : start + count]
            self._starts[slot] = end
            end += count
        self.ids, self.values, self._end = ids, values, end
