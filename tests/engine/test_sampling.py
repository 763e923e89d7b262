"""Every wrong sampling parameter is a RequestError that names its field, never another error."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import RequestError
from engine.sampling import MAX_CHOICES, MAX_LOGPROBS, SamplingParams

INT_FIELDS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
FLOAT_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
BOOL_FIELDS = ("ignore_eos", "include_stop_str_in_output")


def error_of(**params: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**params)
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", MAX_CHOICES + 1),
        ("temperature", -0.01),
        ("temperature", 100.5),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.0001),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", 101),
        ("presence_penalty", -2.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", 2.1),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("logprobs", -1),
        ("logprobs", MAX_LOGPROBS + 1),
        ("prompt_logprobs", MAX_LOGPROBS + 1),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", (-1,)),
        ("stop_token_ids", (3, -1)),
        ("stop", ("",)),
    ],
)
def test_out_of_range(field: str, value: object) -> None:
    error = error_of(**{field: value})
    assert error.field == field
    assert str(error).startswith(f"{field}: ")


def test_min_tokens_above_max_tokens() -> None:
    assert error_of(min_tokens=9, max_tokens=8).field == "min_tokens"
    SamplingParams(min_tokens=8, max_tokens=8)


@pytest.mark.parametrize("field", FLOAT_FIELDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, "1.0", True, None, [1]])
def test_not_a_usable_number(field: str, value: object) -> None:
    assert error_of(**{field: value}).field == field


@pytest.mark.parametrize("field", INT_FIELDS)
@pytest.mark.parametrize("value", ["1", 1.0, math.nan, True, False, (1,), b"1"])
def test_not_an_integer(field: str, value: object) -> None:
    assert error_of(**{field: value}).field == field


@pytest.mark.parametrize("field", ["n", "top_k", "min_tokens"])
def test_none_where_a_number_is_needed(field: str) -> None:
    assert error_of(**{field: None}).field == field


@pytest.mark.parametrize("field", BOOL_FIELDS)
@pytest.mark.parametrize("value", [0, 1, "true", None])
def test_not_a_bool(field: str, value: object) -> None:
    assert error_of(**{field: value}).field == field


@pytest.mark.parametrize("field", ["allowed_token_ids", "stop_token_ids"])
@pytest.mark.parametrize("value", [5, "5", [5], (5, "6"), (5.0,), (True,), (None,)])
def test_not_token_ids(field: str, value: object) -> None:
    assert error_of(**{field: value}).field == field


@pytest.mark.parametrize("value", ["end", ["end"], (1,), (b"end",), None])
def test_not_stop_strings(value: object) -> None:
    assert error_of(stop=value).field == "stop"


def test_logit_bias() -> None:
    assert error_of(logit_bias={7: 100.5}).field == "logit_bias[7]"
    assert error_of(logit_bias={7: math.nan}).field == "logit_bias[7]"
    assert error_of(logit_bias={7: "1"}).field == "logit_bias[7]"
    for keys in ({"7": 1.0}, {-7: 1.0}, {True: 1.0}, {7.0: 1.0}):
        assert error_of(logit_bias=keys).field == "logit_bias"
    for value in (None, [(7, 1.0)], "7"):
        assert error_of(logit_bias=value).field == "logit_bias"


@given(
    st.sampled_from(INT_FIELDS + FLOAT_FIELDS),
    st.one_of(st.integers(), st.floats(), st.text(), st.booleans(), st.binary(), st.none()),
)
def test_any_value_is_taken_or_named(field: str, value: object) -> None:
    try:
        taken: object = getattr(SamplingParams(**{field: value}), field)  # type: ignore[arg-type]
    except RequestError as error:
        taken = value if error.field == field else error
    assert taken is value


def test_an_int_too_long_to_print_is_named_all_the_same() -> None:
    assert error_of(n=10**5000).field == "n"
    assert error_of(seed=-(10**5000)).field == "seed"
    assert error_of(logit_bias={10**5000: 1.0}).field == "logit_bias"
    assert error_of(stop_token_ids=(10**5000,)).field == "stop_token_ids"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("temperature", 100),
        ("top_p", 1),
        ("top_p", 1e-300),
        ("min_p", 1),
        ("repetition_penalty", 0.01),
        ("top_k", 10**12),
        ("seed", -(2**63)),
        ("seed", 2**63 - 1),
        ("max_tokens", None),
        ("logprobs", 0),
        ("logit_bias", {0: -100, 5: 100.0}),
    ],
)
def test_bounds_are_taken(field: str, value: object) -> None:
    SamplingParams(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"logit_bias": {10: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": (0, 10)}, "allowed_token_ids"),
        ({"stop_token_ids": (10,)}, "stop_token_ids"),
    ],
)
def test_token_ids_beyond_the_vocabulary(params: dict[str, Any], field: str) -> None:
    sampling = SamplingParams(**params)
    with pytest.raises(RequestError) as caught:
        sampling.check_token_ids(10)
    assert caught.value.field == field
    sampling.check_token_ids(11)


def test_greedy() -> None:
    assert SamplingParams(temperature=0.0).greedy
    assert SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams(temperature=0.01).greedy


def test_has_penalties() -> None:
    assert not SamplingParams().has_penalties
    for field in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert SamplingParams(**{field: 1.5}).has_penalties  # type: ignore[arg-type]
