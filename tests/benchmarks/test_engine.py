"""What the benchmark of the engine keeps of starts."""

import time
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.engine import Benchmark
from benchmarks.sides import Folders


class Started:
    """An engine that answers at once; of the process that it would be in."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.info = {"kv_bytes": 512 << 20}

    def ask(self, workload: str, seed: int) -> None:
        pass

    def close(self) -> None:
        pass


class Side:
    name = "kvrelay"

    def start(self, *_: Any, settled: bool) -> Started:
        assert not settled, "a user's start does not wait for its cache to be touched"
        return Started()


def test_starts_are_told_and_kept_with_the_cache_that_they_come_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = Benchmark([cast(Any, Side())], Folders(tmp_path, tmp_path, tmp_path), repeats=2)
    benchmark.measure_start()
    samples = benchmark.samples["start"]["kvrelay"]
    assert [sample["kv_bytes"] for sample in samples] == [512 << 20] * 2
    assert all(0 <= sample["second_start_s"] < 60 for sample in samples)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3, "the first one, and a second one for each turn"
    assert all(line.endswith("of its process, with 512 MiB of cache") for line in said)
