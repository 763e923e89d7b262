"""The HTTP front of a cluster as strangers meet it: keys, rates, and what is no request."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from tests.e2e.cluster import Cluster

KEY, HURRIED = "sk-of-one-caller", "sk-of-a-hurried-one"
SMALL = ["--dtype", "float32", "--kv-cache-memory-bytes", "48MiB", "--max-num-seqs", "16"]
RATE = 40


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("front")
    keys = folder / "keys"
    keys.write_text(f"one:{KEY}\nhurried:{HURRIED}\n")
    keys.chmod(0o600)
    words = ["--api-key-file", str(keys), "--requests-per-minute", str(RATE), "--host", "0.0.0.0"]
    cluster = Cluster(folder / "log", "--colocated", "--max-body-bytes", "2000000", *words, *SMALL)
    yield cluster
    cluster.kill()


def post(cluster: Cluster, content: bytes, **headers: str) -> httpx.Response:
    said = {"Authorization": f"Bearer {KEY}", **headers}
    url = f"{cluster.url}/v1/completions"
    return httpx.post(url, content=content, headers=said, timeout=60)


def raw(cluster: Cluster, data: bytes) -> bytes:
    address = urlsplit(cluster.url)
    with socket.create_connection((address.hostname or "", address.port or 0), 20) as connection:
        connection.sendall(data)
        return connection.recv(4096)


def test_who_has_no_key_gets_nothing_but_health(cluster: Cluster) -> None:
    for key in (None, "sk-of-nobody"):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        response = httpx.get(f"{cluster.url}/v1/models", headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{cluster.url}/health").status_code == 200
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key=KEY, max_retries=0) as client:
        answer = client.completions.create(model="bundled", prompt="The", max_tokens=3)
        assert answer.choices[0].text
    with (
        openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="x", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_no_key_is_told_by_processes_or_logs(cluster: Cluster) -> None:
    pids = cluster.pids()
    assert pids
    for pid in pids:
        try:
            assert KEY.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        except FileNotFoundError:
            continue
    assert KEY not in cluster.said()


def test_a_hurried_caller_waits_and_no_other(cluster: Cluster) -> None:
    with httpx.Client(headers={"Authorization": f"Bearer {HURRIED}"}) as client:
        statuses = [
            client.post(f"{cluster.url}/tokenize", json={"prompt": "x"}) for _ in range(RATE + 15)
        ]
    assert {response.status_code for response in statuses[:RATE]} == {200}
    assert statuses[-1].status_code == 429
    assert int(statuses[-1].headers["retry-after"]) >= 1
    assert post(cluster, b'{"prompt": "x", "max_tokens": 1}').status_code == 200


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b'{"prompt": "' + b"x" * 100_000_000 + b'"}', {}, 413),
        (b'{"prompt": "\xff"}', {}, 400),
        (b"[" * 100_000, {}, 400),
        (b'{"prompt": "x", "temperature": NaN}', {}, 400),
        (b'{"prompt": "x", "n": -1}', {}, 400),
        (b'{"prompt": "x"}', {"X-Request-Timeout": "nan"}, 400),
        (b'{"prompt": "x"}', {"X-Request-Id": "a b"}, 400),
    ],
)
def test_what_is_wrong_is_told_in_openai_s_shape(
    cluster: Cluster, content: bytes, headers: dict[str, str], status: int
) -> None:
    response = post(cluster, content, **headers)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert post(cluster, b'{"prompt": "x", "max_tokens": 1}').status_code == 200


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    "data",
    [
        POST + b"Content-Length: abc\r\n\r\n",
        POST + b"Content-Length: -5\r\n\r\n",
        POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        POST + b"X-Large: " + b"a" * 70_000 + b"\r\n\r\n",
        POST + b"".join(b"X-%d: a\r\n" % number for number in range(500)) + b"\r\n",
        b"BREW /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
    ],
)
def test_what_is_no_http_is_a_bad_request(cluster: Cluster, data: bytes) -> None:
    assert raw(cluster, data).startswith(b"HTTP/1.1 400 ")
    assert post(cluster, b'{"prompt": "x", "max_tokens": 1}').status_code == 200
