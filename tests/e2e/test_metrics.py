"""The front's page of a whole cluster: what was done, and by whom, through either ingress."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cluster.metrics.samples import read
from tests.e2e.cluster import Cluster, wait_until

SMALL = ["--dtype", "float32", "--kv-cache-memory-bytes", "48MiB", "--max-num-seqs", "16"]
SECRET = "Xylophone quartz"
NUM_REQUESTS, NUM_TOKENS = 6, 5


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("targets") / "targets.json"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, targets: Path) -> Iterator[Cluster]:
    log = tmp_path_factory.mktemp("cluster") / "log"
    flags = ["--ingress-replicas", "2", "--log-format", "json", "--log-requests"]
    cluster = Cluster(log, *flags, "--metrics-targets-file", str(targets), *SMALL)
    yield cluster
    cluster.kill()


def up(page: str) -> dict[str, list[float]]:
    """By pool, of every replica."""
    found: dict[str, list[float]] = {}
    for line in page.splitlines():
        if line.startswith("kvrelay:replica_up{"):
            pool = line.split('pool="')[1].split('"')[0]
            found.setdefault(pool, []).append(float(line.rsplit(" ", 1)[1]))
    return found


def total(page: str, name: str, *labels: str) -> float:
    """Over all replicas."""
    lines = [one for one in page.splitlines() if one.startswith(f"kvrelay:{name}{{")]
    return sum(
        float(one.rsplit(" ", 1)[1]) for one in lines if all(label in one for label in labels)
    )


def page_of(cluster: Cluster) -> str:
    response = httpx.get(f"{cluster.url}/metrics", timeout=10)
    assert response.status_code == 200
    return response.text


def test_one_scrape_has_all_that_was_done(cluster: Cluster, targets: Path) -> None:
    wait_until(lambda: up(page_of(cluster)) == ALL_UP, 30)
    before = page_of(cluster)
    num_prompt = 0
    for number in range(NUM_REQUESTS):
        body = {"prompt": f"{SECRET} {number}", "max_tokens": NUM_TOKENS, "ignore_eos": True}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60).json()
        num_prompt += answer["usage"]["prompt_tokens"]
    page = page_of(cluster)

    def done(name: str, *labels: str) -> float:
        return total(page, name, *labels) - total(before, name, *labels)

    assert done("prompt_tokens_total") == num_prompt
    assert done("generation_tokens_total") == NUM_REQUESTS * NUM_TOKENS
    assert done("drawn_tokens_total") == NUM_REQUESTS * NUM_TOKENS
    assert done("prompt_tokens_by_source_total", 'pool="decode"') == num_prompt
    assert done("request_success_total", 'finished_reason="length"') == NUM_REQUESTS
    assert done("time_to_first_token_seconds_count") == NUM_REQUESTS
    assert done("prefill_decisions_total") == NUM_REQUESTS
    legs, whole = (done(f"time_to_first_token{part}_seconds_sum") for part in ("_leg", ""))
    assert legs == pytest.approx(whole, rel=1e-6)
    said = json.loads(targets.read_text())
    assert httpx.get(f"{cluster.url}/metrics/targets", timeout=10).json() == said
    for target in said:
        response = httpx.get(f"http://{target['targets'][0]}/metrics", timeout=10)
        assert read(response.content)


ALL_UP = {"ingress": [1, 1], "decode": [1], "prefill": [1]}


def test_logs_tell_of_requests_and_not_what_they_say(cluster: Cluster) -> None:
    lines = cluster.replica_logs()
    assert lines.count('"kvrelay.requests"') == NUM_REQUESTS
    assert SECRET not in lines
    assert SECRET not in cluster.said()


def test_a_worker_that_is_stopped_holds_up_no_scrape(cluster: Cluster) -> None:
    (worker,) = cluster.replicas("prefill")
    os.kill(worker, signal.SIGSTOP)
    try:
        began = time.monotonic()
        page = page_of(cluster)
        assert time.monotonic() - began < 3
    finally:
        os.kill(worker, signal.SIGCONT)
    assert up(page) == {**ALL_UP, "prefill": [0]}
    wait_until(lambda: up(page_of(cluster)) == ALL_UP, 30)
