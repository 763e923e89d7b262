"""Loads on the HTTP application over a socket, and on servers that do it wrong."""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from cluster.bench.answer import FailureKind, Tally
from cluster.bench.arrivals import ClosedLoop, OpenLoop
from cluster.bench.client import EndpointKind
from cluster.bench.lengths import Fixed
from cluster.bench.load import Interrupted, Load, run_load
from cluster.bench.measure import summarise
from cluster.bench.prompts import PromptForm
from cluster.bench.workload import Synthetic
from engine.errors import ConfigError, EngineError, QueueFullError
from engine.request import GenerationRequest
from tests.cluster.bench.scripted import HandClock, in_step
from tests.cluster.fakes import CACHED, Step, answer_tokens, say
from tests.cluster.live_server import LiveServer, live_server
from tests.waiting import until


@pytest.fixture(scope="module")
def shared_server() -> Iterator[LiveServer]:
    with live_server() as server:
        yield server


@pytest.fixture
def live(shared_server: LiveServer) -> LiveServer:
    shared_server.backend.script = say("abc")
    shared_server.backend.streams.clear()
    return shared_server


def load_on(live: LiveServer, **options: Any) -> Load:
    workload = Synthetic(Fixed(12), Fixed(5))
    return Load(**{"url": live.url, "workload": workload, "num_requests": 1, **options})


async def test_times_are_those_of_the_server(live: LiveServer) -> None:
    clock, tally = HandClock(), Tally()
    live.backend.script = in_step(clock, tally, [0.5, 0.25, 0.0, 1.0])
    outcome = await run_load(load_on(live, num_requests=2), tally=tally, clock=clock)
    for record in outcome.records:
        assert record.failure is None
        assert record.ttft_s == 0.5
        assert list(record.gaps_s) == [0.25, 0.0, 1.0]
        assert record.tpot_s == 1.25 / 3
        assert record.total_s == 1.75
    assert [record.sent_s for record in outcome.records] == [100.0, 101.75]
    assert outcome.start_s == 100.0


async def test_tokens_are_counted_by_the_server(live: LiveServer) -> None:
    clock, tally = HandClock(), Tally()
    live.backend.script = in_step(clock, tally, [0.5, 0.6], tokens_per_piece=3)
    outcome = await run_load(load_on(live), tally=tally, clock=clock)
    (record,) = outcome.records
    assert record.usage
    assert (record.usage.num_prompt, record.usage.num_cached) == (12, CACHED)
    assert record.num_output == 6
    assert len(record.gaps_s) == 1
    assert record.tpot_s == pytest.approx(0.6 / 5)


async def test_prompts_have_the_server_s_own_tokens(live: LiveServer) -> None:
    outcome = await run_load(load_on(live, num_requests=4))
    assert (outcome.model, outcome.form) == ("small", PromptForm.TOKENS)
    prompts = [tuple(stream.request.prompt_token_ids) for stream in live.backend.streams]
    assert len(set(prompts)) == 4
    assert {len(prompt) for prompt in prompts} == {12}
    assert live.backend.last.params.max_tokens == 5
    assert live.backend.last.params.ignore_eos


async def test_the_same_seed_asks_the_same(live: LiveServer) -> None:
    asked = []
    for seed in (1, 1, 2):
        live.backend.streams.clear()
        await run_load(load_on(live, num_requests=3, seed=seed))
        asked.append([list(s.request.prompt_token_ids) for s in live.backend.streams])
    assert asked[0] == asked[1] != asked[2]


@pytest.mark.parametrize("endpoint", list(EndpointKind))
async def test_text_prompts_have_about_their_length(
    live: LiveServer, endpoint: EndpointKind
) -> None:
    load = load_on(live, workload=Synthetic(Fixed(200), Fixed(5)), endpoint=endpoint)
    (record,) = (await run_load(replace(load, form=PromptForm.TEXT))).records
    assert record.failure is None
    assert record.usage
    assert 150 < record.usage.num_prompt < 280


async def test_warm_up_is_not_measured(live: LiveServer) -> None:
    outcome = await run_load(load_on(live, num_warm_up=3, num_requests=2))
    assert len(outcome.records) == 2
    prompts = {tuple(stream.request.prompt_token_ids) for stream in live.backend.streams}
    assert len(prompts) == 5


async def test_later_turns_go_on_from_the_answer(live: LiveServer) -> None:
    workload = Synthetic(Fixed(6), Fixed(5), turns=Fixed(3))
    outcome = await run_load(load_on(live, workload=workload, num_requests=3))
    assert [(r.conversation, r.turn, r.failure) for r in outcome.records] == [
        (0, 0, None),
        (0, 1, None),
        (0, 2, None),
    ]
    first, second, third = (list(s.request.prompt_token_ids) for s in live.backend.streams)
    answer = answer_tokens("abc")
    assert second[: 6 + len(answer)] == first + answer
    assert third[: len(second)] == second
    assert len(third) == 18 + 2 * len(answer)


async def test_nobody_waits_for_a_turn_that_would_come_too_late(live: LiveServer) -> None:
    workload = Synthetic(Fixed(12), Fixed(5), turns=Fixed(2))
    load = load_on(live, workload=workload, num_requests=2, duration_s=30.0, think_s=3600.0)
    async with asyncio.timeout(20):
        outcome = await run_load(load)
    assert [record.turn for record in outcome.records] == [0]
    assert outcome.num_unsent == 0, "those count that had failed before"


async def test_a_chat_says_what_was_answered(live: LiveServer) -> None:
    workload = Synthetic(Fixed(6), Fixed(5), turns=Fixed(2))
    load = load_on(live, workload=workload, num_requests=2, endpoint=EndpointKind.CHAT)
    outcome = await run_load(load)
    assert [record.failure for record in outcome.records] == [None, None]
    first, second = (list(s.request.prompt_token_ids) for s in live.backend.streams)
    assert len(second) > len(first) + len(answer_tokens("abc")) - 1


async def test_so_many_are_under_way_at_once(live: LiveServer) -> None:
    """Each answer waits for all the others to have been asked for."""

    def script(request: GenerationRequest) -> Iterator[Step]:
        yield until(lambda: len(live.backend.streams) == 8)
        yield from say("abc")(request)

    live.backend.script = script
    for arrivals in (ClosedLoop(8), OpenLoop(10_000.0)):
        live.backend.streams.clear()
        outcome = await run_load(load_on(live, num_requests=8, arrivals=arrivals))
        assert [record.failure for record in outcome.records] == [None] * 8


async def test_failures_are_counted_and_named(live: LiveServer) -> None:
    def script(request: GenerationRequest) -> Iterator[Step]:
        match len(live.backend.streams) % 3:
            case 0:
                yield QueueFullError("full")
            case 1:
                yield next(say("abc")(request))
                yield EngineError("the step failed")
            case 2:
                yield from say("abc")(request)

    live.backend.script = script
    outcome = await run_load(load_on(live, num_requests=6))
    summary = summarise(outcome.records)
    assert summary.failures == {"HTTP 429": 2, "error in mid-stream": 2}
    assert "full" in summary.failure_messages["HTTP 429"]
    assert summary.num_complete == 2


async def test_turns_after_a_failed_one_are_counted(live: LiveServer) -> None:
    live.backend.script = lambda request: iter([QueueFullError("full")])
    workload = Synthetic(Fixed(6), Fixed(5), turns=Fixed(4))
    outcome = await run_load(load_on(live, workload=workload, num_requests=8))
    assert (len(outcome.records), outcome.num_unsent) == (2, 6)


def never_ends(request: GenerationRequest) -> Iterator[Step]:
    yield next(say("abc")(request))
    yield asyncio.Event().wait()


async def test_a_stop_while_the_server_does_not_even_say_what_it_serves() -> None:
    asked, stop = asyncio.Event(), asyncio.Event()
    writers = []

    def keep(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        asked.set()

    server = await asyncio.start_server(keep, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        load = Load(url=url, workload=Synthetic(Fixed(12), Fixed(5)), num_requests=1)
        running = asyncio.create_task(run_load(load, stop=stop))
        await asked.wait()
        stop.set()
        with pytest.raises(Interrupted):
            await asyncio.wait_for(running, 10)
        for writer in writers:
            writer.close()


async def test_a_stop_while_the_server_warms_up_asks_nothing_more(live: LiveServer) -> None:
    def stuck(request: GenerationRequest) -> Iterator[Step]:
        yield asyncio.Event().wait()

    live.backend.script = stuck
    stop, tally = asyncio.Event(), Tally()
    load = load_on(live, num_requests=9, num_warm_up=1, arrivals=ClosedLoop(3))
    running = asyncio.create_task(run_load(load, stop=stop, tally=tally))
    await until(lambda: len(live.backend.streams) == 1)
    stop.set()
    with pytest.raises(Interrupted):
        await running
    assert tally.num_sent == 0


async def test_a_stop_tells_what_was_measured_and_leaves(live: LiveServer) -> None:
    def script(request: GenerationRequest) -> Iterator[Step]:
        return (say("abc") if len(live.backend.streams) <= 2 else never_ends)(request)

    live.backend.script = script
    stop, tally = asyncio.Event(), Tally()

    async def stop_when_stuck() -> None:
        await until(lambda: tally.num_sent == 3 and len(live.backend.streams) == 3)
        stop.set()

    stopping = asyncio.create_task(stop_when_stuck())
    outcome = await run_load(load_on(live, num_requests=9), tally=tally, stop=stop)
    await stopping
    assert outcome.interrupted
    summary = summarise(outcome.records)
    assert (summary.num_complete, summary.num_interrupted, summary.failures) == (2, 1, {})
    await until(lambda: all(stream.num_closed for stream in live.backend.streams))


async def test_an_answer_that_does_not_end_times_out(live: LiveServer) -> None:
    live.backend.script = never_ends
    timeout_s = 0.2
    while not live.backend.streams:  # it was over before the request had come
        load = load_on(live, timeout_s=timeout_s, model="small", token_ids=range(5, 9))
        (record,) = (await run_load(load)).records
        assert record.failure
        assert record.failure.kind is FailureKind.TIMEOUT
        timeout_s *= 2
    await until(lambda: bool(live.backend.streams[0].num_closed))


@asynccontextmanager
async def raw_server(*answers: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Sends the answers in turn, each on a connection of its own, and keeps what it was asked."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        asked.append(head)
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await reader.readexactly(length)
        writer.write(answers[(len(asked) - 1) % len(answers)])
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
TEXT = b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n'
EMPTY = b'data: {"choices": [{"index": 0, "text": ""}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (HEAD + TEXT + USAGE, FailureKind.BROKEN),
        (HEAD + TEXT + DONE, FailureKind.NO_USAGE),
        (HEAD + b"data: {\n\n" + DONE, FailureKind.PROTOCOL),
        (HEAD + b"data: []\n\n" + DONE, FailureKind.PROTOCOL),
        (HEAD + b'data: {"choices": 5}\n\n' + DONE, FailureKind.PROTOCOL),
        (HEAD + b"data: " + b"[" * 100_000 + b"\n\n", FailureKind.PROTOCOL),
        (HEAD + b'data: {"usage": {"prompt_tokens": 1e400}}\n\n', FailureKind.PROTOCOL),
        (b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", FailureKind.PROTOCOL),
        (HEAD + TEXT + b'data: {"error": {"message": "x"}}\n\n', FailureKind.ERROR_EVENT),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata", FailureKind.BROKEN),
        (b"no HTTP at all\r\n\r\n", FailureKind.PROTOCOL),
        (b"", FailureKind.BROKEN),
        (b"HTTP/1.1 502 Bad Gateway\r\n\r\n<html>", FailureKind.STATUS),
    ],
)
async def test_what_a_server_does_wrong_has_a_name(sent: bytes, kind: FailureKind) -> None:
    async with raw_server(sent) as (url, _):
        load = Load(url, Synthetic(Fixed(3), Fixed(1)), num_requests=2, model="m")
        outcome = await run_load(replace(load, token_ids=range(9)))
    assert [r.failure and r.failure.kind for r in outcome.records] == [kind, kind]


@pytest.mark.parametrize("sent", [b'{"object": "text_completion"}', EMPTY])
async def test_a_server_that_answers_otherwise_is_there(sent: bytes) -> None:
    """As one that does not stream."""
    num = 12  # more than are asked in vain of a server that has gone
    async with raw_server(HEAD + sent) as (url, _):
        load = Load(url, Synthetic(Fixed(3), Fixed(1)), num_requests=num, model="m")
        outcome = await run_load(replace(load, token_ids=range(9)))
    assert not outcome.gone
    assert len(outcome.records) == num


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@pytest.mark.parametrize("rest", [b"", chunk(TEXT[:20]), b"ff\r\ndata"])
@pytest.mark.parametrize("is_reset", [False, True])
async def test_a_stream_that_breaks_off_has_failed_and_its_server_is_there(
    rest: bytes, is_reset: bool
) -> None:
    """After three of its tokens, each time."""
    clock, tally = HandClock(), Tally()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        seen = tally.num_chunks
        for number in range(3):
            clock.now += 0.5
            writer.write(chunk(TEXT))
            await until(lambda told=seen + number + 1: tally.num_chunks == told)  # type: ignore[misc]
        writer.write(rest)
        await writer.drain()
        if is_reset:
            no_wait = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_wait)
        writer.close()

    num = 12  # more than are asked in vain of a server that has gone
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        load = Load(url, Synthetic(Fixed(3), Fixed(5)), num_requests=num, model="m")
        outcome = await run_load(replace(load, token_ids=range(9)), tally=tally, clock=clock)
    assert not outcome.gone
    assert len(outcome.records) == num
    for record in outcome.records:
        assert record.failure
        assert record.failure.kind is FailureKind.BROKEN
        assert (record.ttft_s, list(record.gaps_s), record.usage) == (0.5, [0.5, 0.5], None)
    summary = summarise(outcome.records)
    assert summary.failures == {"connection broken": num}
    assert (summary.num_complete, summary.ttft, summary.num_output_tokens) == (0, None, 0)


async def test_a_token_without_text_has_a_time_too() -> None:
    async with raw_server(HEAD + EMPTY + USAGE + DONE) as (url, _):
        load = Load(url, Synthetic(Fixed(3), Fixed(1)), num_requests=1, model="m")
        (record,) = (await run_load(replace(load, token_ids=range(9)))).records
    assert record.failure is None
    assert record.ttft_s is not None


async def test_the_key_goes_into_the_header_and_nowhere_else() -> None:
    async with raw_server(HEAD + TEXT + USAGE + DONE) as (url, asked):
        load = Load(url, Synthetic(Fixed(3), Fixed(1)), num_requests=1, model="m")
        load = replace(load, token_ids=range(9), api_key="secret-1")
        outcome = await run_load(load)
    assert outcome.records[0].failure is None
    assert b"Authorization: Bearer secret-1\r\n" in asked[0]
    assert "secret" not in repr(load) + repr(outcome)


@pytest.mark.parametrize(
    "missing",
    [
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 422 Unprocessable Entity\r\nContent-Length: 0\r\n\r\n",
        b'HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n{"tokens":[]}',
    ],
    ids=["no route", "of other fields, as TGI's", "of other fields, as llama.cpp's"],
)
@pytest.mark.parametrize("endpoint", EndpointKind)
async def test_a_server_without_tokenize_gets_text(missing: bytes, endpoint: EndpointKind) -> None:
    models = json.dumps({"data": [{"id": "other"}]}).encode()
    listed = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(models), models)
    async with raw_server(listed, missing, HEAD + TEXT + USAGE + DONE) as (url, asked):
        load = Load(f"{url}/v1", Synthetic(Fixed(3), Fixed(1)), num_requests=1, endpoint=endpoint)
        outcome = await run_load(load)
    assert (outcome.model, outcome.form) == ("other", PromptForm.TEXT)
    assert outcome.records[0].failure is None
    paths = [b"/v1/models", b"/tokenize", endpoint.path.encode()]
    assert [head.split()[1] for head in asked] == paths


async def test_a_tokenizer_that_makes_all_words_alike_is_said() -> None:
    """Or else every prompt would be the one before, and found cached."""
    tokens = json.dumps({"tokens": [0] * 500}).encode()
    told = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(tokens), tokens)
    async with raw_server(told, HEAD + TEXT + USAGE + DONE) as (url, _):
        load = Load(url, Synthetic(Fixed(3), Fixed(1)), num_requests=1, model="m")
        with pytest.raises(ConfigError, match="^token_ids: .* makes 1 different tokens"):
            await run_load(load)


async def test_a_key_that_is_missing_is_asked_for_by_its_flag() -> None:
    refused = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 15\r\n\r\na key is needed"
    async with raw_server(refused) as (url, _):
        load = Load(url, Synthetic(Fixed(3), Fixed(1)), num_requests=1)
        with pytest.raises(ConfigError, match="^api_key_env: must .* answers: a key is needed$"):
            await run_load(load)


async def test_who_cannot_be_asked_is_named() -> None:
    async with raw_server(b"") as (url, _):
        pass
    with pytest.raises(ConfigError, match="^url: /v1/models cannot be asked"):
        await run_load(Load(url, Synthetic(Fixed(3), Fixed(1)), num_requests=1))
    load = Load(url, Synthetic(Fixed(3), Fixed(1)), num_requests=1, model="m")
    (record,) = (await run_load(replace(load, token_ids=range(9)))).records
    assert record.failure
    assert record.failure.kind is FailureKind.NOT_CONNECTED
