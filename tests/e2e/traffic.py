"""Streams and short requests to one front until told to stop, and what became of each: a JSON
object a line. Runs on one of the `hosts`, as their clients do.

python -m tests.e2e.traffic URL, and ends when its standard input does
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx

NUM_STREAMS = 6
TIMEOUT_S = 90.0  # without a byte: as good as hung
PAUSE_S = 0.1
PROBE = {"max_tokens": 2, "ignore_eos": True}
STREAM = {"max_tokens": 1200, "ignore_eos": True, "stream": True}
PROMPT = "class Reader:\n    def read(self, number: int, other: str) -> None:\n" * 8


class Request(NamedTuple):
    """Times are Unix time. `problem` is empty where all is well."""

    kind: str
    began: float
    ended: float
    longest_pause_s: float
    problem: str


def main() -> None:
    stop = threading.Event()
    lock = threading.Lock()

    def keep_asking(kind: str, number: int) -> None:
        with httpx.Client(timeout=TIMEOUT_S, headers=_headers()) as client:
            count = 0
            while not stop.is_set():
                count += 1
                request = ask(client, kind, f"# {number}, {count}\n{PROMPT}", stop)
                with lock:
                    sys.stdout.write(json.dumps(request._asdict()) + "\n")
                    sys.stdout.flush()
                stop.wait(PAUSE_S)

    with ThreadPoolExecutor(NUM_STREAMS + 1) as threads:
        running = [threads.submit(keep_asking, "probe", 0)]
        running += [threads.submit(keep_asking, "stream", 1 + one) for one in range(NUM_STREAMS)]
        sys.stdin.read()
        stop.set()
        for one in running:
            one.result()


def ask(client: httpx.Client, kind: str, prompt: str, stop: threading.Event) -> Request:
    began = last = time.time()
    longest_s, problem, is_whole = 0.0, "", False
    body: dict[str, Any] = {"prompt": prompt, **(PROBE if kind == "probe" else STREAM)}
    try:
        with client.stream("POST", f"{sys.argv[1]}/v1/completions", json=body) as response:
            is_whole = kind == "probe"
            if response.status_code != 200:
                problem = f"{response.status_code} {response.read().decode()[:300]}"
            for line in response.iter_lines():
                now = time.time()
                longest_s, last = max(longest_s, now - last), now
                if line.startswith('data: {"error"'):
                    problem = line[:300]
                is_whole = is_whole or line == "data: [DONE]"
                if stop.is_set() and not problem:
                    is_whole = True
                    break
    except httpx.HTTPError as error:
        problem = f"cut: {error!r}"
    ended = time.time()
    if not problem and not is_whole:
        problem = "ended in silence"
    return Request(kind, began, ended, max(longest_s, ended - last), problem)


def _headers() -> dict[str, str]:
    return {"Authorization": f"Bearer {os.environ['KVRELAY_API_KEYS']}"}


if __name__ == "__main__":
    main()
