"""A cluster of a config file, of which Serve builds the pools: what it shows of itself, how all of
its pools grow under load and shrink after it, and that without keys it is for one machine alone;
and that it ends with Ray's head."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.cluster.metrics.samples import read
from tests.e2e.asking import (
    PROMPTS,
    all_along,
    all_at_once,
    hardly_any_asked_again,
    keep_asking,
    short_answer,
    streamed,
)
from tests.e2e.cluster import (
    Cluster,
    by_replica,
    http,
    page_of,
    total,
    wait_until,
    whole_page,
)

# A thread for each worker: they share no core, and prompts are handed off. A decode worker has room
# for all of its sequences, or else prompts would wait for that and not for a prefill worker.
CONFIG = """
engine: {dtype: float32, kv_cache_memory_bytes: 50331648, max_num_seqs: 16, num_threads: 1}
decode: {replicas: 1-2, engine: {kv_cache_memory_bytes: 201326592}}
prefill: {replicas: 1-2}
local_prefill: never
scaling: {max_sequence_use: 0.2, ttft_s: 0.5, max_requests: 8, down_delay_s: 30}
"""
SERVE_CONFIG = Path(__file__).parents[2] / "deploy/serve.yaml"
SECRET = "Xylophone quartz"
NUM_REQUESTS, NUM_TOKENS = 6, 5
NUM_ASKED = 6  # times: the front gives each ingress its share
WORKERS = ("decode", "prefill")
SCALED = (*WORKERS, "ingress")
ALL_UP = {pool: [1.0] for pool in SCALED}
NUM_PROMPTS = 4
CLIENTS = PROMPTS[:NUM_PROMPTS] * 2  # half of a worker: more than a fifth
# Of long prompts, of which a prefill worker is given two or so at a time: the others wait.
NUM_READERS = 24
PROMPT_WORDS = "    def method(self, number: int, other: str) -> None:\n" * 100
UP_S, DOWN_S, JOIN_S = 120.0, 120.0, 40.0
ENDED_S, NUM_ENDED, NUM_WAITING = 20.0, 150, 40
WATCHING_S = 2.0  # of a core, that the command may take while answers end


class LateCluster(Cluster):
    """Whose raylet is lost as it starts, for once: well before Ray's library connects to it, which
    would end the command."""

    def _wait_for_address(self) -> str:
        raylet = None
        deadline = time.monotonic() + JOIN_S
        while raylet is None:
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.005)
            raylet = raylet_of(self.process.pid)
        os.kill(raylet, signal.SIGKILL)
        return super()._wait_for_address()


def raylet_of(command: int) -> int | None:
    """Among its children: sooner than `Cluster.matching` finds it, which reads everybody's
    environment."""
    with suppress(OSError):  # one has ended meanwhile, of the children or of the threads
        for task in Path(f"/proc/{command}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                program = Path(f"/proc/{child}/cmdline").read_text().split("\0")[0]
                if program.endswith("raylet/raylet"):
                    return child
    return None


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("targets") / "targets.json"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, targets: Path) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "config.yaml").write_text(CONFIG)
    flags = ["--log-format", "json", "--log-requests", "--metrics-targets-file", str(targets)]
    flags += ["--ingress-replicas", "1-2", "--served-model-name", "mine"]
    cluster = LateCluster(folder / "log", "--config", str(folder / "config.yaml"), *flags)
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


def test_a_head_that_is_lost_as_it_starts_is_started_once_more(cluster: Cluster) -> None:
    """As Ray's raylet ends where the agents beside it need longer than it waits for them."""
    first, second = cluster.said().split("starting Ray\n")[1:]
    assert "Ray's raylet was ended by SIGKILL" in first
    assert "once more from the beginning" in first
    assert "served at" in second


def test_one_scrape_has_all_that_was_done(cluster: Cluster, targets: Path) -> None:
    wait_until(lambda: up(page_of(cluster)) == ALL_UP, 30)
    before = whole_page(cluster)
    num_prompt = 0
    for number in range(NUM_REQUESTS):
        body = {"prompt": f"{SECRET} {number}", "max_tokens": NUM_TOKENS, "ignore_eos": True}
        answer = http.post(f"{cluster.url}/v1/completions", json=body, timeout=60).json()
        num_prompt += answer["usage"]["prompt_tokens"]
    page = whole_page(cluster)

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
    def num_told() -> int:
        return cluster.replica_logs().count('"kvrelay.requests"')

    before, body = num_told(), {"prompt": SECRET, "max_tokens": NUM_TOKENS}
    for _ in range(NUM_REQUESTS):
        http.post(f"{cluster.url}/v1/completions", json=body, timeout=60).raise_for_status()
    wait_until(lambda: num_told() == before + NUM_REQUESTS, 10, cluster.replica_logs)
    assert SECRET not in cluster.replica_logs()
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
def expected(cluster: Cluster) -> list[tuple[str, int]]:
    """Of each prompt, while nobody else asks."""
    return [streamed(cluster.url, prompt) for prompt in PROMPTS[:NUM_PROMPTS]]


def status(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """Of each pool."""
    return {pool["name"]: pool for pool in cluster.status()["pools"]}


@contextmanager
def streaming(cluster: Cluster) -> Iterator[list[tuple[str, int]]]:
    """Until the block ends: as many requests as one ingress may have, and sequences for two decode
    workers."""
    answers: list[tuple[str, int]] = []
    done = threading.Event()

    def keep_streaming(prompt: str) -> None:
        while not done.is_set():
            answers.append(streamed(cluster.url, prompt))

    with all_along(done, *[partial(keep_streaming, prompt) for prompt in CLIENTS]):
        yield answers


@contextmanager
def reading(cluster: Cluster) -> Iterator[None]:
    """Until the block ends: prompts for two prefill workers, and so requests for two ingresses.
    Who asks for them hangs up then."""
    done = threading.Event()

    async def keep_reading(client: httpx.AsyncClient) -> None:
        while True:
            body = {"prompt": f"{uuid.uuid4()}\n{PROMPT_WORDS}", "max_tokens": 1}
            try:
                response = await client.post(f"{cluster.url}/v1/completions", json=body)
            except (httpx.ReadError, httpx.RemoteProtocolError):
                continue  # HAProxy was replaced by one that knows both ingresses
            assert response.status_code == 200, response.text

    async def read() -> None:
        async with httpx.AsyncClient(timeout=120) as client, asyncio.TaskGroup() as tasks:
            readers = [tasks.create_task(keep_reading(client)) for _ in range(NUM_READERS)]
            await asyncio.to_thread(done.wait)
            for reader in readers:
                reader.cancel()

    with all_along(done, lambda: asyncio.run(read())):
        yield


@pytest.fixture(scope="module")
def grown(cluster: Cluster, expected: list[tuple[str, int]]) -> dict[str, dict[str, Any]]:
    """The pools, once there are two of each worker: the decode pool grows with its sequences, the
    prefill pool with the prompts that wait at the routers, the ingresses with their requests. Those
    that start have the cores, and so `down_delay_s` is to outlast a start: a worker that has not
    come by then does not come at all. The second ingress is there first, and may leave before the
    others have come."""
    assert [len(cluster.replicas(pool)) for pool in SCALED] == [1] * len(SCALED)
    decisions = [f"kvrelay scales {pool}: 1 -> 2" for pool in SCALED]

    def is_decided() -> bool:
        return all(one in cluster.controller_log() for one in decisions)

    def are_used() -> bool:
        """The front takes turns: of one answer and one page each time, either has its own."""
        for _ in range(2):
            short_answer(cluster, PROMPTS[0])
        return num_answering(cluster) == 2

    with streaming(cluster) as answers, reading(cluster):
        wait_until(is_decided, UP_S, cluster.said)
    with hardly_any_asked_again():
        wait_until(are_used, UP_S, cluster.controller_log)
        wait_until(lambda: shows_all_of_it(cluster), JOIN_S, cluster.said)
    wait_until(
        lambda: [len(up(page_of(cluster))[pool]) for pool in WORKERS] == [2, 2], UP_S, cluster.said
    )
    answers += all_at_once(cluster, CLIENTS)  # of the new workers, too
    assert set(answers) == set(expected)
    return status(cluster)


def num_answering(cluster: Cluster) -> int:
    """Ingresses that have given whole answers."""
    counts = by_replica(page_of(cluster), "request_success_total", "ingress")
    return sum(bool(count) for count in counts.values())


def shows_all_of_it(cluster: Cluster) -> bool:
    """Through either of two ingresses, while nothing has come or gone."""
    pages = [up(page_of(cluster)) for _ in range(NUM_ASKED)]
    targets = [http.get(f"{cluster.url}/metrics/targets").json() for _ in range(NUM_ASKED)]
    both = all(page["ingress"] == [1, 1] for page in pages)
    same = [*pages[1:], *targets[1:]] == [*pages[:-1], *targets[:-1]]
    return both and same and len(targets[0]) == sum(map(len, pages[0].values()))


def test_pools_grow_with_their_loads(cluster: Cluster, grown: dict[str, dict[str, Any]]) -> None:
    for pool in WORKERS:
        assert [one["state"] for one in grown[pool]["replicas"]] == ["RUNNING"] * 2
        assert all(one["load"] for one in grown[pool]["replicas"])
    links = [link for one in grown["decode"]["replicas"] for link in one["load"]["links"]]
    assert {link["connector"] for link in links} == {"nixl"}
    changes = [grown[pool]["scaling"]["change"] for pool in WORKERS]
    assert changes[0].startswith("1 -> 2: sequences")
    assert changes[1].startswith("1 -> 2: prompts wait")
    assert " at the router, " in changes[1]
    of_ingress = r"kvrelay scales ingress: 1 -> 2: \d+ requests"
    assert re.search(of_ingress, cluster.controller_log())


@pytest.mark.usefixtures("grown")
def test_pools_shrink_when_their_loads_are_gone(
    cluster: Cluster, expected: list[tuple[str, int]]
) -> None:
    """The ingresses while there are streams and short requests, none of which fails."""

    def wait_for_one(pool: str) -> None:
        wait_until(lambda: len(cluster.replicas(pool)) == 1, DOWN_S, why)

    def why() -> str:
        return json.dumps(status(cluster), indent=1)

    with hardly_any_asked_again(), keep_asking(cluster, num_askers=1) as answers:
        wait_for_one("ingress")
    for pool in WORKERS:
        wait_for_one(pool)
    assert answers
    assert all(answer in expected for answer in answers)
    shrunk = status(cluster)
    for pool in SCALED:
        assert shrunk[pool]["scaling"]["change"].startswith("2 -> 1")
    assert cluster.is_ready()
    loads = [one["ingress"] for one in shrunk["ingress"]["replicas"]]
    assert loads == [{"num_open": 0, "num_waiting": 0, "problem": ""}]


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
        refused = answer()
        assert "the cluster has 2 nodes" in refused.text
        assert int(refused.headers["retry-after"]) > 0
        leave()
        wait_for(200)


def test_a_setting_that_changes_in_place_leaves_every_worker_in_use(cluster: Cluster) -> None:
    """Serve leaves a replica out of its list for that moment, with an answer under way there."""
    before = set(cluster.replicas("decode"))
    begun = threading.Event()
    with ThreadPoolExecutor() as threads:
        ask = partial(streamed, cluster.url, PROMPTS[0], begun, max_tokens=1500, ignore_eos=True)
        answer = threads.submit(ask)
        assert begun.wait(60)
        settings = [{"name": "decode", "logging_config": {"log_level": "INFO"}}]
        assert cluster.apply_config({"deployments": settings})["status"] == "RUNNING"
        assert answer.result(60)[1] == 1500
    assert all(short_answer(cluster, PROMPTS[0]) for _ in range(NUM_ASKED))
    assert set(cluster.replicas("decode")) == before


def test_a_config_with_an_unknown_key_changes_nothing(cluster: Cluster) -> None:
    """As `serve deploy` would bring it: it fails with the key's name, at the first try, and the old
    one serves on, of which Serve lists nothing any more."""
    before = {pool: set(cluster.replicas(pool)) for pool in SCALED}
    config = yaml.safe_load(SERVE_CONFIG.read_text())
    args = yaml.safe_load(CONFIG)
    config["applications"][0]["args"] = {**args, "decode": {**args["decode"], "blok_size": 16}}
    became = cluster.apply_config(config)
    assert became["status"] == "DEPLOY_FAILED"
    assert became["message"].endswith("exception:\ndecode.blok_size: unknown option")
    assert all(short_answer(cluster, PROMPTS[0]) for _ in range(NUM_ASKED))
    assert {pool: set(cluster.replicas(pool)) for pool in before} == before
    status = cluster.status()
    assert status["message"] == became["message"]
    assert (status["state"], status["answers"]) == ("DEPLOY_FAILED", True)
    found = {pool["name"]: len(pool["replicas"]) for pool in status["pools"]}
    assert found == {pool: len(pids) for pool, pids in before.items()}


def test_a_head_that_is_killed_ends_all_of_it_soon(cluster: Cluster) -> None:
    """Ray's others would go on for a minute, and then end without a word. What is finished in the
    usual time is answered; who has more to come reads why there is no more: so many answers that
    most of them still wait. The worker is stopped, so that it does not take a core for that."""
    (head,) = cluster.matching("gcs/gcs_server")
    (worker,) = cluster.replicas("decode")
    folder = cluster.front_folder

    def read(num_prompts: int, num_tokens: int, begun: threading.Event) -> list[str]:
        body: dict[str, Any] = {"prompt": ["x"] * num_prompts, "max_tokens": num_tokens}
        body |= {"ignore_eos": True, "stream": True}
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
        short = threads.submit(read, 1, NUM_ENDED, begun[0])
        assert begun[0].wait(60)
        long = threads.submit(read, NUM_WAITING, 1900, begun[1])
        assert begun[1].wait(60)
        os.kill(head, signal.SIGKILL)
        taken_s = cpu_s(cluster.process.pid)
        ended = short.result(30)
        os.kill(worker, signal.SIGSTOP)
        assert f'"completion_tokens":{NUM_ENDED}' in ended[-2].replace(" ", "")
        assert ended[-1] == "data: [DONE]"
        *_, why, end = long.result(ENDED_S)
        assert "the server is stopping" in why
        assert end == "data: [DONE]"
        assert cpu_s(cluster.process.pid) - taken_s < WATCHING_S
        assert cluster.process.wait(ENDED_S) == 1
    assert "Ray's gcs_server was ended by SIGKILL, and nothing goes on without it" in cluster.said()
    wait_until(lambda: not cluster.remaining(), 10, cluster.left)
    assert not folder.exists()


def cpu_s(pid: int) -> float:
    """That the process has taken; one that has ended is known until it is waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
