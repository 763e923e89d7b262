"""The decode pool of a real cluster grows under load and shrinks after it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.cluster import Cluster, wait_until

CONFIG = """
engine: {dtype: float32, kv_cache_memory_bytes: 50331648, max_num_seqs: 16}
decode: {replicas: 1-2}
scaling: {max_sequence_use: 0.2, down_delay_s: 2}
"""
NUM_CLIENTS = 8  # half of a worker, which is more than a fifth
UP_S, DOWN_S = 60.0, 90.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "config.yaml").write_text(CONFIG)
    cluster = Cluster(tmp_path / "log", "--config", str(tmp_path / "config.yaml"))
    yield cluster
    cluster.kill()


def ask(url: str, client: int) -> str:
    body = {
        "model": "bundled",
        "prompt": f"def function_{client}(argument):\n    ",
        "max_tokens": 200,
        "ignore_eos": True,
        "temperature": 0,
    }
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    text = response.json()["choices"][0]["text"]
    assert isinstance(text, str)
    return text


def status(cluster: Cluster) -> dict[str, Any]:
    """Of the decode pool, as another process of the same user sees it."""
    port = cluster.url.rsplit(":", 1)[1]
    command = [sys.executable, "-m", "cluster.cli", "status", "--json", "--port", port]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (pool,) = [one for one in json.loads(done.stdout)["pools"] if one["name"] == "decode"]
    assert isinstance(pool, dict)
    return pool


def test_the_decode_pool_follows_its_load(cluster: Cluster) -> None:
    one = cluster.replicas("decode")
    assert len(one) == 1
    expected = [ask(cluster.url, client) for client in range(NUM_CLIENTS)]
    done = False

    def keep_asking(client: int) -> list[str]:
        answers = []
        while not done:
            answers.append(ask(cluster.url, client))
        return answers

    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        answers = [threads.submit(keep_asking, client) for client in range(NUM_CLIENTS)]
        try:
            wait_until(lambda: cluster.said().count("has come") == 3, UP_S, cluster.said)
            assert len(cluster.replicas("decode")) == 2
        finally:
            done = True
    grown = status(cluster)
    assert [one["state"] for one in grown["replicas"]] == ["RUNNING"] * 2
    assert all(one["load"] for one in grown["replicas"])
    assert any(one["load"]["links"] for one in grown["replicas"])
    assert grown["scaling"]["change"].startswith("1 -> 2: sequences")
    for client, future in enumerate(answers):
        assert set(future.result()) == {expected[client]}
    wait_until(lambda: len(cluster.replicas("decode")) == 1, DOWN_S, cluster.said)
    assert status(cluster)["scaling"]["change"].startswith("2 -> 1")
    assert ask(cluster.url, 0) == expected[0]
    assert cluster.is_ready()
