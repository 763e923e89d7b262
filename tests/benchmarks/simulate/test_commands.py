"""The command line: tables, JSON and pictures, and one line for what is wrong."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.simulate.__main__ import main
from benchmarks.simulate.figures import Figures
from benchmarks.simulate.sweep import sweep

FEW = ("--rate", "2", "--seconds", "6", "--prefill", "2", "--decode", "2")


def said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["simulate", *words])
    code = main()
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("command", "rows"),
    [
        (("compare", "--policy", "cost", "--policy", "random"), ["cost", "random"]),
        (("routers", "--counts", "1,3"), ["1 router", "3 routers"]),
        (("cells", "--workers", "8", "--counts", "2,1"), ["2 cells of 4", "1 cell of 8"]),
    ],
)
def test_a_row_for_each_run(
    command: tuple[str, ...],
    rows: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "figures.json"
    plots = () if command[0] == "cells" else ("--plots", str(tmp_path / "plots"))
    code, text, _ = said(monkeypatch, capsys, *command, *FEW, "--json", str(out), *plots)
    assert code == 0
    table = [line for line in text.splitlines() if line.startswith("| ")]
    assert [line.split("|")[1].strip() for line in table] == ["", *rows]
    found = json.loads(out.read_text())
    assert list(found) == rows
    for figures in found.values():
        assert 0 <= figures["good_share"] <= 1
        assert figures["num_refused"] == 0
    if plots:
        assert (tmp_path / "plots" / "ttft.png").read_bytes().startswith(b"\x89PNG")


def test_ideal_assumptions_leave_traffic_and_queues_as_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("compare", "--policy", "plain-alpha", *FEW)

    def told(*more: str) -> str:
        code, text, _ = said(monkeypatch, capsys, *words, *more)
        assert code == 0
        return next(line for line in text.splitlines() if line.endswith("requests"))

    _, slow = told("--speed", "1").split(", ")
    assert told("--ideal", "--speed", "1") == f"2 prefill + 1 decode, {slow}"
    assert told("--ideal") == told("--ideal", "--speed", "4.5")


def test_what_is_wrong_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0}\n')
    code, _, error = said(monkeypatch, capsys, "describe", "--trace", str(trace))
    assert code == 2
    assert "trace.jsonl:1: input_length: None" in error
    code, _, error = said(monkeypatch, capsys, "compare", *FEW, "--decode", "0")
    assert code == 2
    assert "num_decode: 0, must be at least 1" in error


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("compare", *FEW, "--death", "1:prefill:2"), "death: prefill worker 2, there are 2"),
        (("compare", *FEW, "--ideal", "--death", "1:decode:1"), "death: decode worker 1"),
        (("compare", "--rate", "0.001", "--seconds", "1"), "seconds: no request comes in them"),
        (("describe", "--rate", "0.001", "--seconds", "1"), "seconds: no request comes in them"),
        (("compare", *FEW, "--prefill", "0", "--policy", "plain-alpha"), "needs prefill workers"),
        (
            ("cells", *FEW, "--prefill", "0", "--workers", "8", "--counts", "1"),
            "a cell has 0 prefill",
        ),
    ],
)
def test_what_cannot_be_simulated_is_told_in_a_line(
    command: tuple[str, ...],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, error = said(monkeypatch, capsys, *command)
    assert code == 2
    assert told in error


@pytest.mark.parametrize(
    "words",
    [
        ("peak", "--least-share", "0"),
        ("colocated", "--least-share", "nan"),
        ("compare", "--death", "nan:decode:0"),
        ("compare", "--death", "1:decode:0:-1"),
        ("compare", "--event-delay", "nan"),
        ("compare", "--report-delay", "-1"),
    ],
)
def test_a_number_that_cannot_be_is_refused_by_the_option_s_name(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        said(monkeypatch, capsys, *words)
    assert f"argument {words[1]}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [("cells", "--plots", "here"), ("describe", "--plots", "here"), ("describe", "--alpha", "2")],
)
def test_what_a_command_has_no_use_for_is_refused(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        said(monkeypatch, capsys, *words)
    assert f"unrecognized arguments: {words[1]}" in capsys.readouterr().err


@pytest.mark.parametrize("day", ["0.5:-1", "0.5:0", "0.5:nan", "0.5:inf"])
def test_a_day_that_takes_no_time_or_never_ends_is_refused(
    day: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        said(monkeypatch, capsys, "describe", "--day", day)
    assert "the period must be above 0" in capsys.readouterr().err


def test_the_peak_is_found_between_the_loads_that_are_fine_and_those_that_are_not() -> None:
    def measure(load: float) -> Figures:
        return _figures(good=1.0 if load <= 7.0 else 0.5, rate=load)

    for start in (1.0, 5.0, 30.0):
        peak = sweep(measure, start, 0.9).peak
        assert peak is not None
        assert 7.0 / 1.03 <= peak[0] <= 7.0
    assert sweep(lambda load: _figures(0.1, load), 1.0, 0.9).peak is None


def test_where_everything_is_good_the_loads_end_at_a_hundred_times_the_first() -> None:
    found = sweep(lambda load: _figures(1.0, load), 2.0, 0.9)
    assert found.is_open
    assert found.peak is not None
    assert 150.0 < found.peak[0] < 270.0


def _figures(good: float, rate: float) -> Figures:
    from cluster.bench.measure import Spread

    spread = Spread(1, 0.0, {50: 0.0, 90: 0.0, 99: 0.0}, 0.0)
    return Figures(
        num_requests=1, num_refused=0, rate=rate, ttft=spread, tpot=spread, total=spread,
        good_share=good, goodput=good * rate, hit_share=0.0, fetch_share=0.0, local_share=0.0,
        imbalance={}, busy_share={}, gpu_s=0.0, busy_gpu_s=0.0, num_moved=0, num_preemptions=0,
        num_spilled=0, sent_gb=0.0, span_s=1.0,
    )  # fmt: skip
