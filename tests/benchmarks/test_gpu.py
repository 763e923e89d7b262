"""Every part of the GPU benchmark at its smallest, and what becomes of parts that fail."""

import asyncio
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.gpu import check_workers, results, running
from benchmarks.gpu.__main__ import TOTAL_S, main
from benchmarks.gpu.bench import COPY, GEMM, LIMITS_PART, Bench
from benchmarks.gpu.models import write_config
from benchmarks.gpu.offline import times_of_all
from benchmarks.gpu.parts import BY_NAME, PARTS, Group, chosen
from benchmarks.gpu.results import Check, Figure
from benchmarks.gpu.running import Running
from benchmarks.gpu.steps import sequence_bytes
from benchmarks.gpu.workload import Offline
from benchmarks.workloads import ModelShape
from engine.config import EngineConfig
from engine.engine import Engine
from tests.interpreter import language_is_patched_once, sums_are_not_checked_for_overflow

__all__ = ["language_is_patched_once", "sums_are_not_checked_for_overflow"]

# without those that start processes or make a second model of transformers'
OTHERS = ("check-tests", "check-families", "check-workers")
SMOKED = [p.name for p in PARTS if p.name not in OTHERS]
VISIT_S, START_S = 900.0, 120.0


@pytest.fixture(autouse=True)
def no_signal_is_kept() -> Iterator[None]:
    """By the command, which is a process of its own elsewhere."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


@pytest.mark.parametrize("name", SMOKED)
def test_a_part_finds_something_and_nothing_wrong(name: str, folder: Path) -> None:
    part = BY_NAME[name]
    with torch.inference_mode(), np.errstate(over="ignore"):
        part.load().run(Bench(name, True, folder, time.monotonic() + 100))
    found = results.read(folder / f"{name}.jsonl")
    assert {r.part for r in found} == {name}
    assert all(r.passed for r in found if isinstance(r, Check))
    figures = [r for r in found if isinstance(r, Figure)]
    assert all(math.isfinite(f.value) for f in figures)
    assert any(isinstance(r, Figure if part.measures else Check) for r in found)


def test_a_visit_to_a_lent_card_is_one_command_and_what_is_tried_out() -> None:
    """With the card's start. Limits are for what goes wrong: more than all of them is cut off by
    the whole's."""
    checks, measures, attempts = (chosen([group]) for group in Group)
    assert [*checks, *measures, *attempts] == list(PARTS) == chosen([])
    assert measures[0].name == LIMITS_PART
    together_s = max(part.expected_s for part in checks)
    assert together_s + sum(part.expected_s for part in measures) <= TOTAL_S * 0.9
    assert max(part.limit_s for part in checks) <= TOTAL_S / 3
    tried_s = sum(part.limit_s for part in (measures[0], *attempts))
    assert START_S + TOTAL_S + tried_s <= VISIT_S


def test_all_sequences_are_there_while_their_steps_are_timed(tmp_path: Path) -> None:
    """Though the first of them have drawn for as many steps as it takes to read the others."""
    shape = ModelShape("tiny", 16, 1, 2, 1, 32, 64)
    write_config(tmp_path, shape, 512)
    engine = Engine.create(
        EngineConfig(
            model=str(tmp_path),
            load_format="dummy",
            dtype="float32",
            device="cpu",
            kernels="reference",
            max_num_seqs=24,
            max_num_batched_tokens=32,
            kv_cache_memory_bytes=1 << 22,
            num_threads=1,
            async_scheduling=True,
        )
    )
    begun: list[int] = []
    prompts = Offline(24, 16, 0).prompts(shape.vocab_size, seed=1)
    times = times_of_all(engine, prompts, 8, lambda: begun.append(engine.num_steps))
    assert begun[0] > 24 * 16 // 32
    assert len(times) == 8
    assert not engine.has_work
    engine.close()


SCRIPT = """
import sys, time
from pathlib import Path
from benchmarks.gpu import results
name, folder = sys.argv[1], Path(sys.argv[2])
results.append(folder / f"{name}.jsonl", results.Figure(name, "half", "ms", 2.0, 1.0, 0.5))
print("so far")
if name == "failing":
    raise MemoryError("the card is full")
time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("name", "limit_s", "end"),
    [("failing", 60.0, "the card is full"), ("hanging", 0.4, "its time was over")],
)
def test_a_part_that_ends_badly_leaves_what_it_found(
    name: str, limit_s: float, end: str, tmp_path: Path
) -> None:
    part = Running(name, tmp_path, limit_s, True, (sys.executable, "-c", SCRIPT))
    if name == "hanging":
        while not results.read(tmp_path / "hanging.jsonl"):
            time.sleep(0.01)
    outcome = part.wait()
    assert end in outcome
    assert not outcome.startswith("done")
    (figure,) = results.read(tmp_path / f"{name}.jsonl")
    assert isinstance(figure, Figure)
    assert figure.share == 0.5


def test_nothing_that_a_part_started_is_left_when_it_has_ended(tmp_path: Path) -> None:
    """It would have some of the card while the next part is measured."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    start = f"subprocess.Popen(['sleep', '1000'], stdout=open({str(pipe)!r}, 'w'))"
    script = f"import subprocess; {start}"
    leaving = Running("leaving", tmp_path, 60.0, True, (sys.executable, "-c", script))
    with pipe.open() as left:
        assert leaving.wait().startswith("done")
        assert left.read() == ""  # at its end: nobody has it open


def test_who_is_not_gone_when_it_is_killed_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a process that hangs in a driver."""
    monkeypatch.setattr(running, "KILLED_S", 0.05)
    hanging = Running("hanging", tmp_path, 0.1, True, (sys.executable, "-c", SCRIPT))
    with monkeypatch.context() as kept:
        kept.setattr(os, "killpg", lambda *_: None)
        assert hanging.wait().endswith("its time was over, and it is still there")
    assert hanging.end()


def test_a_result_that_was_cut_short_is_none(tmp_path: Path) -> None:
    path = tmp_path / "part.jsonl"
    results.append(path, Check("part", "whole", 0.0, 1.0))
    with path.open("a") as file:
        file.write('{"kind": "Check", "part": "pa')
    assert [r.name for r in results.read(path)] == ["whole"]


def test_workers_that_hang_leave_time_for_those_of_the_next_connector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a library hangs on a card's memory."""

    async def served(bench: Bench, folder: Path, connector: str, *_: object) -> None:
        if connector == "nixl":
            (folder / "nixl decode.log").write_text("about to hang")
            await asyncio.sleep(1000.0)
        bench.check(connector, 0.0, 0.0)

    model = SimpleNamespace(greedy=lambda *_: [])
    monkeypatch.setattr(check_workers, "make_tiny", lambda *_, **__: model)
    monkeypatch.setattr(check_workers, "_served", served)
    lefts = iter((100.0, check_workers.LEFT_S + 0.05, check_workers.LEFT_S))
    monkeypatch.setattr(Bench, "seconds_left", property(lambda _: next(lefts)))
    said: list[str] = []
    monkeypatch.setattr(Bench, "say", lambda _, text: said.append(text))
    check_workers.run(Bench("workers", True, tmp_path, 0.0))
    names = [result.name for result in results.read(tmp_path / "workers.jsonl")]
    assert names == ["socket", "nixl is refused, see the log", "auto"]
    assert any("about to hang" in text for text in said)


def test_limits_of_this_run_are_used(tmp_path: Path) -> None:
    bench = Bench("steps", True, tmp_path, 0.0)
    assert bench.limits.read_bytes_s == 4.3e12
    for name, value in ((COPY, 4200.0), (GEMM, 700.0)):
        results.append(tmp_path / "limits.jsonl", Figure(LIMITS_PART, name, "", value))
    assert bench.limits.read_bytes_s == pytest.approx(4.2e12)
    assert bench.limits.gemm_flops_s == pytest.approx(7e14)


def test_goals_and_bounds() -> None:
    def met(share: float, most: bool) -> bool | None:
        return Figure("p", "f", "ms", 1.0, share=share, goal=0.8, goal_is_most=most).met

    assert [met(0.7, False), met(0.8, False), met(0.7, True), met(0.9, True)] == [
        False, True, True, False,
    ]  # fmt: skip
    assert not Check("p", "c", math.nan, 1.0).passed
    text = results.as_text([Check("p", "c", math.nan, 1.0), Figure("p", "f", "ms", 2.0, 1.0, 0.5)])
    assert "NO" in text
    assert "50.0%" in text
    json.dumps(results.as_json([Check("p", "c", math.nan, 1.0)]), allow_nan=False)


def test_the_command_writes_its_three_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["run", "--smoke", "--part", "limits", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    assert main() == 0
    summary = json.loads((tmp_path / "results.json").read_text())
    assert summary["parts"]["limits"].startswith("done")
    assert [r["name"] for r in summary["results"]][::2] == [COPY, GEMM]
    assert "SMOKE" in (tmp_path / "table.txt").read_text()
    assert (tmp_path / "log.txt").stat().st_size > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whoever_ends_a_run_has_what_its_parts_found(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    class EndedInTheSecond:
        def __init__(self, name: str, folder: Path, limit_s: float, smoke: bool) -> None:
            self.name = name
            results.append(folder / f"{name}.jsonl", Figure(name, "rate", "GB/s", 7.0))

        def wait(self) -> str:
            if self.name == "linears":
                os.kill(os.getpid(), number)
            return "done in 1 s"

        def end(self) -> bool:
            ended.append(self.name)
            return True

        def log(self) -> str:
            return f"{self.name} says"

    command = ["run", "--part", "limits", "--part", "linears", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr("benchmarks.gpu.__main__.Running", EndedInTheSecond)
    with pytest.raises(KeyboardInterrupt):
        main()
    summary = json.loads((tmp_path / "results.json").read_text())
    assert summary["parts"] == {"limits": "done in 1 s", "linears": "ended with the run"}
    assert [r["value"] for r in summary["results"]] == [7.0, 7.0]
    assert "rate" in (tmp_path / "table.txt").read_text()
    assert (tmp_path / "log.txt").read_text() == "limits sayslinears says"
    assert ended == ["linears"]


def test_a_card_with_less_memory_gets_fewer_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 2k tokens each: beside Llama-3.1-8B an H100 has no room for 256."""
    monkeypatch.setattr(Bench, "device", torch.device("cuda"))
    bench = Bench("steps", False, tmp_path, 0.0)
    seq_bytes = sequence_bytes(bench, 2112)
    assert seq_bytes == 34 * (8 << 20)
    for free_gib, count in ((63.5, 224), (123.0, 256)):
        free = int(free_gib * (1 << 30))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 2 * free))
        assert bench.fitting(256, seq_bytes) == count
