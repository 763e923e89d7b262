"""The HTTP front of a cluster as strangers meet it: keys, rates, and what is no request."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.generation_pb2 import SamplingParams
from protos.ingress_pb2 import GenerateRequest
from protos.ingress_pb2_grpc import GenerationStub
from tests.cluster.test_hostile import GOOD as STRANGE_BODIES
from tests.cluster.test_hostile import PATHS, broken, check
from tests.deploy.wheel import ROOT
from tests.e2e.cluster import (
    CONTROLLER,
    Cluster,
    by_replica,
    http,
    is_idle,
    num_aborted,
    open_files,
    page_of,
    wait_until,
    whole_page,
)
from tests.e2e.neighbour import neighbour, why_none

KEY, HURRIED, PATIENT = "sk-of-one-caller", "sk-of-a-hurried-one", "sk-of-a-patient-one"
PAGE = "https://chat.example"
SMALL = ["--dtype", "float32", "--kv-cache-memory-bytes", "48MiB", "--max-num-seqs", "16"]
STRANGE = [f"sk-of-a-strange-one-{number}" for number in range(10)]
RATE = 50
NUM_AT_ONCE = 40  # prompts of one request: more than run at once
CLIENT_S = 2  # that the front waits for a client
LET_GO_S = 15.0  # of one that is gone, and of what had room on the way to it
NUM_KEPT_OPEN = 4  # connections of the front's to an ingress, for what comes next


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("front")
    keys = folder / "keys"
    keys.write_text("\n".join((f"one:{KEY}", f"hurried:{HURRIED}", PATIENT, *STRANGE)))
    keys.chmod(0o600)
    words = ["--api-key-file", str(keys), "--requests-per-minute", str(RATE), "--host", "0.0.0.0"]
    words += ["--allowed-origins", PAGE]
    words += ["--colocated", "--max-body-bytes", "2000000", "--ingress-replicas", "2"]
    patience = {"RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(CLIENT_S)}
    write_modules_of_our_names(folder)
    cluster = Cluster(folder / "log", "--grpc-port", "0", *words, *SMALL, **patience)
    yield cluster
    cluster.kill()


def write_modules_of_our_names(folder: Path) -> None:
    """Somebody's own, where the command is run: no process may take them for ours."""
    names = [package.parent.name for package in ROOT.glob("*/__init__.py")]
    assert "engine" in names
    for name in names:
        (folder / f"{name}.py").write_text("raise ImportError('not yours')\n")


def post(cluster: Cluster, content: bytes, **headers: str) -> httpx.Response:
    said = {"Authorization": f"Bearer {KEY}", **headers}
    url = f"{cluster.url}/v1/completions"
    return http.post(url, content=content, headers=said, timeout=60)


def raw(cluster: Cluster, data: bytes) -> bytes:
    address = urlsplit(cluster.url)
    with socket.create_connection((address.hostname or "", address.port or 0), 20) as connection:
        connection.sendall(data)
        return connection.recv(4096)


def test_who_has_no_key_gets_nothing_but_health(cluster: Cluster) -> None:
    for key in (None, "sk-of-nobody"):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        response = http.get(f"{cluster.url}/v1/models", headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
    assert http.get(f"{cluster.url}/health").status_code == 200
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key=KEY, max_retries=0) as client:
        raw = client.completions.with_raw_response.create(
            model="bundled", prompt="The", max_tokens=3, extra_headers={"X-Request-Id": "mine"}
        )
        assert raw.parse().choices[0].text
        assert raw.headers.get_list("x-request-id") == ["mine"], "Serve names it too"
    with (
        openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="x", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_a_web_page_may_ask(cluster: Cluster) -> None:
    """Its browser asks first, without a key; a refusal and a stream are for the page to read."""
    url, page = f"{cluster.url}/v1/completions", {"Origin": PAGE}
    asks = {**page, "Access-Control-Request-Method": "POST"}
    first = http.options(url, headers=asks)
    body = {"prompt": "The", "max_tokens": 3, "stream": True}
    refused = http.post(url, json=body, headers=page)
    stream = post(cluster, json.dumps(body).encode(), **page)
    answers = (first, refused, stream)
    assert [answer.status_code for answer in answers] == [200, 401, 200]
    assert stream.text.endswith("data: [DONE]\n\n")
    for answer in answers:
        assert answer.headers.get_list("access-control-allow-origin") == [PAGE]


def test_one_request_may_ask_for_more_answers_than_run_at_once(cluster: Cluster) -> None:
    body = {"prompt": ["a"] * NUM_AT_ONCE, "n": 2, "max_tokens": 2, "ignore_eos": True}
    response = post(cluster, json.dumps(body).encode())
    assert response.status_code == 200, response.text
    answer = response.json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * NUM_AT_ONCE))
    assert answer["usage"]["completion_tokens"] == 4 * NUM_AT_ONCE


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
    """Two ingresses admit together what one would, by HTTP and by gRPC."""
    wait_until(lambda: len(answered_by(cluster)) == 2, 30)
    for _ in range(4):  # asked of either
        wait_until(lambda: len(ingresses(cluster)) == 2, 30)
    began = time.monotonic()
    with httpx.Client(headers={"Authorization": f"Bearer {HURRIED}"}) as client:
        answers = [
            client.post(f"{cluster.url}/tokenize", json={"prompt": "x"}) for _ in range(RATE + 15)
        ]
    refilled = math.ceil((time.monotonic() - began) * RATE / 60)
    good = sum(answer.status_code == 200 for answer in answers)
    assert RATE - 2 <= good <= RATE + refilled
    assert answers[-1].status_code == 429
    assert int(answers[-1].headers["retry-after"]) >= 1
    while (status := grpc_status(cluster, HURRIED)) is grpc.StatusCode.OK:  # one may be left
        good += 1
        assert good <= RATE + math.ceil((time.monotonic() - began) * RATE / 60)
    assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert post(cluster, b'{"prompt": "x", "max_tokens": 1}').status_code == 200
    assert grpc_status(cluster, KEY) is grpc.StatusCode.OK


def answered_by(cluster: Cluster) -> set[str]:
    """The ingresses that have answered since the cluster runs, of which the front takes turns:
    it learns of the second one when that runs, which may be after the first has answered."""
    for _ in range(2):
        assert post(cluster, GOOD, Authorization=f"Bearer {PATIENT}").status_code in (200, 429)
    ended = by_replica(page_of(cluster), "request_success_total", "ingress")
    return {replica for replica, count in ended.items() if count}


def ingresses(cluster: Cluster) -> list[str]:
    """That the one which is asked knows of."""
    targets = http.get(f"{cluster.url}/metrics/targets").json()
    return [one for one in targets if one["labels"]["__meta_kvrelay_pool"] == "ingress"]


def grpc_status(cluster: Cluster, key: str | None, **more: str) -> grpc.StatusCode:
    """Of a short answer; the key and the rest are in the call's metadata."""
    stub = GenerationStub(grpc.insecure_channel(cluster.grpc_address, [("grpc.enable_retries", 0)]))
    request = GenerateRequest(token_ids=[5, 6, 7], params=SamplingParams(max_tokens=1))
    said = more if key is None else {"authorization": f"Bearer {key}", **more}
    try:
        list(stub.Generate(request, timeout=60, metadata=tuple(said.items())))
    except grpc.RpcError as error:
        code = error.code()
        assert isinstance(code, grpc.StatusCode)
        return code
    return grpc.StatusCode.OK


def test_grpc_asks_for_the_same_keys(cluster: Cluster) -> None:
    for key in (None, "sk-of-nobody"):
        assert grpc_status(cluster, key) is grpc.StatusCode.UNAUTHENTICATED
    assert grpc_status(cluster, KEY, application="kvrelay") is grpc.StatusCode.OK


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


GOOD = b'{"prompt": "x", "max_tokens": 1}'
STREAM = b'{"prompt": "x", "max_tokens": 400, "ignore_eos": true, "stream": true}'


OF_SERVE = (
    b"X-Request-Timeout-Seconds",
    b"X-Request-Disconnect-Disabled",
    b"X-Session-Id",
    b"serve_multiplexed_model_id",
)


@pytest.mark.parametrize("value", [b"0.01", b"\xff"])
def test_serve_itself_reads_nothing_of_a_caller_s_header(cluster: Cluster, value: bytes) -> None:
    """The first of these would have it cut an answer off, with no error to read."""
    said = b"".join(b"%b: %b\r\n" % (name, value) for name in OF_SERVE)
    answer = answer_of(cluster, STREAM, said)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_an_id_that_is_no_text_is_told_in_openai_s_shape(cluster: Cluster) -> None:
    answer = answer_of(cluster, GOOD, b"X-Request-Id: \xff\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"param": "X-Request-Id"' in answer


def answer_of(cluster: Cluster, body: bytes, header: bytes) -> bytes:
    whole = with_key(body).replace(POST, POST + b"Connection: close\r\n" + header)
    with dial(cluster, whole) as connection:
        return everything(connection)


# A chunk of 16 choices with 20 logprobs each: megabytes a second.
LONG = {"prompt": "x", "n": 16, "max_tokens": 1900, "ignore_eos": True}
FLOOD = json.dumps({**LONG, "logprobs": 20, "stream": True}).encode()


def dial(cluster: Cluster, data: bytes) -> socket.socket:
    """A client whose system buffers next to nothing for it."""
    address = urlsplit(cluster.url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(60)
    connection.connect((address.hostname, address.port))
    connection.sendall(data)
    return connection


def everything(connection: socket.socket) -> bytes:
    """Until its end, however that comes."""
    read = bytearray()
    try:
        while part := connection.recv(1 << 16):
            read += part
    except ConnectionResetError:
        pass
    return bytes(read)


def with_key(body: bytes, length: int | None = None, key: str = KEY) -> bytes:
    head = b"Authorization: Bearer %b\r\nContent-Length: %d\r\n\r\n"
    return POST + head % (key.encode(), len(body) if length is None else length) + body


def test_who_sends_half_or_stops_to_read_is_let_go(cluster: Cluster) -> None:
    num_left = num_aborted(whole_page(cluster))
    with (
        dial(cluster, POST) as half_header,
        dial(cluster, with_key(b"{", 100)) as half_body,
        dial(cluster, with_key(FLOOD)) as reader,
    ):
        assert reader.recv(12) == b"HTTP/1.1 200"
        assert post(cluster, GOOD).status_code == 200
        for connection, status in ((half_header, b"408"), (half_body, b"400")):
            assert everything(connection).startswith(b"HTTP/1.1 " + status)
        wait_until(lambda: is_idle(page_of(cluster)), 30)
        wait_until(lambda: num_aborted(page_of(cluster)) == num_left + 16, 10)  # choices
        unread = everything(reader)
        assert not unread.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert post(cluster, GOOD).status_code == 200


def test_who_is_gone_without_a_word_is_let_go(cluster: Cluster) -> None:
    """Unplugged in the middle of a stream, which would take a while yet: nothing comes back for
    what is sent, and so in the end there is no room for more."""
    if why := why_none():
        pytest.skip(why)
    url, said = urlsplit(cluster.url), json.dumps({**LONG, "stream": True})
    num_left = num_aborted(whole_page(cluster))
    with neighbour() as other:
        words = ["curl", "-sSN", f"http://{other.address}:{url.port}/v1/completions"]
        client = other.start(*words, "-H", f"Authorization: Bearer {KEY}", "-d", said)
        assert client.stdout is not None
        assert client.stdout.readline().startswith(b"data: {")
        other.unplug()
        try:
            wait_until(lambda: is_idle(page_of(cluster)), LET_GO_S)
        finally:
            client.kill()
            client.communicate()
    assert num_aborted(whole_page(cluster)) == num_left + 16  # choices


def test_who_waits_is_not_let_go(cluster: Cluster) -> None:
    """Neither by HTTP nor by gRPC: their own time ends first, and they get to read that."""
    wait_s = CLIENT_S + 2
    more = {**LONG, "prompt": ["x"] * 8}

    def by_http() -> None:
        answer = post(cluster, json.dumps(more).encode(), **{"X-Request-Timeout": str(wait_s)})
        assert answer.status_code == 408
        assert f"in the request's time ({wait_s} s)" in answer.json()["error"]["message"]

    def by_grpc() -> None:
        stub = GenerationStub(grpc.insecure_channel(cluster.grpc_address))
        params = SamplingParams(n=16, max_tokens=1900, ignore_eos=True)
        request = GenerateRequest(token_ids=[5, 6, 7], params=params, timeout_ms=1000 * wait_s)
        with pytest.raises(grpc.RpcError, match="in the request's time"):
            stub.GenerateWhole(request, timeout=60, metadata=(("authorization", f"Bearer {KEY}"),))

    with ThreadPoolExecutor(2) as threads:
        for asked in [threads.submit(ask) for ask in (by_http, by_grpc)]:
            asked.result()
    wait_until(lambda: is_idle(page_of(cluster)), 10)


def test_nothing_that_strangers_send_holds_anything(cluster: Cluster) -> None:
    """Bodies, and whole requests, of which some bytes are broken. Who sends these waits for an
    answer a while, and then leaves."""
    keys = itertools.cycle(STRANGE)
    before = open_files(whole_page(cluster))
    assert len(before) == 3

    @settings(max_examples=120)
    @given(path=st.sampled_from(PATHS), data=st.data())
    def send_bodies(path: str, data: st.DataObject) -> None:
        content = data.draw(broken(json.dumps(STRANGE_BODIES[path]).encode()))
        headers = {"Authorization": f"Bearer {next(keys)}", "X-Request-Timeout": "1"}
        response = client.post(f"{cluster.url}{path}", content=content, headers=headers)
        assert response.status_code != 429, "of its rate"
        if response.status_code != 200:
            check(response)

    @settings(max_examples=60)
    @given(data=st.data())
    def send_bytes(data: st.DataObject) -> None:
        with dial(cluster, data.draw(broken(with_key(GOOD, key=next(keys))))) as connection:
            connection.settimeout(0.3)
            try:
                said = connection.recv(1 << 12)
            except (TimeoutError, ConnectionResetError):
                return
        assert re.match(rb"HTTP/1.[01] (200|4\d\d) ", said) or not said

    with httpx.Client(timeout=60) as client:
        send_bodies()
    send_bytes()
    wait_until(lambda: is_idle(page_of(cluster)), 10, lambda: page_of(cluster))
    assert post(cluster, GOOD).status_code == 200

    def are_closed() -> bool:
        now = open_files(page_of(cluster))
        return all(now.get(name, math.inf) <= before[name] + NUM_KEPT_OPEN for name in before)

    wait_until(are_closed, 10, lambda: f"{before}, then {open_files(page_of(cluster))}")


def test_ctrl_c_after_sigterm_waits_for_nobody(cluster: Cluster) -> None:
    """Not even for a controller that does not answer. Ray would take SIGTERM for itself."""
    folder = cluster.front_folder
    assert list(folder.iterdir())
    (controller,) = cluster.pids(CONTROLLER)
    os.kill(controller, signal.SIGSTOP)
    cluster.terminate()
    wait_until(lambda: "stopping; Ctrl-C again" in cluster.said(), 10, cluster.said)
    cluster.interrupt()
    assert cluster.wait_for_end(8) == 130
    assert not folder.exists()
