"""A whole cluster on this machine: Ray, its front, an ingress, both pools, and what kills them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.cluster import Cluster, kill, wait_until

ENGINE = {"dtype": "float32", "kv_cache_memory_bytes": 48 << 20, "max_num_seqs": 16}
ARGS = {
    "model": "bundled",
    "served_model_name": ["mine"],
    "decode": {"replicas": 2},
    "worker_host": "127.0.0.1",
}
SMALL = ["--dtype", "float32", "--kv-cache-memory-bytes", "48MiB", "--max-num-seqs", "16"]
PROMPTS = [f"def function_{number}(argument, other):\n    " for number in range(8)]
NUM_TOKENS = 400
BACK_S = 60.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    log = tmp_path_factory.mktemp("cluster") / "log"
    cluster = Cluster(log, "--served-model-name", "mine", "--decode-replicas", "2", *SMALL)
    yield cluster
    cluster.kill()


def body(prompt: str, **more: Any) -> dict[str, Any]:
    return {
        "model": "mine",
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        **more,
    }


def streamed(url: str, prompt: str, begun: threading.Event | None = None) -> tuple[str, int]:
    """The whole text and the number of tokens."""
    text, usage = "", {"completion_tokens": 0}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with (
        httpx.Client(timeout=120) as client,
        client.stream("POST", f"{url}/v1/completions", json=body(prompt, **options)) as response,
    ):
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            text += "".join(choice["text"] for choice in event["choices"])
            usage = event.get("usage") or usage
            if begun is not None and text:
                begun.set()
    return text, usage["completion_tokens"]


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> list[tuple[str, int]]:
    """What an undisturbed cluster answers, one prompt after the other."""
    return [streamed(cluster.url, prompt) for prompt in PROMPTS]


class Load:
    """All prompts at once, each begun when it is entered."""

    def __init__(self, cluster: Cluster) -> None:
        self._threads = ThreadPoolExecutor(len(PROMPTS))
        begun = [threading.Event() for _ in PROMPTS]
        self.answers: list[Future[tuple[str, int]]] = [
            self._threads.submit(streamed, cluster.url, prompt, event)
            for prompt, event in zip(PROMPTS, begun, strict=True)
        ]
        assert all(event.wait(60) for event in begun)

    def results(self) -> list[tuple[str, int]]:
        return [answer.result(120) for answer in self.answers]


def test_the_official_client_is_served(cluster: Cluster) -> None:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["mine"]
        answer = client.completions.create(model="mine", prompt=PROMPTS[0], max_tokens=9)
        assert answer.usage is not None
        assert answer.usage.completion_tokens <= 9
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="another", prompt="x")
    assert cluster.is_ready()


def test_a_decode_worker_that_is_killed_costs_no_request(
    cluster: Cluster, expected: list[tuple[str, int]]
) -> None:
    before = cluster.replicas("decode")
    assert len(before) == 2
    load = Load(cluster)
    kill(before[:1])
    assert load.results() == expected
    wait_until(lambda: bool(set(cluster.replicas("decode")) - set(before)), BACK_S, cluster.said)


def test_a_prefill_worker_that_is_killed_costs_no_request(
    cluster: Cluster, expected: list[tuple[str, int]]
) -> None:
    before = cluster.replicas("prefill")
    load = Load(cluster)
    kill(before)
    assert load.results() == expected
    assert [streamed(cluster.url, prompt) for prompt in PROMPTS[:2]] == expected[:2]
    wait_until(lambda: bool(set(cluster.replicas("prefill")) - set(before)), BACK_S, cluster.said)


def test_serve_s_controller_may_die(cluster: Cluster, expected: list[tuple[str, int]]) -> None:
    load = Load(cluster)
    kill(cluster.pids("ray::ServeController"))
    assert load.results() == expected
    assert streamed(cluster.url, PROMPTS[0]) == expected[0]


def test_an_ingress_that_is_killed_comes_back(
    cluster: Cluster, expected: list[tuple[str, int]]
) -> None:
    before = cluster.replicas("ingress")
    kill(before)
    wait_until(cluster.is_ready, BACK_S, cluster.said)
    assert streamed(cluster.url, PROMPTS[0]) == expected[0]


def test_a_front_that_is_killed_comes_back(
    cluster: Cluster, expected: list[tuple[str, int]]
) -> None:
    kill(cluster.pids("ray::HAProxyManager"))
    wait_until(lambda: not cluster.is_ready(), BACK_S)
    wait_until(cluster.is_ready, BACK_S, cluster.said)
    assert streamed(cluster.url, PROMPTS[0]) == expected[0]


def test_new_knobs_roll_out_under_load(cluster: Cluster, expected: list[tuple[str, int]]) -> None:
    """Every replica is replaced, the new ones first; answers that outlast `drain_s` move."""
    before = {pid for pool in ("prefill", "decode", "ingress") for pid in cluster.replicas(pool)}
    answers: list[tuple[str, int]] = []
    stop = threading.Event()

    def keep_asking(number: int) -> None:
        while not stop.is_set():
            answer = streamed(cluster.url, PROMPTS[number])
            assert answer == expected[number]
            answers.append(answer)

    with ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(keep_asking, number) for number in range(4)]
        try:
            cluster.redeploy(**ARGS, engine={**ENGINE, "max_num_seqs": 12}, drain_s=0.2)
        finally:
            stop.set()
        for one in asking:
            one.result(120)
    assert answers
    assert not before & {pid for pool in ("prefill", "decode") for pid in cluster.replicas(pool)}


def test_ctrl_c_tells_clients_and_leaves_nothing(cluster: Cluster) -> None:
    """More is asked for than can be answered in the time that is left."""
    begun = threading.Event()

    def read(_: int) -> list[str]:
        lines: list[str] = []
        with httpx.stream(
            "POST",
            f"{cluster.url}/v1/completions",
            json=body(PROMPTS[0], max_tokens=1900, n=8, stream=True),
            timeout=60,
        ) as response:
            for line in response.iter_lines():
                lines += [line] if line else []
                begun.set()
        return lines

    with ThreadPoolExecutor(8) as threads:
        readers = [threads.submit(read, number) for number in range(8)]
        assert begun.wait(60)
        cluster.interrupt()
        cluster.process.wait(30)
        streams = [lines for reader in readers if len(lines := reader.result(30)) > 1]
    assert all(lines[-1] == "data: [DONE]" for lines in streams)
    assert any("the server is stopping" in lines[-2] for lines in streams)
    wait_until(lambda: not cluster.pids(), 10, lambda: str(cluster.pids()))
