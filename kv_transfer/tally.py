"""What was handed off, counted: plain numbers that whoever measures reads."""

from collections import Counter
from dataclasses import dataclass, field

from kv_transfer.histogram import Histogram

TRANSFER_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
POST_S = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.005, 0.01, 0.05)


@dataclass(slots=True)
class PullTally:
    """Hand-offs that were pulled over one connector, since the process began.

    A blob is one group's share of a block: a descriptor. Bytes are `hidden` that were there
    before the holder had come to the prompt's end.
    """

    ends: Counter[str] = field(default_factory=Counter)
    num_blobs: int = 0
    num_bytes: int = 0
    num_hidden_bytes: int = 0
    post_s: Histogram = field(default_factory=lambda: Histogram(POST_S))
    transfer_s: Histogram = field(default_factory=lambda: Histogram(TRANSFER_S))
    exposed_s: Histogram = field(default_factory=lambda: Histogram(TRANSFER_S))


class PullRecord:
    """One hand-off as it goes; `end` counts it, once."""

    def __init__(self, tally: PullTally) -> None:
        self._tally = tally
        self._post_s = 0.0
        self._began: float | None = None  # its first read
        self._read_at: float | None = None
        self._finished_at: float | None = None
        self._num_bytes = self._num_unhidden = 0

    def note_post(self, now: float, took_s: float, num_blobs: int) -> None:
        if self._began is None:
            self._began = now
        self._post_s += took_s
        self._tally.num_blobs += num_blobs

    def note_read(self, now: float, num_bytes: int) -> None:
        self._read_at = now
        self._num_bytes += num_bytes
        if self._finished_at is not None:
            self._num_unhidden += num_bytes

    def note_finished(self, now: float) -> None:
        self._finished_at = now

    def end(self, how: str) -> None:
        """Times are of those that are done and had something to read."""
        tally = self._tally
        tally.ends[how] += 1
        tally.num_bytes += self._num_bytes
        tally.num_hidden_bytes += self._num_bytes - self._num_unhidden
        if how == DONE and self._began is not None and self._read_at is not None:
            finished_at = self._read_at if self._finished_at is None else self._finished_at
            tally.post_s.observe(self._post_s)
            tally.transfer_s.observe(self._read_at - self._began)
            tally.exposed_s.observe(max(0.0, self._read_at - finished_at))


ENDS = DONE, FAILED, NOT_HELD, CANCELLED = "done", "failed", "not_held", "cancelled"


@dataclass(slots=True)
class HolderTally:
    """Leases since the process began, and the commits among them."""

    num_leases: int = 0
    num_commits: int = 0
    num_refused_commits: int = 0  # something was let go of too early
