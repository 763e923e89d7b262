"""Token ids in and out by gRPC: answers, refusals with their reasons, and how calls end."""

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from cluster import token_front
from cluster.api_keys import VARIABLE, ApiKeys
from cluster.http_exchange import HttpLimits
from cluster.openai.request_limits import RequestLimits
from cluster.rate_limit import Rates
from cluster.replicas.token_service import on_this_machine
from cluster.token_request import TokenRequest, read_request
from engine.errors import QueueFullError, StepError, UnavailableError
from engine.generation_defaults import GenerationDefaults
from engine.grammar.value import Grammar as AskedGrammar
from engine.grammar.value import GrammarKind
from engine.request import GenerationRequest, GenerationUpdate
from protos.generation_pb2 import Failure, Grammar, SamplingParams
from protos.ingress_pb2 import GenerateRequest, ListModels, ReadyRequest
from tests.cluster.fakes import (
    CACHED,
    MAX_MODEL_LEN,
    Step,
    answer_tokens,
    delta,
    prompt_report,
    say,
    small_model,
)
from tests.cluster.metrics.samples import read, value
from tests.cluster.token_server import Refused, TokenServer, token_server

PROMPT = [5, 6, 7]


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"token_ids": PROMPT, "params": {"max_tokens": 100}, **fields})


async def collect(call: Any) -> list[int]:
    try:
        return [token async for update in call for one in update.deltas for token in one.token_ids]
    except grpc.aio.AioRpcError as error:
        raise Refused(error) from error


async def refused(server: TokenServer, message: GenerateRequest, **options: Any) -> Refused:
    """The same by both ways."""
    with pytest.raises(Refused) as streamed:
        await collect(server.stub.Generate(message, **options))
    with pytest.raises(grpc.aio.AioRpcError) as whole:
        await server.stub.GenerateWhole(message, **options)
    error = Refused(whole.value)
    assert error.code == streamed.value.code
    assert error.failure == streamed.value.failure
    return streamed.value


def endless(request: GenerationRequest) -> Iterator[Step]:
    yield from list(say()(request))[:2]
    yield asyncio.Event().wait()


async def test_an_answer_comes_as_it_is_made_and_as_a_whole() -> None:
    async with token_server(say(per_step=2)) as server:
        call = server.stub.Generate(request(request_id="mine"))
        updates = [update async for update in call]
        assert len(updates) > 5
        tokens = [token for update in updates for one in update.deltas for token in one.token_ids]
        assert tokens == answer_tokens()
        assert updates[0].prompt.num_cached_tokens == CACHED
        assert [update.HasField("prompt") for update in updates[1:]] == [False] * (len(updates) - 1)
        assert dict(await call.trailing_metadata())["x-request-id"] == "mine"
        params = SamplingParams(n=2, max_tokens=100, logprobs=1, prompt_logprobs=0)
        whole = await server.stub.GenerateWhole(request(params=params))
        assert [list(one.token_ids) for one in whole.deltas] == [answer_tokens()] * 2
        assert [one.token_id for one in whole.deltas[1].logprobs] == answer_tokens()
        assert [one.token_id for one in whole.prompt.logprobs] == PROMPT[1:]


async def test_token_ids_reach_the_engine_once() -> None:
    params = SamplingParams(max_tokens=9, stop_token_ids=[7, 3, 7])
    async with token_server() as server:
        await collect(server.stub.Generate(request(params=params)))
        assert server.backend.last.params.stop_token_ids == (7, 3)


async def test_a_long_request_is_read_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []

    def noted(*arguments: Any) -> TokenRequest:
        threads.append(threading.current_thread())
        return read_request(*arguments)

    monkeypatch.setattr(token_front, "read_request", noted)
    async with token_server() as server:
        await collect(server.stub.Generate(request()))
        stops = list(range(3, 100)) * 200
        params = SamplingParams(max_tokens=9, stop_token_ids=stops)
        await collect(server.stub.Generate(request(params=params)))
    assert [thread is threading.current_thread() for thread in threads] == [True, False]


async def test_what_is_asked_reaches_the_engine() -> None:
    params = SamplingParams(temperature=0.5, stop_token_ids=[3], seed=-4, max_tokens=9)
    message = request(params=params, priority=-2, cache_salt="tenant", timeout_ms=60_500)
    async with token_server() as server:
        await server.stub.GenerateWhole(message)
        asked = server.backend.last
    assert list(asked.prompt_token_ids) == PROMPT
    assert asked.params.stop_token_ids == (3,)
    assert (asked.params.temperature, asked.params.seed) == (0.5, -4)
    assert (asked.priority, asked.cache_salt) == (-2, "tenant")
    assert asked.timeout_s is not None
    assert 0.5 < asked.timeout_s < 60.5, "what is left of it"


async def test_what_the_answer_must_fit_reaches_the_engine() -> None:
    texts = {
        "json_schema": '{"type": "integer"}',
        "regex": "a+",
        "choice": '["yes", "no"]',
        "grammar": 'start: "a" | "b"',
    }
    model = small_model(GenerationDefaults(eos_token_ids=(2,)))
    async with token_server(model=model) as server:
        for kind, text in texts.items():
            params = SamplingParams(grammar=Grammar(**{kind: text}))
            await server.stub.GenerateWhole(request(params=params))
            assert server.backend.last.params.grammar == AskedGrammar(GrammarKind(kind), text)
        wrong = SamplingParams(grammar=Grammar(regex="(("))
        error = await refused(server, request(params=wrong))
        assert error.failure.field == "grammar"
        assert "regex parse error" in error.failure.message
        assert len(server.backend.streams) == len(texts)
    model.grammar_trial.close()


async def test_what_is_not_said_is_as_over_http() -> None:
    async with token_server() as server:
        await server.stub.GenerateWhole(GenerateRequest(token_ids=PROMPT))
        asked = server.backend.last
    assert asked.params.max_tokens == 16
    assert asked.params.seed is not None
    assert asked.timeout_s == pytest.approx(HttpLimits().request_timeout_s, abs=10)


def test_request_then_model_decide_the_sampling() -> None:
    """What a request says also where it is nothing, as a temperature of 0."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    models: dict[str, Any] = dict(zip(names, (0.6, 0.9, 9, 0.1, 1.2), strict=True))
    said: dict[str, Any] = dict(zip(names, (0.0, 1.0, 0, 0.0, 1.0), strict=True))
    model = small_model(GenerationDefaults(**models, max_new_tokens=7))

    def taken(**fields: Any) -> tuple[dict[str, Any], int | None]:
        message = GenerateRequest(token_ids=PROMPT, params=SamplingParams(**fields))
        params = read_request(message, model, RequestLimits(), 60.0).params
        return {name: getattr(params, name) for name in names}, params.max_tokens

    assert taken() == (models, 7)
    for name in names:
        assert taken(**{name: said[name]}) == ({**models, name: said[name]}, 7)
    assert taken(**said, max_tokens=9) == (said, 9)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1 << 30]}, "token_ids"),
        ({"token_ids": [1] * MAX_MODEL_LEN}, "token_ids"),
        ({"token_ids": [1] * 30}, "token_ids"),
        ({"params": {"temperature": -1}}, "temperature"),
        ({"params": {"temperature": float("nan")}}, "temperature"),
        ({"params": {"max_tokens": MAX_MODEL_LEN}}, "max_tokens"),
        ({"params": {"n": 5}}, "n"),
        ({"params": {"n": 0}}, "n"),
        ({"params": {"stop": ["x"]}}, "stop"),
        ({"params": {"stop_token_ids": [1 << 30]}}, "stop_token_ids"),
        ({"params": SamplingParams(grammar=Grammar())}, "grammar"),
        ({"cache_salt": "a@b"}, "cache_salt"),
        ({"request_id": "a b"}, "request_id"),
    ],
)
async def test_what_cannot_be_names_its_field(fields: dict[str, Any], field: str) -> None:
    async with token_server(request_limits=RequestLimits(max_prompt_tokens=20, max_n=4)) as server:
        error = await refused(server, request(**fields))
        assert not server.backend.streams
        assert await collect(server.stub.Generate(request())) == answer_tokens()
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.failure.kind == Failure.KIND_INVALID
    assert error.failure.field == field
    assert error.failure.message


@pytest.mark.parametrize("method", ["Generate", "GenerateWhole", "Models", "Ready"])
async def test_bytes_that_are_no_message_are_the_caller_s_fault(method: str) -> None:
    async with token_server() as server, grpc.aio.insecure_channel(server.address) as channel:
        call: Any = channel.unary_unary(f"/kvrelay.v1.Generation/{method}")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"\xff\xff\xff")
        error = Refused(caught.value)
        assert error.code == grpc.StatusCode.INVALID_ARGUMENT
        assert error.failure.field == "request"
        assert "no message" in error.failure.message
        assert error.trailing["x-request-id"]
        assert not server.backend.streams


async def test_another_model_is_not_found() -> None:
    async with token_server() as server:
        error = await refused(server, request(model="gpt"))
        assert await collect(server.stub.Generate(request(model="tiny"))) == answer_tokens()
        call = server.stub.Models(ListModels())
        models = (await call).models
        assert dict(await call.trailing_metadata())["x-request-id"]
    assert error.code is grpc.StatusCode.NOT_FOUND
    assert error.failure.field == "model"
    assert [model.name for model in models] == list(small_model().names)
    assert models[0].max_model_len == MAX_MODEL_LEN


async def test_a_request_that_is_too_large_is_refused() -> None:
    async with token_server(limits=HttpLimits(max_body_bytes=100)) as server:
        error = await refused(server, request(token_ids=[300] * 200))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "larger than 100 bytes" in error.failure.message


async def test_a_key_is_asked_for_and_counted_by() -> None:
    keys = ApiKeys.load(None, {VARIABLE: "one:first-key,two:second-key"})
    async with token_server(keys=keys, rates=Rates(requests_per_minute=1)) as server:
        for brought in (None, "Bearer wrong-key", "first-key"):
            metadata = () if brought is None else (("authorization", brought),)
            error = await refused(server, request(), metadata=metadata)
            assert error.code is grpc.StatusCode.UNAUTHENTICATED
            assert error.trailing["x-request-id"]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await server.stub.Models(ListModels(), metadata=metadata)
            assert Refused(caught.value).trailing["x-request-id"]
        first = (("authorization", "Bearer first-key"),)
        assert await collect(server.stub.Generate(request(), metadata=first)) == answer_tokens()
        error = await refused(server, request(), metadata=first)
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.failure.kind == Failure.KIND_BUSY
        assert 0 < int(error.trailing["retry-after"]) <= 60
        second = (("authorization", "Bearer second-key"),)
        assert await collect(server.stub.Generate(request(), metadata=second)) == answer_tokens()


async def test_each_key_is_a_tenant_of_its_own() -> None:
    keys = ApiKeys.load(None, {VARIABLE: "one:first-key,two:second-key"})
    async with token_server(keys=keys) as server:
        for key, tenant in (("first-key", "one"), ("second-key", "two")):
            metadata = (("authorization", f"Bearer {key}"),)
            await server.stub.GenerateWhole(request(), metadata=metadata)
            assert server.backend.last.tenant == tenant


async def test_without_keys_it_is_for_its_own_machine() -> None:
    async with token_server(admits=lambda peer: not peer.startswith("ipv4:127.")) as server:
        error = await refused(server, request(request_id="mine"))
    assert error.code is grpc.StatusCode.PERMISSION_DENIED
    assert error.trailing["x-request-id"] == "mine"


@pytest.mark.parametrize(
    ("peer", "is_here"),
    [
        ("ipv4:127.0.0.1:1234", True),
        ("ipv6:[::1]:1234", True),
        ("ipv6:[::ffff:127.0.0.1]:1234", True),
        ("ipv4:192.0.2.7:1234", True),
        ("ipv4:192.0.2.8:1234", False),
        ("ipv6:[2001:db8::1]:1234", False),
        ("unknown", False),
    ],
)
def test_who_is_on_this_machine(peer: str, is_here: bool) -> None:
    assert on_this_machine(peer, "192.0.2.7") is is_here


@pytest.mark.parametrize(
    ("failure", "code", "retry_s"),
    [
        (QueueFullError("full"), grpc.StatusCode.RESOURCE_EXHAUSTED, "1"),
        (UnavailableError("loading", "at 10.0.0.7:500"), grpc.StatusCode.UNAVAILABLE, "5"),
        (StepError("broken: \u00fc"), grpc.StatusCode.INTERNAL, None),
    ],
)
async def test_an_error_in_mid_answer_is_its_status(
    failure: Any, code: grpc.StatusCode, retry_s: str | None
) -> None:
    def fails(asked: GenerationRequest) -> Iterator[Step]:
        yield next(iter(say()(asked)))
        yield failure

    async with token_server(fails) as server:
        error = await refused(server, request())
    assert error.code is code
    assert error.failure.message == str(failure)
    assert not error.failure.detail
    assert error.trailing.get("retry-after") == retry_s


async def test_a_client_that_cancels_is_gone() -> None:
    async with token_server(endless) as server:
        call = server.stub.Generate(request())
        await call.read()
        call.cancel()
        await asyncio.wait_for(server.backend.streams[0].closed.wait(), 30)


async def test_the_deadline_of_a_call_ends_it_everywhere() -> None:
    async with token_server(endless) as server:
        timeout_s = 0.2
        while not server.backend.streams:  # it was over before the call had come
            with pytest.raises(Refused) as caught:
                await collect(server.stub.Generate(request(), timeout=timeout_s))
            assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
            timeout_s *= 2
        await asyncio.wait_for(server.backend.streams[0].closed.wait(), 30)


async def test_the_time_of_a_request_ends_it() -> None:
    async with token_server(endless) as server:
        error = await refused(server, request(timeout_ms=100))
    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert error.failure.kind == Failure.KIND_TIMED_OUT


async def test_a_server_that_stops_tells_its_clients() -> None:
    async with token_server(endless) as server:
        call = server.stub.Generate(request())
        reading = asyncio.create_task(collect(call))
        while not server.backend.streams:
            await asyncio.sleep(0.005)
        await server.front.end_answers(0.05, UnavailableError("the server is stopping"))
        with pytest.raises(Refused) as caught:
            await reading
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        assert (await refused(server, request())).failure.message == "the server is stopping"
        ends = read(await server.meter.pages.page())
    assert value(ends, "request_success_total", finished_reason="error") == 1
    assert value(ends, "request_success_total", finished_reason="abort") == 0


async def test_an_answer_that_has_come_to_its_end_has_it_when_the_server_stops() -> None:
    """Of which its client has not read all yet."""
    call: Any = SimpleNamespace(caller="", request_id="mine", header=lambda _: None)
    async with token_server() as server:
        updates = server.front.generate(request(), call)
        told = [await anext(updates)]
        while not told[-1].deltas[0].finish_reason:
            told.append(await anext(updates))
        stopping = UnavailableError("the server is stopping")
        ending = asyncio.create_task(server.front.end_answers(0.0, stopping))
        await asyncio.wait({ending}, timeout=0.05)
        assert await anext(updates, None) is None
        await ending


async def test_ready_is_whether_something_can_be_generated() -> None:
    async with token_server() as server:
        call = server.stub.Ready(ReadyRequest())
        await call
        assert dict(await call.trailing_metadata())["x-request-id"]
        server.backend.dead = "no decode worker answers"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.stub.Ready(ReadyRequest())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_report_that_is_large_comes_in_parts() -> None:
    num_tokens = 400

    def many(asked: GenerationRequest) -> Iterator[Step]:
        ids = [9] * num_tokens
        yield GenerationUpdate(
            [delta(asked, choice, ids, None) for choice in range(30)], prompt_report(asked)
        )
        yield GenerationUpdate([delta(asked, choice, [2], None) for choice in range(30)])

    params = SamplingParams(n=30, logprobs=20, max_tokens=num_tokens + 1)
    async with token_server(many) as server:
        call: Any = server.stub.Generate(request(params=params))
        sizes, counts = [], [0] * 30
        while sum(counts) < 30 * (num_tokens + 1):
            update = await call.read()
            sizes.append(update.ByteSize())
            for one in update.deltas:
                counts[one.choice] += len(one.token_ids)
        call.cancel()
    assert len(sizes) > 2
    assert max(sizes) < 4 << 20
