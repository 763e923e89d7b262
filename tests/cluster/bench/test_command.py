"""`kvrelay bench`: its flags, and what it tells."""

import argparse
import asyncio
import errno
import fcntl
import io
import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import cli
from cluster.bench import drive
from cluster.bench.answer import FailureKind, Tally
from cluster.bench.arrivals import ClosedLoop, OpenLoop, Recorded
from cluster.bench.lengths import Fixed, Uniform
from cluster.bench.load import Load, Outcome
from cluster.bench.measure import Objectives, summarise
from cluster.bench.plots import tokens_by_second, under_way_by_second, write_plots
from cluster.bench.progress import line, shown
from cluster.bench.prompts import PromptForm
from cluster.bench.table import as_text
from cluster.bench.trace import Trace
from cluster.bench.workload import Synthetic
from cluster.commands.bench_flags import NUM_REQUESTS, add_bench_flags, load_of, objectives_of
from engine.errors import ConfigError
from engine.request import GenerationRequest
from tests.cluster.bench.records import answered, failed
from tests.cluster.bench.virtual_time import now, run_virtually
from tests.cluster.fakes import Step, say
from tests.cluster.live_server import live_server, wait_until


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_bench_flags(parser)
    return parser.parse_args(["http://here:1", *words])


def test_what_nobody_says() -> None:
    load = load_of(parse())
    assert load == Load(
        "http://here:1", Synthetic(Fixed(512), Fixed(64)), ClosedLoop(1), NUM_REQUESTS
    )
    assert not objectives_of(parse()).any


def test_what_flags_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", "k")
    words = "--rate 5 --arrivals bursty --duration 3 --input-tokens uniform:5:9 --turns 2"
    more = "--prefix-share 0.5 --prefix-groups 3 --seed 4 --api-key-env THE_KEY --stop-at-eos"
    load = load_of(parse(*words.split(), *more.split(), "--extra-body", '{"top_k": 1}'))
    assert load.workload == Synthetic(Uniform(5, 9), Fixed(64), 4, 0.5, 3, Fixed(2))
    assert load.arrivals == OpenLoop(5.0, 0.25)
    assert (load.num_requests, load.duration_s, load.api_key) == (None, 3.0, "k")
    assert not load.ignore_eos
    assert load.extra == {"top_k": 1}


@pytest.mark.parametrize(
    ("words", "arrivals"),
    [
        ("--rate 2", OpenLoop(2.0, 1.0)),
        ("--rate 2 --arrivals constant", OpenLoop(2.0, None)),
        ("--rate 2 --arrivals bursty --burstiness 0.1", OpenLoop(2.0, 0.1)),
        ("--trace t --trace-speed 2", Recorded(2.0)),
        ("--trace t --concurrency 4", ClosedLoop(4)),
        ("--trace t --rate 4", OpenLoop(4.0)),
    ],
)
def test_when_requests_are_sent(
    words: str, arrivals: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t").write_text('{"timestamp": 0, "input_length": 9, "output_length": 2}\n')
    load = load_of(parse(*words.split()))
    assert load.arrivals == arrivals
    if "--trace" in words:
        assert load.workload == Trace(Path("t"), most=1)
        assert load.num_requests is None


@pytest.mark.parametrize("words", ["--trace-speed 0", "--rate 1 --trace-speed 2"])
def test_bad_speeds_of_a_trace_are_named(words: str, tmp_path: Path) -> None:
    trace = tmp_path / "t"
    trace.write_text('{"timestamp": 0, "input_length": 9, "output_length": 2}\n')
    with pytest.raises(ConfigError, match="^trace_speed: "):
        load_of(parse("--trace", str(trace), *words.split()))


def test_objectives_are_in_milliseconds() -> None:
    words = "--ttft-objective 500 --itl-objective 50 --tpot-objective 25"
    assert objectives_of(parse(*words.split())) == Objectives(0.5, 0.05, 0.025)


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ("--concurrency 0", "concurrency"),
        ("--concurrency 1000000", "concurrency"),
        ("--rate -1", "rate"),
        ("--rate nan", "rate"),
        ("--rate inf", "rate"),
        ("--rate 1 --concurrency 1", "rate"),
        ("--arrivals poisson", "arrivals"),
        ("--burstiness 2", "burstiness"),
        ("--rate 1 --burstiness 2", "burstiness"),
        ("--rate 1 --arrivals bursty --burstiness 0", "burstiness"),
        ("--requests 0", "requests"),
        ("--duration 0", "duration"),
        ("--timeout 0", "timeout"),
        ("--warm-up -1", "warm_up"),
        ("--think-time -1", "think_time"),
        ("--input-tokens 0", "input_tokens"),
        ("--output-tokens many", "output_tokens"),
        ("--prefix-share 1.5", "prefix_share"),
        ("--prefix-groups 2", "prefix_groups"),
        ("--prefix-share 0.5 --prefix-groups 0", "prefix_groups"),
        ("--turns 0", "turns"),
        ("--trace t --turns 2", "turns"),
        ("--trace /absent", "trace"),
        ("--trace /dev/null", "trace"),
        ("--trace /dev/null --trace-scale 0", "trace_scale"),
        ("--trace-scale 2", "trace_scale"),
        ("--token-ids 9-5", "token_ids"),
        ("--token-ids x", "token_ids"),
        ("--token-ids 0-99999999", "token_ids"),
        (f"--token-ids 0-{'9' * 5000}", "token_ids"),
        ("--input-tokens 99999999999", "input_tokens"),
        ("--input-tokens lognormal:1e308:10", "input_tokens"),
        ("--output-tokens uniform:1:99999999999", "output_tokens"),
        ("--turns lognormal:2:1:99999999", "turns"),
        ("--api-key-env NO_SUCH_KEY", "api_key_env"),
        ("--extra-body [1]", "extra_body"),
        ("--extra-body {", "extra_body"),
        (f"--extra-body {'[' * 100_000}", "extra_body"),
        ("--temperature -1", "temperature"),
        ("--ttft-objective 0", "ttft_objective"),
        ("--json /absent/file", "json"),
        ("--json /", "json"),
        (f"--json /tmp/{'j' * 300}", "json"),
        ("--plots /proc/self", "plots"),
        ("--endpoint chat --token-ids 1-5", "prompts"),
    ],
)
def test_bad_flags_are_named(words: str, field: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "http://127.0.0.1:1", "--model", "m", *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvrelay bench: --{field.replace('_', '-')}: ")
    assert error.count("\n") == 1


def test_a_file_is_tried_before_a_run_and_left_as_it_was(tmp_path: Path) -> None:
    """Nobody answers there."""
    old, new, link = (tmp_path / name for name in ("old.json", "new.json", "link.json"))
    old.write_text("kept")
    link.symlink_to(new)
    for path in (old, new, link):
        assert cli.main(["bench", "http://127.0.0.1:1", "--json", str(path)]) == 2
    assert old.read_text() == "kept"
    assert not new.exists()
    assert link.is_symlink()


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://x", "http://", "http://x:port", "http://[", "x?y=1"),
        *("http://a..b", f"http://{'a' * 64}.c", "http://世.b", "http://b/€", "http://b/a b"),
    ],
)
def test_bad_urls_are_named(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", url]) == 2
    assert capsys.readouterr().err.startswith("kvrelay bench: url: ")


@pytest.mark.parametrize("url", ["http://me:secret@here", "me:secret@here:port", "secret@[::1]"])
def test_a_password_in_a_url_is_refused_and_not_shown(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", url]) == 2
    told = capsys.readouterr().err
    assert told.startswith("kvrelay bench: url: has a user")
    assert "secret" not in told


def test_a_key_that_is_no_header_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_API_KEY", "a\r\nHost: b")
    with pytest.raises(ConfigError, match=r"^api_key_env: \$KVRELAY_API_KEY") as refused:
        load_of(parse())
    assert "Host: b" not in str(refused.value)


def test_a_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with live_server() as live:
        live.backend.script = say("abc")
        words = ["bench", live.url, "--requests", "6", "--concurrency", "2", "--input-tokens", "9"]
        words += ["--output-tokens", "2", "--ttft-objective", "60000"]
        words += ["--json", str(tmp_path / "run.json"), "--plots", str(tmp_path / "plots")]
        assert cli.main(words) == 0
    out = capsys.readouterr().out.splitlines()
    rows = {row.split("  ")[0]: row.split() for row in out if row}
    assert rows["requests"][1] == "6"
    assert rows["prompt tokens"][2] == "54"
    assert rows["output tokens"][2] == "12"
    assert rows["time to first token"][-1] == "6"
    assert any(row.startswith("goodput") and "100.0% of all" in row for row in out)
    told: dict[str, Any] = json.loads((tmp_path / "run.json").read_text())
    assert told["summary"]["num_complete"] == 6
    assert told["summary"]["ttft_s"]["num"] == 6
    assert told["load"]["workload"]["input_tokens"] == {"length": 9}
    assert len(told["records"]) == 6
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {
        "ttft.png",
        "itl.png",
        "timeline.png",
    }


@pytest.mark.parametrize("is_left", [False, True])
def test_what_was_measured_is_kept_where_stdout_takes_nothing(
    is_left: bool, tmp_path: Path
) -> None:
    reader, stdout = os.pipe()
    os.close(reader)
    file = tmp_path / "run.json"
    with live_server() as live, open("/dev/full", "wb") as full:
        live.backend.script = say("abc")
        words = ["bench", live.url, "--requests", "1", "--input-tokens", "9", "--json", str(file)]
        done = subprocess.run(
            [sys.executable, "-m", "cluster.cli", *words, "--output-tokens", "2"],
            stdout=stdout if is_left else full,
            stderr=subprocess.PIPE,
            text=True,
        )
    os.close(stdout)
    assert done.returncode == 1
    assert ("No space left on device" in done.stderr) is not is_left
    assert json.loads(file.read_text())["summary"]["num_complete"] == 1


def test_nothing_answered_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    with live_server() as live:
        words = ["bench", live.url, "--requests", "2", "--input-tokens", "2000"]
        assert cli.main([*words, "--output-tokens", "3"]) == 1
    assert "FAILED 2 x HTTP 400: prompt: " in capsys.readouterr().out


def test_a_server_that_has_gone_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drive, "_AGAIN_S", 0.001)
    words = "--model m --token-ids 1-99 --duration 3600 --concurrency 2"
    assert cli.main(["bench", "http://127.0.0.1:1", *words.split()]) == 1
    told = capsys.readouterr().out
    assert "ENDED before its time" in told
    # Ten for each; the other stream's may be under way at the last.
    assert re.search("FAILED 2[01] x not connected", told)


def test_ctrl_c_tells_what_was_measured(tmp_path: Path) -> None:
    def script(request: GenerationRequest) -> Iterator[Step]:
        yield from say("abc")(request) if len(live.backend.streams) < 3 else stuck(request)

    def stuck(request: GenerationRequest) -> Iterator[Step]:
        yield next(say("abc")(request))
        yield asyncio.Event().wait()

    with live_server() as live:
        live.backend.script = script
        words = ["bench", live.url, "--requests", "9", "--json", str(tmp_path / "run.json")]
        command = subprocess.Popen(
            [sys.executable, "-m", "cluster.cli", *words, "--input-tokens", "9"],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            wait_until(lambda: len(live.backend.streams) == 3, 60)
            command.send_signal(signal.SIGINT)
            out, _ = command.communicate(timeout=60)
        finally:
            command.kill()
    assert command.returncode == 130
    assert "interrupted; so far" in out
    summary = json.loads((tmp_path / "run.json").read_text())["summary"]
    assert (summary["num_complete"], summary["num_interrupted"]) == (2, 1)


def test_a_table_names_what_failed() -> None:
    records = (
        answered(0.5, [0.1], due_s=0.0, num_output=1),
        failed(FailureKind.STATUS, 429),
        failed(FailureKind.INTERRUPTED),
    )
    outcome = Outcome("m", PromptForm.TOKENS, records, 4, True, 0.0)
    load = Load("http://x", Synthetic(Fixed(1), Fixed(1)))
    text = as_text(load, outcome, summarise(records, num_unsent=4), Objectives())
    for words in (
        "interrupted; so far",
        "FAILED 1 x HTTP 429: refused said 429",
        "not sent",
        "1 answers are shorter",
    ):
        assert words in text
    assert "goodput" not in text


def test_a_late_generator_says_so() -> None:
    records = [answered(0.5, [0.1], sent_s=1.0, due_s=0.5)]
    outcome = Outcome("m", PromptForm.TOKENS, tuple(records), 0, False, 0.0)
    load = Load("http://x", Synthetic(Fixed(1), Fixed(1)))
    text = as_text(load, outcome, summarise(records), Objectives())
    assert "this machine could not send in time" in text


def test_a_progress_line() -> None:
    text = line(Tally(num_sent=12, num_ended=8, num_failed=1, num_chunks=99), 0.5, 1234.0)
    assert text == ("[############............] 8 answered, 1 FAILED, 4 under way, 1,234 chunks/s")
    assert line(Tally(), None, 0.0) == "0 answered, 0 under way, 0 chunks/s"


class Terminal(io.StringIO):
    """One that is gone after so many lines."""

    def __init__(self, num_lines: int) -> None:
        super().__init__()
        self.num_lines = num_lines
        self.num_refused = 0

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.getvalue().count("\r") >= self.num_lines:
            self.num_refused += 1
            raise OSError(errno.EIO, "it has hung up")
        return super().write(text)


@pytest.mark.parametrize("columns", [0, 1, 20, 80])
def test_a_progress_line_stays_on_a_narrow_terminal_s(columns: int) -> None:
    seen, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    async def run() -> None:
        with open(terminal, "w") as stream:
            async with shown(Tally(), stream, now, 4, None):
                await asyncio.sleep(0.3)

    run_virtually(run())
    told = os.read(seen, 999).decode().split("\r")[1].removesuffix("\x1b[K")
    os.close(seen)
    assert told == line(Tally(), 0.0, 0.0)[: columns - 1 if columns > 1 else None]


@pytest.mark.parametrize("num_lines", [0, 1])
def test_a_terminal_that_goes_ends_no_run(num_lines: int) -> None:
    terminal = Terminal(num_lines)

    async def run() -> str:
        async with shown(Tally(num_ended=1), terminal, now, 4, None):
            await asyncio.sleep(1.1)
            return "measured"

    assert run_virtually(run()) == "measured"
    assert terminal.getvalue().count("1 answered") == num_lines
    assert terminal.num_refused == 5 - num_lines


def test_a_timeline_has_every_token() -> None:
    records = [answered(0.5, [0.4, 0.4], sent_s=1.0, num_output=6), failed(FailureKind.TIMEOUT)]
    assert tokens_by_second(records, 0.0) == {1: 4.0, 2: 2.0}
    assert under_way_by_second(records, 0.0) == {0: 1, 1: 2, 2: 1}


def test_a_picture_that_cannot_be_written_is_told_after_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "itl.png").mkdir()
    with live_server() as live:
        live.backend.script = say("abc")
        words = ["bench", live.url, "--requests", "1", "--input-tokens", "9"]
        assert cli.main([*words, "--output-tokens", "2", "--plots", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert "requests" in said.out
    assert f"kvrelay bench: --plots: {tmp_path}: " in said.err
    assert "itl.png" in said.err


def test_plots_of_nothing(tmp_path: Path) -> None:
    outcome = Outcome("m", PromptForm.TOKENS, (failed(FailureKind.TIMEOUT),), 0, False, 0.0)
    assert all(path.stat().st_size for path in write_plots(outcome, tmp_path))
