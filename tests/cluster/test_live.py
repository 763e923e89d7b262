"""Through a socket: the official client, clients that leave, and many at once."""

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from cluster.front_address import listen
from engine.errors import EngineError, QueueFullError
from tests.cluster.fakes import ANSWER, answer_tokens, say
from tests.cluster.live_server import LiveServer, live_server, wait_until
from tests.waiting import until

HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def shared() -> Iterator[LiveServer]:
    with live_server() as server:
        yield server


@pytest.fixture
def live(shared: LiveServer) -> LiveServer:
    shared.backend.script = say()
    shared.backend.streams.clear()
    return shared


@pytest.fixture
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_official_client_chats(client: openai.OpenAI) -> None:
    answer: Any = client.chat.completions.create(
        model="small", messages=HELLO, logprobs=True, top_logprobs=2, temperature=0, seed=1
    )
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs.content[0].top_logprobs[1].logprob < 0
    assert answer.usage.completion_tokens == len(answer_tokens())
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_official_client_streams_a_chat(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="small", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks: list[Any] = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == ANSWER
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == len(answer_tokens())


def test_official_client_completes(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="small", prompt=["a", "b"], n=2, max_tokens=200, logprobs=1, echo=True
    )
    assert [choice.text for choice in answer.choices] == [p + ANSWER for p in "aabb"]
    chunks = client.completions.create(model="small", prompt="a", max_tokens=200, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER


def test_official_client_uses_extra_parameters(client: openai.OpenAI, live: LiveServer) -> None:
    client.completions.create(model="small", prompt="a", extra_body={"top_k": 4, "priority": 2})
    assert live.backend.last.params.top_k == 4
    assert live.backend.last.priority == 2


def test_official_client_lists_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["small", "tiny"]
    assert client.models.retrieve("tiny").owned_by == "kvrelay"


def test_official_client_raises_its_own_errors(client: openai.OpenAI, live: LiveServer) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="small", prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    live.backend.script = lambda request: iter([QueueFullError("full")])
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model="small", prompt="x", stream=True)

    def failing(request: Any) -> Any:
        yield next(say()(request))
        yield EngineError("the step failed")

    live.backend.script = failing
    stream = client.completions.create(model="small", prompt="x", stream=True)
    with pytest.raises(openai.APIError, match="the step failed"):
        list(stream)


def waits_after_first_token(live: LiveServer) -> None:
    """A script that says a token and then waits for what never comes."""

    def script(request: Any) -> Any:
        yield next(say()(request))
        yield asyncio.Event().wait()

    live.backend.script = script


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_request(live: LiveServer, stream: bool) -> None:
    waits_after_first_token(live)
    body = json.dumps({"prompt": "x", "stream": stream, "max_tokens": 200}).encode()
    with socket.create_connection(("127.0.0.1", live.port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        if stream:
            assert b"200 OK" in connection.recv(1000)
        wait_until(lambda: live.backend.streams, 30)
        assert not live.backend.streams[0].num_closed
    wait_until(lambda: live.backend.streams[0].num_closed, 30)


def test_a_client_that_leaves_before_its_body_is_whole(live: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", live.port)) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
        connection.sendall(head)
    assert httpx.get(f"{live.url}/health").status_code == 200
    assert live.backend.streams == []


def test_the_first_token_does_not_wait_for_the_second(live: LiveServer) -> None:
    waits_after_first_token(live)
    body = {"prompt": "x", "stream": True}
    with httpx.stream("POST", f"{live.url}/v1/completions", json=body) as response:
        first = next(response.iter_lines())
    assert json.loads(first.removeprefix("data: "))["choices"][0]["text"]


def test_requests_have_a_time_of_their_own(live: LiveServer) -> None:
    waits_after_first_token(live)
    url, headers = f"{live.url}/v1/completions", {"X-Request-Timeout": "0.1"}
    response = httpx.post(url, json={"prompt": "x"}, headers=headers)
    assert response.status_code == 408
    assert response.json()["error"]["type"] == "timeout_error"
    timeout_s = 0.1
    while response.status_code == 408:  # it was over before the first token
        headers = {"X-Request-Timeout": f"{timeout_s}"}
        response = httpx.post(url, json={"prompt": "x", "stream": True}, headers=headers)
        timeout_s *= 2
    assert response.status_code == 200
    frames = response.text.removesuffix("\n\n").split("\n\n")
    assert json.loads(frames[-2].removeprefix("data: "))["error"]["type"] == "timeout_error"
    assert frames[-1] == "data: [DONE]"
    assert all(stream.num_closed for stream in live.backend.streams)
    headers = {"X-Request-Timeout": "-1"}
    assert httpx.post(url, json={"prompt": "x"}, headers=headers).status_code == 400


def test_official_client_does_not_repeat_what_took_too_long(live: LiveServer) -> None:
    waits_after_first_token(live)
    with (
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=1) as client,
        pytest.raises(openai.APIStatusError) as refusal,
    ):
        client.completions.create(
            model="small", prompt="x", extra_headers={"X-Request-Timeout": "0.1"}
        )
    assert refusal.value.status_code == 408
    assert len(live.backend.streams) == 1


def test_request_ids_come_back(live: LiveServer) -> None:
    url = f"{live.url}/v1/completions"
    headers = {"X-Request-Id": "abc-123"}
    for body in ({"prompt": "x"}, {"prompt": "x", "stream": True}, {"prompt": 5}):
        response = httpx.post(url, json=body, headers=headers)
        assert response.headers["x-request-id"] == "abc-123"
    made = [httpx.post(url, json={"prompt": "x"}).headers["x-request-id"] for _ in range(2)]
    assert len({"", *made}) == 3
    for path in ("/health", "/v1/models", "/metrics", "/nowhere", "/v1/completions"):
        response = httpx.get(f"{live.url}{path}", headers=headers)
        assert response.headers.get_list("x-request-id") == ["abc-123"], path
    # Two requests of one id do not meet at the engine.
    ids = [stream.request.request_id for stream in live.backend.streams]
    assert len(set(ids)) == len(ids) == 4


async def test_many_streams_at_once(live: LiveServer) -> None:
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=live.url, limits=limits, timeout=30) as client:
        body = {"messages": HELLO, "stream": True}
        responses = await asyncio.gather(
            *[client.post("/v1/chat/completions", json=body) for _ in range(64)]
        )
    for response in responses:
        frames = response.text.removesuffix("\n\n").split("\n\n")[:-1]
        choices = [json.loads(frame.removeprefix("data: "))["choices"][0] for frame in frames]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == ANSWER
    await until(lambda: all(stream.num_closed for stream in live.backend.streams))


async def test_what_local_writes_is_sent_at_once() -> None:
    """And not kept back until the client has acknowledged what came before, some 40 ms later."""
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def look(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    server = await asyncio.start_server(look, sock=listen("127.0.0.1", 0))
    async with server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        assert await accepted
        writer.close()
