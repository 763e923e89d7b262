"""The processor cores that a worker computes on, as another worker or a router knows them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from protos.events_pb2 import CoreReport

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Cores(NamedTuple):
    machine: str  # the same in every container of one machine
    mask: int  # a bit for each core that the process may run on
    num_threads: int  # that compute

    @classmethod
    def of_this_process(cls, num_threads: int) -> Cores:
        mask = sum(1 << core for core in os.sched_getaffinity(0))
        return cls(_BOOT_ID.read_text().strip(), mask, num_threads)

    @classmethod
    def read(cls, report: CoreReport) -> Cores | None:
        """None of a worker that computes on another device."""
        if not report.num_threads:
            return None
        return cls(report.machine, int.from_bytes(report.mask, "little"), report.num_threads)

    def write(self, report: CoreReport) -> None:
        report.machine, report.num_threads = self.machine, self.num_threads
        report.mask = self.mask.to_bytes((self.mask.bit_length() + 7) // 8, "little")


def contend(one: Cores | None, other: Cores | None) -> bool:
    """Whether both compute on some of the same cores, which are too few for the two of them: then
    each slows the other down."""
    if one is None or other is None or one.machine != other.machine or not one.mask & other.mask:
        return False
    return one.num_threads + other.num_threads > (one.mask | other.mask).bit_count()
