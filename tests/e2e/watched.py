"""What clients on one of `ray_hosts` meet while something happens: read as it is said, and told as
rows of a table."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.e2e.hosts import Host
from tests.e2e.ray_hosts import FRONT, RayHosts
from tests.e2e.telling import say
from tests.e2e.traffic import Request

_COLUMNS = ("requests", "of them failed", "longest", "streams", "broken", "longest pause")


@contextmanager
def traffic(hosts: RayHosts, host: Host) -> Iterator[list[Request]]:
    """At the front of the host's own."""
    requests: list[Request] = []
    with reading(hosts, host, lambda said: requests.append(Request(**said)), "traffic", FRONT):
        yield requests


@contextmanager
def reading(
    hosts: RayHosts, host: Host, note: Callable[[Any], None], module: str, *words: str
) -> Iterator[None]:
    """What a module of ours says on the host, line by line."""
    process = hosts.start(host, "python", "-m", f"tests.e2e.{module}", *words)
    assert process.stdin is not None
    assert process.stdout is not None
    lines = process.stdout

    def read() -> None:
        for line in lines:
            if line.startswith(("[", "{")):  # Ray has its say on the same output
                note(json.loads(line))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield
    finally:
        process.stdin.close()
        process.wait()
        reader.join()


def report_heading(what: str) -> None:
    cells = (what, *_COLUMNS, "last failure after")
    say("| " + " | ".join(cells) + " |\n" + "| --- " * len(cells) + "|")


def report(what: str, since: float, requests: Sequence[Request]) -> None:
    """Of requests that ended since then."""
    ended = [one for one in requests if one.ended >= since]
    probes = [one for one in ended if one.kind == "probe"]
    streams = [one for one in ended if one.kind == "stream"]
    bad = [one for one in ended if one.problem]
    last_s = max((one.ended for one in bad), default=since) - since
    cells = [
        what,
        len(probes),
        sum(bool(one.problem) for one in probes),
        f"{max((one.ended - one.began for one in probes), default=0):.1f} s",
        len(streams),
        sum(bool(one.problem) for one in streams),
        f"{max((one.longest_pause_s for one in streams), default=0):.1f} s",
        f"{last_s:.1f} s",
    ]
    say("| " + " | ".join(map(str, cells)) + " |")
    for problem in sorted({one.problem for one in bad}):
        sys.stderr.write(f"  {problem}\n")
