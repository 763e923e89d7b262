"""/v1/completions against an engine that says what it is told."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from cluster.openai import completion_wording
from cluster.openai.generation import Generation
from cluster.openai.logprobs import completion_logprobs
from cluster.openai.request_limits import MAX_NAMED_TOKENS
from cluster.openai.wording import prompt_logprobs_of
from engine.errors import DeadlineError, QueueFullError
from engine.request import (
    ChoiceDelta,
    FinishReason,
    GenerationRequest,
    GenerationUpdate,
    PromptReport,
)
from engine.text.detokenizer import Detokenizer, TextOptions
from engine.text.pieces import Pieces
from tests.cluster.conftest import Server, make_server
from tests.cluster.fakes import (
    ANSWER,
    CACHED,
    Step,
    answer_tokens,
    say,
    small_model,
    small_tokenizer,
)
from tests.engine.text.small_tokenizers import byte_level, wrapped

PATH = "/v1/completions"
NUM_ANSWER_TOKENS = len(answer_tokens())


async def test_whole_answer(server: Server) -> None:
    answer = await server.ok(PATH, model="small", prompt="Tell me", max_tokens=200)
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "small")
    choice = {
        "index": 0,
        "text": ANSWER,
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert answer["choices"] == [choice]
    num_prompt = len(small_tokenizer().encode("Tell me"))
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": NUM_ANSWER_TOKENS,
        "total_tokens": num_prompt + NUM_ANSWER_TOKENS,
        "prompt_tokens_details": {"cached_tokens": CACHED},
    }


async def test_sixteen_tokens_by_default(server: Server) -> None:
    answer = await server.ok(PATH, prompt="Tell me")
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"
    # Less where the context leaves less: the client did not ask for them.
    room = 5
    prompt = [5] * (server.model.max_model_len - room)
    assert (await server.ok(PATH, prompt=prompt))["usage"]["completion_tokens"] == room


@pytest.mark.parametrize("per_step", [1, 3, 100])
async def test_stream_joins_to_the_whole_answer(per_step: int) -> None:
    server = make_server(say(per_step=per_step))
    events = await server.events(PATH, prompt="x", max_tokens=200)
    assert "".join(event["choices"][0]["text"] for event in events) == ANSWER
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * (
        len(events) - 1
    )
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert len({event["id"] for event in events}) == 1
    assert "usage" not in events[0]


async def test_every_event_of_a_stream_has_the_same_keys(server: Server) -> None:
    """Most are cut from a prepared frame, the last one is not."""
    events = await server.events(PATH, prompt="x", max_tokens=200)
    assert len(events) > 5
    assert len({tuple(event) for event in events}) == 1
    assert len({tuple(event["choices"][0]) for event in events}) == 1
    assert {event["object"] for event in events} == {"text_completion"}


async def test_characters_are_never_split(server: Server) -> None:
    response = await server.post(PATH, prompt="x", max_tokens=200, stream=True)
    assert "\\ud83e\\udd8a" in response.text
    assert "\\ufffd" not in response.text


async def test_usage_in_streams(server: Server) -> None:
    events = await server.events(
        PATH, prompt="x", max_tokens=4, stream_options={"include_usage": True}
    )
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 4
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await server.events(PATH, prompt="x", max_tokens=4, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[0] == 1


async def test_prompts_and_choices_are_counted_together(server: Server) -> None:
    prompts = ["one", "two words"]
    answer = await server.ok(PATH, prompt=prompts, n=2, max_tokens=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] == 4 * 3
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * CACHED
    sent = [list(stream.request.prompt_token_ids) for stream in server.backend.streams]
    assert sent == [small_tokenizer().encode(prompt) for prompt in prompts]
    ids = [stream.request.request_id for stream in server.backend.streams]
    assert len(set(ids)) == 2

    events = await server.events(PATH, prompt=[[1, 2], [7, 8, 9]], n=2, max_tokens=200)
    texts = dict.fromkeys(range(4), "")
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert set(texts.values()) == {ANSWER}


async def test_each_prompt_has_a_seed_of_its_own_unless_one_is_said(server: Server) -> None:
    """The draws are a function of it: equal prompts would get equal answers."""
    for stream in (False, True):
        server.backend.streams.clear()
        await server.post(PATH, prompt=["x", "x", "x"], n=2, max_tokens=1, stream=stream)
        params = [stream.request.params for stream in server.backend.streams]
        assert len({one.seed for one in params}) == 3
        assert None not in {one.seed for one in params}
        assert {(one.n, one.max_tokens) for one in params} == {(2, 1)}
    server.backend.streams.clear()
    await server.ok(PATH, prompt=["x", "x"], max_tokens=1, seed=7)
    assert [stream.request.params.seed for stream in server.backend.streams] == [7, 7]


async def test_one_refused_prompt_refuses_all_and_frees_the_others(server: Server) -> None:
    def script(request: GenerationRequest) -> Iterator[Step]:
        if request.prompt_token_ids[0] == 9:
            yield QueueFullError("64 requests are waiting")
        yield from say()(request)

    server.backend.script = script
    for stream in (False, True):
        response = await server.post(PATH, prompt=[[1], [9], [2]], max_tokens=200, stream=stream)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == "rate_limit_exceeded"


@pytest.mark.parametrize(
    ("num_tokens", "fields", "most"),
    [
        (400, {}, 4),
        (1, {}, 6),
        (1, {"stop_token_ids": list(range(431)), "allowed_token_ids": list(range(431))}, 3),
        (1, {"n": 60}, 2),
        (1, {"n": 8, "stop": ["x" * 1000] * 32}, 1),
    ],
)
async def test_others_have_their_turns_between_many_prompts(
    server: Server, num_tokens: int, fields: dict[str, Any], most: int
) -> None:
    """A thousand prompts take more than a second of routing, of many choices also where they are
    short."""
    at_a_turn: list[int] = []

    async def look() -> None:
        while True:
            at_a_turn.append(len(server.backend.streams))
            await asyncio.sleep(0)

    other = asyncio.create_task(look())
    await server.ok(PATH, prompt=[[1] * num_tokens] * 20, **fields)
    other.cancel()
    steps = [after - before for before, after in pairwise(at_a_turn)]
    assert len(server.backend.streams) == 20
    assert 0 < max(steps) <= most


async def test_a_deadline_that_the_engine_keeps_is_a_timeout(server: Server) -> None:
    server.backend.script = lambda request: iter([DeadlineError("not in its time")])
    headers = {"X-Request-Timeout": "9.5"}
    response = await server.client.post(PATH, json={"prompt": [[1]]}, headers=headers)
    assert response.status_code == 408
    error = response.json()["error"]
    assert (error["type"], error["message"]) == ("timeout_error", "not in its time (9.5 s)")
    assert response.headers["x-should-retry"] == "false"


async def test_token_ids_go_to_the_engine_as_they_are(server: Server) -> None:
    await server.ok(PATH, prompt=[3, 1, 2])
    assert list(server.backend.last.prompt_token_ids) == [3, 1, 2]
    await server.ok(PATH, prompt=[[3, 1, 2]])
    assert list(server.backend.last.prompt_token_ids) == [3, 1, 2]


async def test_echo_begins_with_the_prompt(server: Server) -> None:
    answer = await server.ok(PATH, prompt="Tell me: ", echo=True, max_tokens=200)
    assert answer["choices"][0]["text"] == "Tell me: " + ANSWER
    ids = small_tokenizer().encode("Tell me: ")
    answer = await server.ok(PATH, prompt=ids, echo=True, max_tokens=200)
    assert answer["choices"][0]["text"] == "Tell me: " + ANSWER
    events = await server.events(PATH, prompt="Tell me: ", echo=True, max_tokens=200)
    assert events[0]["choices"][0]["text"] == "Tell me: "
    assert "".join(event["choices"][0]["text"] for event in events) == "Tell me: " + ANSWER


async def test_echo_of_no_tokens_is_the_prompt_alone(server: Server) -> None:
    answer = await server.ok(PATH, prompt="Tell me", echo=True, max_tokens=0, logprobs=1)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Tell me", "length")
    num_prompt = len(small_tokenizer().encode("Tell me"))
    assert len(choice["logprobs"]["tokens"]) == num_prompt
    assert answer["usage"]["completion_tokens"] == 0
    assert (await server.post(PATH, prompt="Tell me", max_tokens=0)).status_code == 400


@pytest.mark.parametrize("echo", [False, True])
async def test_logprobs_stand_beside_their_text(server: Server, echo: bool) -> None:
    prompt = "Say 🦊:"
    body = {"prompt": prompt, "max_tokens": 200, "logprobs": 2, "echo": echo}
    choice = (await server.ok(PATH, **body))["choices"][0]
    logprobs = choice["logprobs"]
    tokens, offsets = logprobs["tokens"], logprobs["text_offset"]
    prompt_ids = small_tokenizer().encode(prompt) if echo else []
    ids = prompt_ids + answer_tokens()
    assert len(tokens) == len(offsets) == len(ids)
    # A token's text begins at its offset; parts of a character begin where it does.
    for token, offset in zip(tokens[:-1], offsets, strict=False):
        if not token.startswith("bytes:"):
            assert choice["text"][offset:].startswith(token)
    assert sum(token.startswith("bytes:") for token in tokens) >= 2
    assert offsets == sorted(offsets)
    assert tokens[-1] == "</s>"
    assert offsets[-1] == len(choice["text"])
    expected = [-i / 1000 for i in ids]
    assert logprobs["token_logprobs"] == ([None, *expected[1:]] if echo else expected)
    for entry, token in zip(logprobs["top_logprobs"][1:], tokens[1:], strict=True):
        assert token in entry
        assert len(entry) == 2

    streamed = [event["choices"][0] for event in await server.events(PATH, **body)]
    for key in logprobs:
        assert [x for c in streamed if c["logprobs"] for x in c["logprobs"][key]] == logprobs[key]


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_offsets_in_a_prompt_with_special_tokens(skips: bool, stream: bool) -> None:
    """Those that the client wrote are in its text; one that the tokenizer adds is not."""
    backend = byte_level()
    first = [("<s>", backend.token_to_id("<s>"))]
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=first)
    server = make_server(model=replace(small_model(), tokenizer=wrapped(backend)))
    text = "<|im_start|>user\n🦊 fox<|im_end|><|im_end|>\nTell"
    body = {"prompt": text, "max_tokens": 3, "echo": True, "logprobs": 0}
    body["skip_special_tokens"] = skips
    if stream:
        choice = (await server.events(PATH, **body))[0]["choices"][0]
        assert choice["text"] == text
    else:
        choice = (await server.ok(PATH, **body))["choices"][0]
        assert choice["text"].startswith(text)
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert tokens[0] == "<s>"
    assert tokens.count("<|im_end|>") == 2
    ends = [*offsets[1:], len(choice["text"])]
    parts = [choice["text"][offset:end] for offset, end in zip(offsets, ends, strict=True)]
    assert parts[0] == ""
    for token, part in zip(tokens[1:], parts[1:], strict=True):
        assert token.startswith("bytes:") or part == token
    assert "".join(parts) == choice["text"]


async def test_no_alternatives_but_the_token_itself(server: Server) -> None:
    answer = await server.ok(PATH, prompt="x", max_tokens=1, logprobs=0)
    token = answer_tokens()[0]
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{logprobs["tokens"][0]: -token / 1000}]


async def test_prompt_logprobs(server: Server) -> None:
    answer = await server.ok(PATH, prompt=[5, 6, 7], max_tokens=1, prompt_logprobs=1)
    entries = answer["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    assert entries[1] == {
        "6": {"logprob": -0.006, "rank": 1, "decoded_token": small_tokenizer().token(6)}
    }
    assert "prompt_logprobs" not in (await server.ok(PATH, prompt=[5]))["choices"][0]
    response = await server.post(PATH, prompt=[5], prompt_logprobs=1, stream=True)
    assert response.json()["error"]["param"] == "prompt_logprobs"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_choices_share_of_their_prompt_is_built_once(
    server: Server, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    built: list[tuple[str, list[int]]] = []

    def echoed(speller: Any, logprobs: Any, token_ids: Any, *others: Any) -> Any:
        if logprobs and logprobs[0] is None:  # as of a prompt's first token
            built.append(("echo", list(token_ids)))
        return completion_logprobs(speller, logprobs, token_ids, *others)

    def beside(generation: Generation, *others: Any) -> Any:
        built.append(("beside", list(generation.prompt.token_ids)))
        return prompt_logprobs_of(generation, *others)

    monkeypatch.setattr(completion_wording, "completion_logprobs", echoed)
    monkeypatch.setattr(completion_wording, "prompt_logprobs_of", beside)
    body: dict[str, Any] = {"prompt": [[5, 6, 7], [8, 9]], "n": 3, "logprobs": 1, "echo": True}
    kinds = ["echo"] if stream else ["echo", "beside"]
    if stream:
        await server.events(PATH, max_tokens=2, **body)
    else:
        answer = await server.ok(PATH, max_tokens=2, prompt_logprobs=1, **body)
        told = [list(choice["prompt_logprobs"][1]) for choice in answer["choices"]]
        assert told == [["6"]] * 3 + [["9"]] * 3
        num_told = [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]]
        assert num_told == [5] * 3 + [4] * 3
    assert sorted(built) == sorted((kind, ids) for kind in kinds for ids in body["prompt"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("num_tokens", "elsewhere"), [(3, False), (200, True)])
async def test_many_logprobs_are_worded_off_the_event_loop(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    num_tokens: int,
    elsewhere: bool,
    stream: bool,
) -> None:
    threads = []

    def echoed(speller: Any, logprobs: Any, *others: Any) -> Any:
        if logprobs and logprobs[0] is None:
            threads.append(threading.current_thread())
        return completion_logprobs(speller, logprobs, *others)

    monkeypatch.setattr(completion_wording, "completion_logprobs", echoed)
    body = {"prompt": [5] * num_tokens, "n": 2, "max_tokens": 1, "logprobs": 0, "echo": True}
    response = await server.post(PATH, stream=stream, **body)
    assert response.status_code == 200
    (thread,) = threads
    assert (thread is not threading.current_thread()) == elsewhere


async def test_an_echo_without_logprobs_tracks_no_offsets(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracked = []

    def detokenizer(pieces: Pieces, *, options: TextOptions) -> Detokenizer:
        tracked.append(options.track_offsets)
        return Detokenizer(pieces, options=options)

    monkeypatch.setattr(completion_wording, "Detokenizer", detokenizer)
    ids = small_tokenizer().encode("Tell me: ")
    await server.ok(PATH, prompt=ids, echo=True, max_tokens=1)
    await server.ok(PATH, prompt=ids, echo=True, max_tokens=1, logprobs=0)
    assert tracked == [False, True]


async def test_token_ids_on_request(server: Server) -> None:
    body = {"prompt": [5, 6], "max_tokens": 3, "return_token_ids": True}
    choice = (await server.ok(PATH, **body))["choices"][0]
    assert choice["prompt_token_ids"] == [5, 6]
    assert choice["token_ids"] == answer_tokens()[:3]
    streamed = [event["choices"][0] for event in await server.events(PATH, **body)]
    assert streamed[0]["prompt_token_ids"] == [5, 6]
    assert [i for c in streamed for i in c.get("token_ids", [])] == answer_tokens()[:3]
    body = {"prompt": [5], "max_tokens": 1, "logprobs": 0, "return_tokens_as_token_ids": True}
    tokens = (await server.ok(PATH, **body))["choices"][0]["logprobs"]["tokens"]
    assert tokens == [f"token_id:{answer_tokens()[0]}"]


@pytest.mark.parametrize("per_step", [1, 7])
@pytest.mark.parametrize("include", [False, True])
async def test_stop_string_ends_a_choice(per_step: int, include: bool) -> None:
    server = make_server(say(per_step=per_step))
    body = {
        "prompt": "x",
        "max_tokens": 200,
        "stop": ["never", "over\n"],
        "include_stop_str_in_output": include,
    }
    expected = ANSWER[: ANSWER.index("over\n") + (5 if include else 0)]
    answer = await server.ok(PATH, n=2, **body)
    for choice in answer["choices"]:
        assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
        assert choice["stop_reason"] == "over\n"
    assert server.backend.streams[0].stopped == [0, 1]
    # Tokens that the engine made beyond the stop string are not counted.
    tokens, text = answer_tokens(), small_tokenizer().decode
    used = next(n for n in range(len(tokens)) if "over\n" in text(tokens[:n]))
    assert answer["usage"]["completion_tokens"] == 2 * used

    events = await server.events(PATH, **body)
    assert "".join(event["choices"][0]["text"] for event in events) == expected
    assert events[-1]["choices"][0]["stop_reason"] == "over\n"


async def test_stop_token_is_told_and_not_shown(server: Server) -> None:
    token = small_tokenizer().encode("fox")[0]

    def script(request: GenerationRequest) -> Iterator[Step]:
        ids = [*small_tokenizer().encode("The "), token]
        yield GenerationUpdate(
            [ChoiceDelta(0, ids, None, FinishReason.STOP, token)], PromptReport(0)
        )

    server.backend.script = script
    choice = (await server.ok(PATH, prompt="x", stop_token_ids=[token]))["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("The ", token)
    assert choice["finish_reason"] == "stop"
    body = {"prompt": "x", "stop_token_ids": [token], "include_stop_str_in_output": True}
    choice = (await server.ok(PATH, **body))["choices"][0]
    assert choice["text"] == "The " + small_tokenizer().decode([token])


async def test_special_tokens_show_on_request(server: Server) -> None:
    server.backend.script = say("a<|im_end|>b")
    assert (await server.ok(PATH, prompt="x"))["choices"][0]["text"] == "ab"
    answer = await server.ok(PATH, prompt="x", skip_special_tokens=False)
    assert answer["choices"][0]["text"] == "a<|im_end|>b"


async def test_a_choice_cut_in_a_character_ends_as_the_tokenizer_decodes_it(
    server: Server,
) -> None:
    server.backend.script = say("🦊")
    answer = await server.ok(PATH, prompt="x", max_tokens=1)
    assert answer["choices"][0]["text"] == small_tokenizer().decode(answer_tokens("🦊")[:1])


async def test_where_all_would_be_refused_nothing_is_read(server: Server) -> None:
    server.backend.full = QueueFullError("too many requests wait", 2.5)
    for path in ("/v1/completions", "/v1/chat/completions"):
        response = await server.client.post(path, content=b"no JSON")
        assert response.status_code == 429
        assert response.headers["retry-after"] == "3"
        assert response.json()["error"]["message"] == "too many requests wait"
    assert server.backend.streams == []


async def test_token_ids_reach_the_engine_once(server: Server) -> None:
    """They go through lists for every prompt and every token."""
    ids = [7, 3, 7, 3, 3]
    await server.ok(PATH, prompt="x", stop_token_ids=ids, allowed_token_ids=ids)
    params = server.backend.last.params
    assert (params.stop_token_ids, params.allowed_token_ids) == ((7, 3), (7, 3))


async def test_many_prompts_do_not_each_bring_many_token_ids(server: Server) -> None:
    ids = list(range(300))
    most = MAX_NAMED_TOKENS // (2 * len(ids))
    body = {"stop_token_ids": ids, "logit_bias": dict.fromkeys(ids, 0.0)}
    await server.ok(PATH, prompt=["x"] * most, **body)
    response = await server.post(PATH, prompt=["x"] * (most + 1), **body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("logprobs", {"logprobs": 20, "n": 128, "max_tokens": 500, "prompt": ["x"] * 8}),
        ("prompt_logprobs", {"prompt_logprobs": 20, "prompt": [[5] * 400] * 1000}),
    ],
)
async def test_no_answer_has_more_logprobs_than_there_is_room_for(
    server: Server, field: str, body: dict[str, Any]
) -> None:
    response = await server.post(PATH, **body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == field
    assert "at most 8000000" in error["message"].replace(",", "")
    assert not server.backend.streams
    await server.ok(PATH, **body | {"prompt": body["prompt"][:1]})
