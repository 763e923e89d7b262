"""What an ingress says of requests that were made: exact numbers of a small load."""

import asyncio
import json
import logging
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.api_keys import VARIABLE, ApiKeys
from cluster.backend import RefusedError
from cluster.log_format import JsonFormatter, TextFormatter
from cluster.metrics.names import INTER_TOKEN_S
from cluster.metrics.page import Page
from cluster.metrics.record import Origin, RequestRecord
from cluster.metrics.requests import LEGS, RequestMetrics
from cluster.rate_limit import Rates
from engine.errors import (
    DeadlineError,
    EngineError,
    QueueFullError,
    RequestError,
    StepError,
    UnavailableError,
)
from engine.request import (
    ChoiceDelta,
    FinishReason,
    GenerationRequest,
    GenerationUpdate,
    PromptReport,
    PromptTimes,
    RequestId,
)
from engine.sampling import SamplingParams
from tests.cluster.conftest import Server, make_server
from tests.cluster.fakes import Step, say, small_tokenizer
from tests.cluster.metrics.samples import Samples, read, value

TIMES = PromptTimes(queued_s=0.5, prefill_s=1.0, transfer_s=0.25)


def make_record(n: int = 1) -> tuple[RequestRecord, RequestMetrics]:
    metrics = RequestMetrics(2048)
    request = GenerationRequest(RequestId("x-0"), [1, 2, 3], SamplingParams(n=n))
    return RequestRecord(request, Origin("x", 10.0), metrics), metrics


def samples_of(metrics: RequestMetrics) -> Samples:
    return read(Page({}, [metrics.registry]).render())


def update(
    *token_ids: int, choice: int = 0, end: FinishReason | None = None, told: bool = False
) -> GenerationUpdate:
    delta = ChoiceDelta(choice, token_ids, finish_reason=end)
    return GenerationUpdate([delta], PromptReport(2, None, TIMES) if told else None)


def test_legs_add_up_to_the_time_to_the_first_token() -> None:
    record, metrics = make_record()
    record.note(update(1, told=True), 12.5, routed_s=0.125)
    samples = samples_of(metrics)
    name = "time_to_first_token_leg_seconds_sum"
    legs = [value(samples, name, leg=leg) for leg in LEGS]
    assert legs == [0.125, 0.5, 1.0, 0.25, 0.625]
    assert value(samples, "time_to_first_token_seconds_sum") == sum(legs) == 2.5
    assert value(samples, "request_queue_time_seconds_sum") == 0.5
    assert value(samples, "request_prefill_time_seconds_sum") == 1.0


def test_steps_that_were_merged_while_nobody_read_share_the_time() -> None:
    record, metrics = make_record(n=2)
    record.note(update(1, told=True), 11.0, 0.0)
    deltas = [ChoiceDelta(0, [2]), ChoiceDelta(1, [9]), ChoiceDelta(0, [3]), ChoiceDelta(0, [4])]
    record.note(GenerationUpdate(deltas), 11.75, 0.0)
    samples = samples_of(metrics)
    assert value(samples, "inter_token_latency_seconds_count") == 3
    assert value(samples, "inter_token_latency_seconds_bucket", le="0.2") == 0
    assert value(samples, "inter_token_latency_seconds_bucket", le="0.3") == 3


def test_tokens_that_come_at_once_were_made_one_after_the_other() -> None:
    record, metrics = make_record()
    record.note(update(1, told=True), 11.0, 0.0)
    record.note(update(2, 3, 4), 11.75, 0.0)
    record.note(update(5, end=FinishReason.LENGTH), 12.75, 0.0)
    record.end(13.0)
    samples = samples_of(metrics)
    assert value(samples, "inter_token_latency_seconds_count") == 4
    assert value(samples, "inter_token_latency_seconds_sum") == 1.75
    assert value(samples, "inter_token_latency_seconds_bucket", le="0.3") == 3
    assert value(samples, "request_decode_time_seconds_sum") == 1.75
    assert value(samples, "e2e_request_latency_seconds_sum") == 3.0
    assert value(samples, "request_generation_tokens_sum") == 5


def test_every_choice_has_one_end() -> None:
    record, metrics = make_record(n=3)
    record.note(update(1, end=FinishReason.LENGTH), 11.0, 0.0)
    record.stop(1)
    for _ in range(2):
        record.end(12.0)
    ends = samples_of(metrics)
    reasons = {r: value(ends, "request_success_total", finished_reason=r) for r in ENDS}
    assert reasons == {"stop": 1, "length": 1, "abort": 1, "error": 0}
    assert value(ends, "num_requests_open") == 0


ENDS = ("stop", "length", "abort", "error")


def test_a_failure_is_counted_and_its_words_are_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvrelay.requests")
    record, metrics = make_record()
    record.fail(StepError("the prompt was 'my secret'"))
    record.note_route(1, None)
    record.end(12.0)
    samples = samples_of(metrics)
    assert value(samples, "request_success_total", finished_reason="error") == 1
    for name in ("e2e_request_latency_seconds", "request_generation_tokens"):
        assert value(samples, f"{name}_count") == 0, "what is refused at once is no quick answer"
    line = json.loads(JsonFormatter().format(caplog.records[-1]))
    assert (line["error"], line["reroutes"], line["finish_reasons"]) == ("StepError", 1, ["error"])
    assert "secret" not in json.dumps(line)


@pytest.mark.parametrize(
    ("error", "is_counted"),
    [
        (RefusedError("too many wait"), False),  # the router counts it
        (RequestError("n", "too many"), False),  # as little as what its ingress found wrong
        (QueueFullError("a worker's queue"), True),
        (StepError("broke"), True),
    ],
)
def test_what_is_refused_is_no_answer(error: EngineError, is_counted: bool) -> None:
    record, metrics = make_record(n=3)
    assert value(samples_of(metrics), "num_requests_open") == 1
    record.fail(error)
    record.end(12.0)
    samples = samples_of(metrics)
    assert value(samples, "num_requests_open") == 0
    assert value(samples, "request_success_total", finished_reason="error") == 3 * is_counted
    assert value(samples, "prompt_tokens_total") == 3 * is_counted
    assert value(samples, "request_prompt_tokens_count") == is_counted


def test_what_fails_after_its_first_token_is_an_answer() -> None:
    record, metrics = make_record()
    record.note(update(1, told=True), 11.0, 0.0)
    record.fail(RequestError("allowed_token_ids", "nothing is left that fits"))
    record.end(12.0)
    samples = samples_of(metrics)
    assert value(samples, "request_success_total", finished_reason="error") == 1
    assert value(samples, "prompt_tokens_total") == 3


def test_whose_time_was_over_has_not_failed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvrelay.requests")
    record, metrics = make_record()
    record.note(update(1, told=True), 11.0, 0.0)
    record.fail(DeadlineError("not finished after 2 s"))
    record.end(12.0)
    samples = samples_of(metrics)
    assert value(samples, "request_success_total", finished_reason="abort") == 1
    assert value(samples, "request_success_total", finished_reason="error") == 0
    (line,) = caplog.records
    assert line.__dict__["fields"]["error"] == "DeadlineError"


async def test_a_prompt_that_is_answered_waits_for_no_other_of_its_request() -> None:
    ended, never = asyncio.Event(), asyncio.Event()

    def script(request: GenerationRequest) -> Iterator[Step]:
        if request.prompt_token_ids == [1]:
            yield update(7, end=FinishReason.LENGTH)
            return
        yield update(7)
        ended.set()
        yield never.wait()

    server = make_server(script)
    async with server.client:
        answer = asyncio.create_task(server.post("/v1/completions", prompt=[[1], [2]]))
        await ended.wait()
        async with asyncio.timeout(10):
            while True:
                samples = read((await server.client.get("/metrics")).content)
                if value(samples, "num_requests_open") == 1:
                    break
        assert value(samples, "request_success_total", finished_reason="length") == 1
        answer.cancel()
        await asyncio.wait([answer])


@pytest.mark.parametrize("error", [RefusedError("too many wait"), StepError("broke")])
async def test_what_fails_with_its_sibling_was_not_given_up_by_its_client(
    error: EngineError,
) -> None:
    """Of four prompts one fails; one has ended, one has begun and one waits."""
    begun, never = asyncio.Event(), asyncio.Event()

    def script(request: GenerationRequest) -> Iterator[Step]:
        match request.prompt_token_ids:
            case [1]:
                yield begun.wait()
                yield error
            case [2]:
                yield update(7, end=FinishReason.LENGTH)
                return
            case [3]:
                yield update(7)
                begun.set()
        yield never.wait()

    server = make_server(script)
    async with server.client:
        prompts = [[1], [2], [3], [4, 4, 4]]
        response = await server.post("/v1/completions", prompt=prompts, max_tokens=4)
        samples = read((await server.client.get("/metrics")).content)
    assert response.status_code == (429 if isinstance(error, RefusedError) else 500)
    ends = {r: value(samples, "request_success_total", finished_reason=r) for r in ENDS}
    num_failed = 1 if isinstance(error, RefusedError) else 3
    assert ends == {"stop": 0, "length": 1, "abort": 0, "error": num_failed}
    assert value(samples, "request_prompt_tokens_count") == 1 + num_failed
    assert value(samples, "num_requests_open") == 0


@pytest.mark.parametrize("stops", [True, False])
async def test_what_a_stop_ends_was_not_left_by_its_client(stops: bool) -> None:
    begun, never = asyncio.Event(), asyncio.Event()

    def script(request: GenerationRequest) -> Iterator[Step]:
        yield update(7)
        begun.set()
        yield never.wait()

    server = make_server(script)
    async with server.client:
        answer = asyncio.create_task(server.post("/v1/completions", prompt=[[1], [2]]))
        await begun.wait()
        if stops:
            await server.front.end_answers(0, UnavailableError("the server is stopping"))
            assert (await answer).status_code == 503
        else:
            answer.cancel()
            await asyncio.wait([answer])
        samples = read((await server.client.get("/metrics")).content)
    ends = {r: value(samples, "request_success_total", finished_reason=r) for r in ENDS}
    assert ends == {"stop": 0, "length": 0, "abort": 2 - 2 * stops, "error": 2 * stops}


def test_inter_token_bounds_begin_at_a_millisecond() -> None:
    assert INTER_TOKEN_S[0] == 0.001
    assert list(INTER_TOKEN_S) == sorted(set(INTER_TOKEN_S))


async def test_a_scrape_has_exactly_what_was_done() -> None:
    server = make_server(say("one two three"))
    async with server.client:
        num_prompt = len(small_tokenizer().encode("hello"))
        for _ in range(3):
            await server.ok("/v1/completions", prompt="hello", max_tokens=2)
        whole = await server.ok("/v1/completions", prompt="hello", n=2, max_tokens=400)
        num_output = 3 * 2 + whole["usage"]["completion_tokens"]
        response = await server.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    samples = read(response.content)
    assert value(samples, "prompt_tokens_total") == 4 * num_prompt
    assert value(samples, "request_prompt_tokens_count") == 4
    assert value(samples, "time_to_first_token_seconds_count") == 4
    assert value(samples, "request_generation_tokens_sum") >= num_output
    ends = [value(samples, "request_success_total", finished_reason=r) for r in ENDS]
    assert ends == [2, 3, 0, 0]
    assert value(samples, "num_requests_open") == 0


async def test_answers_are_counted_by_status_whatever_was_asked() -> None:
    key = "sk-12345678"
    keys = ApiKeys.load(None, {VARIABLE: key})
    server = make_server(say("one"), keys=keys, rates=Rates(requests_per_minute=4))
    async with server.client as client:
        await client.post("/v1/completions", json={"prompt": "x"})
        client.headers["authorization"] = f"Bearer {key}"
        for body in ({}, {"stream": True}, {"model": "another"}, {"n": -1}, {}, {}):
            await client.post("/v1/completions", json={"prompt": "x", **body})
        for path in ("/v1/models/small", "/v1/models/a", "/v1/models/b/c", "/a", "/b", "/tokenize"):
            await client.get(path)
        samples = read((await client.get("/metrics")).content)
    counted = {
        tuple(value for _, value in sorted(labels)): number
        for (name, labels), number in samples.items()
        if name == "http_requests_total"
    }
    assert counted == {
        ("/v1/completions", "200"): 2,
        ("/v1/completions", "400"): 1,
        ("/v1/completions", "401"): 1,
        ("/v1/completions", "404"): 1,
        ("/v1/completions", "429"): 2,
        ("/v1/models/{name}", "200"): 1,
        ("/v1/models/{name}", "404"): 2,
        ("other", "404"): 2,
        ("other", "405"): 1,
    }


async def test_metrics_need_no_key_and_take_no_post(server: Server) -> None:
    assert (await server.client.get("/metrics/targets")).json() == []
    assert (await server.client.post("/metrics")).status_code == 405


# Words that no field of a line could have by chance.
WORDS = st.text(st.characters(min_codepoint=0x4E00, max_codepoint=0x9FFF), min_size=3, max_size=20)


@settings(max_examples=25)
@given(WORDS, WORDS, st.sampled_from(["finishes", "fails", "is refused"]))
def test_no_line_says_what_clients_say_or_are_told(prompt: str, said: str, how: str) -> None:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.extend(one.format(record) for one in (JsonFormatter(), TextFormatter()))

    async def ask() -> None:
        failing = lambda request: iter([StepError("out of memory")])  # noqa: E731
        server = make_server(failing if how == "fails" else say(said))
        async with server.client:
            options = {"bogus": prompt} if how == "is refused" else {}
            await server.post("/v1/completions", prompt=prompt, user=prompt, **options)

    root, handler = logging.getLogger(), Keep()
    names = ("kvrelay", "kvrelay.requests", "kvrelay.http")
    levels = [logging.getLogger(name).level for name in names]
    root.addHandler(handler)
    try:
        for name in names:
            logging.getLogger(name).setLevel(logging.DEBUG)
        asyncio.run(ask())
    finally:
        root.removeHandler(handler)
        for name, level in zip(names, levels, strict=True):
            logging.getLogger(name).setLevel(level)
    if how == "finishes":
        assert lines
    text = "\n".join(lines)
    for words in (prompt, said):
        assert words not in text
        assert json.dumps(words)[1:-1] not in text
