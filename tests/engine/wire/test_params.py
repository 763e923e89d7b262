import math
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import RequestError
from engine.grammar.value import MAX_GRAMMAR_BYTES, Grammar, GrammarKind, Reasoning
from engine.request import ChoiceSoFar, GenerationRequest, RequestId
from engine.sampling import MAX_CHOICES, MAX_LOGPROBS, SamplingParams
from engine.wire.params import decode_params, encode_params
from engine.wire.requests import decode_request, encode_request
from protos import generation_pb2, session_pb2

TOKENS = st.integers(0, 2**31 - 1)
TOKEN_LISTS = st.lists(TOKENS, max_size=5).map(tuple)
COUNTS = st.integers(0, 2**32 - 1)
# surrogates are no characters
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
MARKS = st.lists(TOKEN_LISTS.filter(bool), max_size=2).map(tuple)
PARAMS = (
    st.builds(
        SamplingParams,
        n=st.integers(1, MAX_CHOICES),
        temperature=st.floats(0, 100) | st.integers(0, 100),
        top_k=COUNTS,
        top_p=st.floats(0, 1, exclude_min=True),
        min_p=st.floats(0, 1),
        repetition_penalty=st.floats(0.01, 100),
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
        logit_bias=st.dictionaries(TOKENS, st.floats(-100, 100), max_size=5),
        allowed_token_ids=st.none() | st.lists(TOKENS, min_size=1, max_size=5).map(tuple),
        seed=st.none() | st.integers(-(2**63), 2**63 - 1),
        max_tokens=st.none() | st.integers(2**20, 2**32 - 1),
        min_tokens=st.integers(0, 2**20),
        stop=st.lists(TEXT, max_size=3).map(tuple),
        stop_token_ids=TOKEN_LISTS,
        include_stop_str_in_output=st.booleans(),
        ignore_eos=st.booleans(),
        logprobs=st.none() | st.integers(0, MAX_LOGPROBS),
        prompt_logprobs=st.none() | st.integers(0, MAX_LOGPROBS),
    )
    | st.builds(
        SamplingParams,
        grammar=st.builds(Grammar, st.sampled_from(GrammarKind), TEXT),
        reasoning=st.none()
        | st.builds(
            Reasoning,
            TOKENS.filter(bool),
            st.lists(st.just(0), max_size=2).map(tuple),
            TOKEN_LISTS,
            TOKEN_LISTS,
            MARKS,
        ),
        exits=MARKS,
    )
    | st.builds(
        SamplingParams,
        grammar=st.builds(Grammar, st.sampled_from(GrammarKind), TEXT),
        entries=MARKS,
    )
)
REQUESTS = st.builds(
    GenerationRequest,
    request_id=st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=256),
    prompt_token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=30),
    params=PARAMS,
    priority=st.integers(-(2**31), 2**31 - 1),
    cache_salt=TEXT | st.just(""),
    timeout_s=st.none() | st.integers(1, 2**32 - 1).map(lambda ms: ms / 1000),
)


@given(PARAMS)
def test_params_come_back_as_they_were(params: SamplingParams) -> None:
    sent = encode_params(params).SerializeToString()
    assert decode_params(generation_pb2.SamplingParams.FromString(sent)) == params


@st.composite
def requests(draw: st.DrawFn) -> GenerationRequest:
    """Some of them begun by another worker: then every choice has an entry."""
    request = draw(REQUESTS)
    if not draw(st.booleans()):
        return request
    begun = st.builds(ChoiceSoFar, st.lists(st.integers(0, 2**32 - 1), max_size=3), st.booleans())
    few = replace(request.params, n=draw(st.integers(1, 4)))
    sent = tuple(draw(begun) for _ in range(few.n))
    return replace(request, params=few, sent=sent)


@given(requests())
def test_requests_come_back_as_they_were(request: GenerationRequest) -> None:
    sent = encode_request(request).SerializeToString()
    assert decode_request(session_pb2.Submit.FromString(sent)) == request


def test_one_token_that_begins_reasoning_is_what_earlier_versions_knew() -> None:
    begins = generation_pb2.Reasoning(start=[7], end=1)
    assert begins.SerializeToString() == b"\x08\x07\x10\x01"


def test_defaults_are_not_sent() -> None:
    assert encode_params(SamplingParams()).SerializeToString() == b""
    assert decode_params(generation_pb2.SamplingParams()) == SamplingParams()


def test_the_message_has_every_parameter() -> None:
    wire = {field.name for field in generation_pb2.SamplingParams.DESCRIPTOR.fields}
    assert wire == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("n", {"n": 0}),
        ("n", {"n": 4_000_000_000}),
        ("temperature", {"temperature": math.nan}),
        ("temperature", {"temperature": math.inf}),
        ("top_p", {"top_p": 0.0}),
        ("min_p", {"min_p": -0.1}),
        ("max_tokens", {"max_tokens": 0}),
        ("min_tokens", {"max_tokens": 3, "min_tokens": 4}),
        ("logprobs", {"logprobs": 21}),
        ("stop", {"stop": ["a", ""]}),
        ("stop_token_ids", {"stop_token_ids": [2**31]}),
        ("logit_bias", {"logit_bias": {2**31: 1.0}}),
        ("logit_bias[3]", {"logit_bias": {3: math.nan}}),
        ("allowed_token_ids", {"allowed_token_ids": generation_pb2.Tokens()}),
        ("grammar", {"grammar": generation_pb2.Grammar()}),
        ("grammar", {"grammar": generation_pb2.Grammar(regex="")}),
        ("grammar", {"grammar": generation_pb2.Grammar(choice="x" * (MAX_GRAMMAR_BYTES + 1))}),
        ("reasoning", {"reasoning": generation_pb2.Reasoning(end=1)}),
        ("exits", {"exits": [generation_pb2.Tokens(token_ids=[1])]}),
        ("entries", {"entries": [generation_pb2.Tokens(token_ids=[1])]}),
        ("ignore_eos", {"grammar": generation_pb2.Grammar(regex="a"), "ignore_eos": True}),
    ],
)
def test_what_is_out_of_range_is_named(field: str, message: dict[str, object]) -> None:
    with pytest.raises(RequestError) as caught:
        decode_params(generation_pb2.SamplingParams(**message))  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("top_k", {"top_k": 2**32}),
        ("max_tokens", {"max_tokens": 10**30}),
        ("stop", {"stop": ("\ud800",)}),
    ],
)
def test_what_no_message_can_say_is_named(field: str, params: dict[str, object]) -> None:
    with pytest.raises(RequestError) as caught:
        encode_params(SamplingParams(**params))  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("request_id", {"request_id": ""}),
        ("request_id", {"request_id": "x" * 257}),
        ("request_id", {"request_id": "a\nline of another"}),
        ("prompt", {"prompt_token_ids": [1, -1]}),
        ("prompt", {"prompt_token_ids": [2**32]}),
        ("prompt", {"prompt_token_ids": ["a"]}),
        ("prompt", {"prompt_token_ids": [1.0]}),
        ("sent", {"sent": (ChoiceSoFar([-1]),)}),
        ("cache_salt", {"cache_salt": "\ud800"}),
        ("priority", {"priority": 2**31}),
        ("timeout_s", {"timeout_s": 0.0}),
        ("timeout_s", {"timeout_s": math.nan}),
    ],
)
def test_a_request_that_cannot_be_sent_is_refused_here(
    field: str, changes: dict[str, object]
) -> None:
    values: dict[str, object] = {
        "request_id": RequestId("r"),
        "prompt_token_ids": [1],
        "params": SamplingParams(),
    }
    with pytest.raises(RequestError) as caught:
        encode_request(GenerationRequest(**{**values, **changes}))  # type: ignore[arg-type]
    assert caught.value.field == field


def test_a_time_is_rounded_up_and_never_to_none() -> None:
    def sent(timeout_s: float | None) -> int:
        request = GenerationRequest(RequestId("r"), [1], SamplingParams(), timeout_s=timeout_s)
        return encode_request(request).timeout_ms

    asked = [None, math.inf, 1e-9, 0.0011, 1e9]
    assert [sent(timeout_s) for timeout_s in asked] == [0, 0, 1, 2, 2**32 - 1]


def test_what_was_sent_is_of_every_choice() -> None:
    choices = [session_pb2.ChoiceSoFar(token_ids=[1])]
    params = generation_pb2.SamplingParams(n=2)
    message = session_pb2.Submit(request_id="r", params=params, choices=choices)
    with pytest.raises(RequestError, match="sent: 1 choices, must be none or 2"):
        decode_request(message)


def test_a_submit_without_an_id_is_refused() -> None:
    with pytest.raises(RequestError, match="request_id"):
        decode_request(session_pb2.Submit(token_ids=[1]))
