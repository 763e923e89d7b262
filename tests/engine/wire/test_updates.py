"""Updates sent in steps and read again are the updates that were sent, however they are cut."""

import math
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import (
    DeadlineError,
    EngineError,
    QueueFullError,
    RequestError,
    StepError,
    UnavailableError,
    in_full,
)
from engine.request import (
    ChoiceDelta,
    FinishReason,
    GenerationUpdate,
    PromptReport,
    PromptTimes,
    RequestId,
)
from engine.sampling import MAX_LOGPROBS
from engine.step import TokenLogprobs
from engine.wire.failures import decode_failure, encode_failure
from engine.wire.logprobs import decode_logprobs
from engine.wire.reading import NewsReader
from engine.wire.updates import steps_of, update_bytes
from protos import generation_pb2, session_pb2
from protos.generation_pb2 import Failure
from protos.limits import MAX_MESSAGE_BYTES, PART_BYTES

NUM_CHOICES = 4
TOKENS = st.integers(0, 2**32 - 1)
LOGPROBS = st.floats(max_value=0, allow_nan=False)
SECONDS = st.floats(0, 1e6)
ENTRIES = st.builds(
    TokenLogprobs,
    TOKENS,
    LOGPROBS,
    st.integers(1, 2**32 - 1),
    st.lists(st.tuples(TOKENS, LOGPROBS), max_size=20).map(tuple),
)


@st.composite
def deltas(draw: st.DrawFn) -> ChoiceDelta:
    tokens = draw(st.lists(TOKENS, min_size=1, max_size=12))
    with_logprobs = draw(st.booleans())
    return ChoiceDelta(
        draw(st.integers(0, NUM_CHOICES - 1)),
        tokens,
        [draw(ENTRIES) for _ in tokens] if with_logprobs else None,
        draw(st.none() | st.sampled_from(FinishReason)),
        draw(st.none() | TOKENS),
    )


PROMPTS = st.builds(
    PromptReport,
    TOKENS,
    st.none() | st.lists(ENTRIES, max_size=12).map(lambda entries: [None, *entries]),
    st.none() | st.builds(PromptTimes, SECONDS, SECONDS, SECONDS),
)
UPDATES = st.builds(
    GenerationUpdate, st.lists(deltas(), min_size=1, max_size=6), st.none() | PROMPTS
)


def num_prompt_tokens(update: GenerationUpdate) -> int:
    logprobs = update.prompt.logprobs if update.prompt else None
    return len(logprobs) if logprobs else 1


def over_the_wire(steps: Iterable[session_pb2.Step]) -> list[session_pb2.RequestNews]:
    news: list[session_pb2.RequestNews] = []
    for step in steps:
        news += session_pb2.Step.FromString(step.SerializeToString()).requests
    return news


def merged(updates: Iterable[GenerationUpdate]) -> GenerationUpdate:
    """One update, with the pieces of each delta put together again."""
    prompt: PromptReport | None = None
    pieces: list[ChoiceDelta] = []
    for update in updates:
        assert prompt is None or update.prompt is None
        prompt = prompt or update.prompt
        pieces += update.deltas
    return GenerationUpdate(pieces, prompt)


def tokens_of(update: GenerationUpdate) -> list[tuple[object, ...]]:
    """Token by token, so that it does not matter how they are grouped."""
    flat: list[tuple[object, ...]] = []
    for delta in update.deltas:
        last = len(delta.token_ids) - 1
        for number, token in enumerate(delta.token_ids):
            logprobs = delta.logprobs[number] if delta.logprobs else None
            end = (delta.finish_reason, delta.stop_token_id) if number == last else (None, None)
            flat.append((delta.choice, token, logprobs, *end))
    return flat


@given(UPDATES)
def test_updates_come_back_as_they_were(update: GenerationUpdate) -> None:
    (news,) = over_the_wire(steps_of([(RequestId("r"), update)]))
    assert news.request_id == "r"
    assert NewsReader(num_prompt_tokens(update), NUM_CHOICES).read(news) == update


@settings(max_examples=20)
@given(st.dictionaries(st.text("abc", min_size=1), UPDATES, max_size=5), st.integers(700, 3000))
def test_parts_stay_small_and_come_together_again(
    updates: dict[str, GenerationUpdate], part_bytes: int
) -> None:
    news_of_all = [(RequestId(name), update) for name, update in updates.items()]
    steps = list(steps_of(news_of_all, part_bytes))
    # an id is not split, and an entry with its alternatives neither
    assert all(step.ByteSize() <= part_bytes + 64 for step in steps)
    readers = {n: NewsReader(num_prompt_tokens(u), NUM_CHOICES) for n, u in updates.items()}
    got: dict[str, list[GenerationUpdate]] = {name: [] for name in updates}
    for news in over_the_wire(steps):
        read = readers[news.request_id].read(news)
        got[news.request_id] += [] if read is None else [read]
    for name, update in updates.items():
        result = merged(got[name])
        assert result.prompt == update.prompt
        assert tokens_of(result) == tokens_of(update)
        assert got[name][0].prompt == update.prompt, "the report comes first"


@given(UPDATES)
def test_sizes_are_bounds(update: GenerationUpdate) -> None:
    (step,) = steps_of([(RequestId(""), update)])
    assert step.ByteSize() <= update_bytes(update) + 32


def test_a_long_prompts_report_fits_into_messages() -> None:
    top = tuple((100_000 + i, -float(i)) for i in range(20))
    entries = [None, *(TokenLogprobs(i, -1.5, 3, top) for i in range(1, 20_000))]
    update = GenerationUpdate([ChoiceDelta(0, [1])], PromptReport(7, entries))
    steps = list(steps_of([(RequestId("r"), update)]))
    assert len(steps) > 2
    assert all(step.ByteSize() <= PART_BYTES + 1000 < MAX_MESSAGE_BYTES for step in steps)
    reader = NewsReader(20_000, 1)
    read = [u for news in over_the_wire(steps) if (u := reader.read(news))]
    assert merged(read) == update


def test_many_requests_share_a_step() -> None:
    news: list[tuple[RequestId, GenerationUpdate | EngineError]] = [
        (RequestId(f"request-{i}"), GenerationUpdate([ChoiceDelta(0, [i])])) for i in range(64)
    ]
    (step,) = steps_of([*news, (RequestId("last"), StepError("no more memory"))])
    assert len(step.requests) == 65
    assert str(decode_failure(step.requests[64].failure)) == "no more memory"


REFUSED = {
    "choice": {"deltas": [{"choice": 1, "token_ids": [1]}]},
    "logprobs": {"deltas": [{"token_ids": [1, 2], "logprobs": [{"token_id": 1}]}]},
    "finish_reason": {"deltas": [{"token_ids": [1], "finish_reason": 9}]},
    "prompt.logprobs": {"prompt": {"has_logprobs": True, "complete": True}},
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_was_not_asked_is_refused(field: str) -> None:
    with pytest.raises(RequestError) as caught:
        NewsReader(3, 1).read(session_pb2.RequestNews(**REFUSED[field]))  # type: ignore[arg-type]
    assert caught.value.field == field


def test_more_prompt_than_there_was_is_refused_before_it_is_kept() -> None:
    part = session_pb2.RequestNews(prompt={"has_logprobs": True, "logprobs": [{"token_id": 1}]})  # type: ignore[arg-type]
    reader = NewsReader(3, 1)
    assert reader.read(part) is None
    assert reader.read(part) is None
    with pytest.raises(RequestError, match=r"prompt\.logprobs"):
        reader.read(part)


def test_a_second_report_is_refused() -> None:
    news = session_pb2.RequestNews(prompt={"complete": True})  # type: ignore[arg-type]
    reader = NewsReader(3, 1)
    assert reader.read(news) == GenerationUpdate([], PromptReport(0, None))
    with pytest.raises(RequestError, match="already"):
        reader.read(news)


def test_alternatives_without_values_are_refused() -> None:
    news = session_pb2.RequestNews(
        deltas=[{"token_ids": [1], "logprobs": [{"top_token_ids": [1, 2], "top_logprobs": [0.0]}]}]  # type: ignore[list-item]
    )
    with pytest.raises(RequestError, match="2 alternatives with 1 values"):
        NewsReader(1, 1).read(news)


def test_more_alternatives_than_can_be_asked_for_are_refused() -> None:
    many = [1] * (MAX_LOGPROBS + 1)
    entry = generation_pb2.TokenLogprobs(token_id=1, top_token_ids=many, top_logprobs=many)
    with pytest.raises(RequestError, match="21 alternatives, at most 20"):
        decode_logprobs([entry], "logprobs")


@pytest.mark.parametrize(
    "entry",
    [
        generation_pb2.TokenLogprobs(token_id=8),
        generation_pb2.TokenLogprobs(token_id=1, top_token_ids=[8], top_logprobs=[0]),
    ],
)
def test_a_token_of_no_vocabulary_is_refused(entry: generation_pb2.TokenLogprobs) -> None:
    assert decode_logprobs([entry], "logprobs", 9)
    with pytest.raises(RequestError, match="logprobs: a token is not in the vocabulary"):
        decode_logprobs([entry], "logprobs", 8)


@pytest.mark.parametrize(
    "error",
    [
        RequestError("top_p", "2, must be at most 1"),
        QueueFullError("4096 wait"),
        UnavailableError("loading"),
        UnavailableError("nobody could serve", "10.0.0.1:500: it has ended"),
        StepError("no more memory"),
        DeadlineError("not finished after 2 s"),
    ],
)
def test_errors_come_back_as_they_were(error: EngineError) -> None:
    failure = Failure.FromString(encode_failure(error).SerializeToString())
    result = decode_failure(failure)
    assert (type(result), str(result)) == (type(error), str(error))
    for name in ("field", "detail"):
        assert getattr(result, name, None) == getattr(error, name, None)


@pytest.mark.parametrize("kind", [Failure.KIND_INCOMPATIBLE, Failure.KIND_STALE])
def test_a_worker_that_does_not_fit_is_unavailable(kind: Failure.Kind.ValueType) -> None:
    failure = Failure(kind=kind, field="block_size", message="16 and 64")
    error = decode_failure(failure)
    assert isinstance(error, UnavailableError)
    assert str(error) == "block_size: 16 and 64"


@pytest.mark.parametrize("kind", Failure.Kind.values())
def test_no_more_is_kept_of_what_a_worker_says_than_a_reader_wants(
    kind: Failure.Kind.ValueType,
) -> None:
    long = {"field": "f" * (1 << 20), "message": "m" * (1 << 20), "detail": "d" * (1 << 20)}
    error = decode_failure(Failure(kind=kind, **long))
    assert len(in_full(error)) < 3200
    assert "mmm" in str(error)


def test_any_failure_is_an_error() -> None:
    assert isinstance(decode_failure(Failure()), StepError)
    unknown = Failure.FromString(b"\x08\x63")  # kind 99
    assert isinstance(decode_failure(unknown), StepError)


def test_a_message_that_quotes_nonsense_can_be_sent() -> None:
    failure = encode_failure(StepError("\ud800" + "x" * 100_000))
    assert failure.message.startswith("\\ud800")
    assert failure.ByteSize() < 10_000


def test_infinities_survive() -> None:
    entry = TokenLogprobs(1, -math.inf, 1, ((2, -math.inf), (3, -5e-324)))
    update = GenerationUpdate([ChoiceDelta(0, [1], [entry])])
    (news,) = over_the_wire(steps_of([(RequestId("r"), update)]))
    assert NewsReader(1, 1).read(news) == update
