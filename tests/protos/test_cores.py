"""Whether two workers get into each other's way."""

import os

import pytest

from protos.cores import Cores, contend
from protos.events_pb2 import CoreReport

HERE = Cores("here", 0b1111, 4)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (HERE, True),
        (None, False),  # computes on another device
        (HERE._replace(machine="there"), False),
        (HERE._replace(mask=0b11110000), False),
        (HERE._replace(mask=0b11111000), False),  # eight cores for eight threads
        (HERE._replace(mask=0b01111000), True),
        (HERE._replace(mask=0b11111111), False),
        (HERE._replace(num_threads=1), True),
    ],
)
def test_who_contends(other: Cores | None, expected: bool) -> None:
    assert contend(HERE, other) == contend(other, HERE) == expected


def test_cores_are_read_as_they_were_written() -> None:
    mine, report = Cores.of_this_process(3), CoreReport()
    assert mine.mask.bit_count() == len(os.sched_getaffinity(0))
    mine.write(report)
    assert Cores.read(report) == mine
    assert Cores.read(CoreReport()) is None
