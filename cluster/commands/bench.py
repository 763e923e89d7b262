"""`kvrelay bench`: requests to a server, so many at a time or a second, and what they took."""

import argparse
import asyncio
import json
import resource
import signal
import sys
import time
from pathlib import Path

from cluster.bench.answer import Tally
from cluster.bench.as_json import as_json
from cluster.bench.load import Interrupted, Load, Outcome, run_load
from cluster.bench.measure import Objectives, Summary, summarise
from cluster.bench.plots import check_plots, write_plots
from cluster.bench.progress import shown
from cluster.bench.table import as_text
from cluster.commands.bench_flags import add_bench_flags, load_of, objectives_of
from cluster.commands.console import answer, say
from engine.errors import ConfigError

_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_bench_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """0 if at least one request was answered, and the server was there until the end."""
    load, objectives = load_of(arguments), objectives_of(arguments)
    if arguments.plots is not None:
        check_plots(arguments.plots)
    if arguments.json is not None:
        _check_json(arguments.json)
    _allow_many_connections()
    try:
        outcome = asyncio.run(_run(load))
    except Interrupted:
        say("interrupted")
        return _INTERRUPTED
    num_complete = _tell(arguments, load, outcome, objectives)
    if outcome.interrupted:
        return _INTERRUPTED
    return 0 if num_complete and not outcome.gone else 1


def _check_json(path: Path) -> None:
    """Before a run, rather than after it."""
    try:
        is_new = not path.exists()
        with path.open("a"):
            pass
    except OSError as error:
        raise ConfigError("json", f"{path}: cannot be written: {error.strerror}") from error
    if is_new:
        path.resolve().unlink()  # and not the link to it


def _allow_many_connections() -> None:
    """As many as the system lets us have, which is often more than it gives unasked."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _run(load: Load) -> Outcome:
    """Ctrl-C ends the load, not the report; a second one ends the program."""
    stop, tally, loop = asyncio.Event(), Tally(), asyncio.get_running_loop()

    def interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        stop.set()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        async with shown(tally, sys.stderr, time.perf_counter, load.num_requests, load.duration_s):
            return await run_load(load, tally=tally, stop=stop)
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _tell(
    arguments: argparse.Namespace, load: Load, outcome: Outcome, objectives: Objectives
) -> int:
    """How many requests were complete."""
    summary = summarise(outcome.records, objectives, num_unsent=outcome.num_unsent)
    try:
        answer(as_text(load, outcome, summary, objectives))
    finally:  # the files are written also where stdout is full, or nobody reads it
        _write(arguments, load, outcome, summary, objectives)
    return summary.num_complete


def _write(
    arguments: argparse.Namespace,
    load: Load,
    outcome: Outcome,
    summary: Summary,
    objectives: Objectives,
) -> None:
    if arguments.json is not None:
        try:
            arguments.json.write_text(
                json.dumps(as_json(load, outcome, summary, objectives), indent=1) + "\n"
            )
        except OSError as error:
            raise ConfigError("json", f"{arguments.json}: {error}") from error
        say(f"wrote {arguments.json}")
    if arguments.plots is not None:
        try:
            paths = write_plots(outcome, arguments.plots)
        except OSError as error:
            raise ConfigError("plots", f"{arguments.plots}: {error}") from error
        for path in paths:
            say(f"wrote {path}")
