"""A cluster of a config file, of which Serve builds the pools: what it shows of itself, through
either ingress, how its pools grow under load and shrink after it, and that without keys it is for
one machine alone; and that it ends with Ray's head."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.cluster.metrics.samples import read
from tests.e2e.cluster import Cluster, http, page_of, total, wait_until

# A thread for each worker: they share no core, and prompts are handed off.
CONFIG = """
engine: {dtype: float32, kv_cache_memory_bytes: 50331648, max_num_seqs: 16, num_threads: 1}
decode: {replicas: 1-2}
prefill: {replicas: 1-2}
ingress: {replicas: 2}
local_prefill: never
scaling: {max_sequence_use: 0.2, ttft_s: 0.5, down_delay_s: 15}
"""
SERVE_CONFIG = Path(__file__).parents[2] / "deploy/serve.yaml"
SECRET = "Xylophone quartz"
NUM_REQUESTS, NUM_TOKENS = 6, 5
NUM_ASKED = 6  # times: the front gives each ingress its share
ALL_UP = {"ingress": [1, 1], "decode": [1], "prefill": [1]}
SCALED = ("decode", "prefill")
NUM_PROMPTS = 4
NUM_CLIENTS = 8  # half of a worker: more than a fifth
# Of long prompts, of which a prefill worker is given two or so at a time: the others wait.
NUM_READERS = 24
PROMPT_WORDS = "    def method(self, number: int, other: str) -> None:\n" * 60
UP_S, DOWN_S, JOIN_S = 90.0, 90.0, 40.0
ENDED_S, NUM_ENDED = 20.0, 150


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("targets") / "targets.json"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, targets: Path) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "config.yaml").write_text(CONFIG)
    flags = ["--log-format", "json", "--log-requests", "--metrics-targets-file", str(targets)]
    cluster = Cluster(folder / "log", "--config", str(folder / "config.yaml"), *flags)
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


def test_one_scrape_has_all_that_was_done(cluster: Cluster, targets: Path) -> None:
    wait_until(lambda: up(page_of(cluster)) == ALL_UP, 30)
    before = page_of(cluster)
    num_prompt = 0
    for number in range(NUM_REQUESTS):
        body = {"prompt": f"{SECRET} {number}", "max_tokens": NUM_TOKENS, "ignore_eos": True}
        answer = http.post(f"{cluster.url}/v1/completions", json=body, timeout=60).json()
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
    assert http.get(f"{cluster.url}/metrics/targets", timeout=10).json() == said
    for target in said:
        response = http.get(f"http://{target['targets'][0]}/metrics", timeout=10)
        assert read(response.content)


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
        assert time.monotonic() - began < 10
    finally:
        os.kill(worker, signal.SIGCONT)
    assert up(page) == {**ALL_UP, "prefill": [0]}
    wait_until(lambda: up(page_of(cluster)) == ALL_UP, 30)


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> list[str]:
    """Of each client's own prompt, while nobody else asks."""
    return [ask(cluster.url, client) for client in range(NUM_PROMPTS)]


def ask(url: str, client: int, num_tokens: int = 100) -> str:
    body = {
        "model": "bundled",
        "prompt": f"def function_{client % NUM_PROMPTS}(argument):\n    ",
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    response = http.post(f"{url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    text = response.json()["choices"][0]["text"]
    assert isinstance(text, str)
    return text


def status(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """Of each pool."""
    return {pool["name"]: pool for pool in cluster.status()["pools"]}


def test_one_scrape_is_the_whole_cluster_through_either_ingress(cluster: Cluster) -> None:
    for _ in range(NUM_ASKED):
        wait_until(lambda: up(page_of(cluster)) == ALL_UP, 30)
    targets = [http.get(f"{cluster.url}/metrics/targets").json() for _ in range(NUM_ASKED)]
    assert all(one == targets[0] for one in targets)
    assert len(targets[0]) == 4


@contextmanager
def asking(cluster: Cluster) -> Iterator[list[tuple[int, str]]]:
    """Clients and readers, until the block ends: a load for two of each pool."""
    answers: list[tuple[int, str]] = []
    done = threading.Event()

    def keep_asking(client: int) -> None:
        while not done.is_set():
            answers.append((client, ask(cluster.url, client)))

    def keep_reading(_: int) -> None:
        while not done.is_set():
            body = {"prompt": f"{uuid.uuid4()}\n{PROMPT_WORDS}", "max_tokens": 1}
            response = http.post(f"{cluster.url}/v1/completions", json=body, timeout=120)
            assert response.status_code == 200, response.text

    with ThreadPoolExecutor(NUM_CLIENTS + NUM_READERS) as threads:
        clients = [threads.submit(keep_asking, client) for client in range(NUM_CLIENTS)]
        readers = [threads.submit(keep_reading, reader) for reader in range(NUM_READERS)]
        try:
            yield answers
        finally:
            done.set()
        for one in (*clients, *readers):
            one.result()


@pytest.fixture(scope="module")
def grown(cluster: Cluster, expected: list[str]) -> dict[str, dict[str, Any]]:
    """The pools, once there are two of each worker: the decode pool grows with its sequences, the
    prefill pool with the prompts that wait at the routers. Those that start have the cores."""
    assert [len(cluster.replicas(pool)) for pool in SCALED] == [1, 1]
    decisions = [f"kvrelay scales {pool}: 1 -> 2" for pool in SCALED]

    def is_decided() -> bool:
        return all(one in cluster.controller_log() for one in decisions)

    with asking(cluster) as answers:
        wait_until(is_decided, UP_S, cluster.said)
    wait_until(
        lambda: [len(up(page_of(cluster))[pool]) for pool in SCALED] == [2, 2], UP_S, cluster.said
    )
    with ThreadPoolExecutor(NUM_CLIENTS) as threads:  # of the new ones, too
        again = threads.map(lambda client: ask(cluster.url, client), range(NUM_CLIENTS))
        answers += enumerate(again)
    assert {client for client, _ in answers} == set(range(NUM_CLIENTS))
    assert all(text == expected[client % NUM_PROMPTS] for client, text in answers)
    return status(cluster)


def test_pools_grow_with_their_loads(grown: dict[str, dict[str, Any]]) -> None:
    for pool in SCALED:
        assert [one["state"] for one in grown[pool]["replicas"]] == ["RUNNING"] * 2
        assert all(one["load"] for one in grown[pool]["replicas"])
    links = [link for one in grown["decode"]["replicas"] for link in one["load"]["links"]]
    assert {link["connector"] for link in links} == {"nixl"}
    changes = [grown[pool]["scaling"]["change"] for pool in SCALED]
    assert changes[0].startswith("1 -> 2: sequences")
    assert changes[1].startswith("1 -> 2: prompts wait")
    assert " at the router, " in changes[1]


def test_without_keys_it_is_for_one_machine(cluster: Cluster) -> None:
    def answer() -> httpx.Response:
        body = {"prompt": "x", "max_tokens": 1}
        return http.post(f"{cluster.url}/v1/completions", json=body, timeout=60)

    def are_all(status: int) -> bool:
        return all(answer().status_code == status for _ in range(NUM_ASKED))

    def wait_for(status: int) -> None:
        wait_until(lambda: are_all(status), JOIN_S, cluster.said)

    assert answer().status_code == 200
    with cluster.second_node() as leave:
        wait_for(503)
        assert "the cluster has 2 nodes" in answer().text
        leave()
        wait_for(200)


@pytest.mark.usefixtures("grown")
def test_pools_shrink_when_their_loads_are_gone(cluster: Cluster, expected: list[str]) -> None:
    for pool in SCALED:
        wait_until(
            lambda pool=pool: len(cluster.replicas(pool)) == 1,  # type: ignore[misc]
            DOWN_S,
            cluster.said,
        )
    shrunk = status(cluster)
    for pool in SCALED:
        assert shrunk[pool]["scaling"]["change"].startswith("2 -> 1")
    assert ask(cluster.url, 0) == expected[0]
    assert cluster.is_ready()
    loads = [one["ingress"] for one in shrunk["ingress"]["replicas"]]
    assert loads == [{"num_open": 0, "num_waiting": 0}] * 2


def test_a_config_with_an_unknown_key_changes_nothing(cluster: Cluster) -> None:
    """As `serve deploy` would bring it: it fails with the key's name, at the first try, and the old
    one serves on."""
    before = {pool: set(cluster.replicas(pool)) for pool in (*SCALED, "ingress")}
    config = yaml.safe_load(SERVE_CONFIG.read_text())
    args = yaml.safe_load(CONFIG)
    config["applications"][0]["args"] = {**args, "decode": {**args["decode"], "blok_size": 16}}
    became = cluster.apply_config(config)
    assert became["status"] == "DEPLOY_FAILED"
    assert became["message"].endswith("exception:\ndecode.blok_size: unknown option")
    for client in range(NUM_ASKED):
        assert ask(cluster.url, client, num_tokens=5)
    assert {pool: set(cluster.replicas(pool)) for pool in before} == before


def test_a_head_that_is_killed_ends_all_of_it_soon(cluster: Cluster) -> None:
    """Ray's others would go on for a minute, and then end without a word. What is finished in the
    usual time is answered; who has more to come reads why there is no more. The worker is stopped,
    so that it does not take a core for that."""
    (head,) = cluster.matching("gcs/gcs_server")
    (worker,) = cluster.replicas("decode")
    folder = cluster.front_folder

    def read(num_tokens: int, begun: threading.Event) -> list[str]:
        body = {"prompt": "x", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        url = f"{cluster.url}/v1/completions"
        lines = []
        with http.stream("POST", url, json=body, timeout=60) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                begun.set()
                lines += [line] if line else []
        return lines

    with ThreadPoolExecutor() as threads:
        begun = [threading.Event(), threading.Event()]
        short, long = map(threads.submit, [read] * 2, (NUM_ENDED, 1900), begun)
        assert all(one.wait(60) for one in begun)
        os.kill(head, signal.SIGKILL)
        ended = short.result(30)
        os.kill(worker, signal.SIGSTOP)
        assert f'"completion_tokens":{NUM_ENDED}' in ended[-2].replace(" ", "")
        assert ended[-1] == "data: [DONE]"
        *_, why, end = long.result(ENDED_S)
        assert "the server is stopping" in why
        assert end == "data: [DONE]"
        assert cluster.process.wait(ENDED_S) == 1
    assert "Ray's gcs_server was ended by SIGKILL, and nothing goes on without it" in cluster.said()
    wait_until(lambda: not cluster.pids(), 10, cluster.left)
    assert not folder.exists()
