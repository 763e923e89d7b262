"""The parameters that APIs share, and what they are where a client is silent."""

import re
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from cluster.drawn import draw_seed
from cluster.openai.body import Body, CacheMark, Ids, No, Part, Texts, Yes, unless_null
from cluster.openai.errors import bad_request
from cluster.openai.request_limits import LEAST_PRIORITY, MAX_SALT_CHARS, NOT_IN_SALTS
from cluster.openai.structured import (
    AnySchema,
    NamedGrammar,
    ResponseFormat,
    StructuredOutputs,
    read_grammar,
)
from engine.errors import RequestError
from engine.generation_defaults import RECOMMENDED, GenerationDefaults
from engine.sampling import SamplingParams

_ID = re.compile(r"0|-?[1-9][0-9]{0,18}")
_MAX_STOPS = 32
_MAX_STOP_CHARS = 1024


class StreamOptions(Part):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # usage so far in every event
    include_obfuscation: bool | None = None  # OpenAI's, who blurs how long events are unless told


def _check_stop(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return None
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise PydanticCustomError("stop", "a string or an array of strings")
    if len(stops) > _MAX_STOPS or any(len(stop) > _MAX_STOP_CHARS for stop in stops):
        raise PydanticCustomError(
            "stop", f"at most {_MAX_STOPS} strings of at most {_MAX_STOP_CHARS} characters"
        )
    return stops


def _check_salt(value: Any) -> Any:
    if isinstance(value, str) and (not value or NOT_IN_SALTS.intersection(value)):
        raise PydanticCustomError("salt", "a string without @, /, \\ and NUL, not an empty one")
    return value


_Bias = Annotated[dict[int, float], Field(fail_fast=True)]


def _check_bias_keys(value: Any) -> Any:
    """Numbers, and no more than that: pydantic would take " 46" and "47.0", too."""
    if not isinstance(value, dict):
        return value
    for key in value:
        if not (type(key) is int or (isinstance(key, str) and _ID.fullmatch(key))):
            raise PydanticCustomError(
                "bias",
                "an object whose names are token ids, as {name} is not",
                {"name": repr(key)[:64]},
            )
    return {int(key): bias for key, bias in value.items()}


class SharedFields(Body):
    """Of every API that generates, by the names that OpenAI and vLLM give them; None is "not
    said"."""

    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    priority: Annotated[int, Field(ge=LEAST_PRIORITY, lt=2**31), unless_null(0)] = 0
    cache_salt: Annotated[
        str | None, Field(max_length=MAX_SALT_CHARS), BeforeValidator(_check_salt)
    ] = None
    # Clients send them for records and caches that are not kept here; they never change an answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    cache_control: CacheMark = None


class SamplingFields(SharedFields):
    """Of completions and chat."""

    # Real parameters of OpenAI's or vLLM's that would change the answer.
    not_supported: ClassVar = {
        "bad_words": ([],),
        "best_of": (1,),
        "data_parallel_rank": (),
        "kv_transfer_params": ({},),
        "length_penalty": (1,),
        "logits_processors": ([],),
        "logprob_token_ids": ([],),
        "prompt_embeds": (),
        "repetition_detection": (),
        "request_id": (),
        "service_tier": ("auto", "default"),
        "session_id": (),
        "spaces_between_special_tokens": (True,),
        "store": (False,),
        "stream_interval": (1,),
        "guided_decoding_backend": ("auto", "guidance"),  # which is llguidance, as it is here
        "guided_whitespace_pattern": (),
        "thinking_token_budget": (),
        "truncate_prompt_tokens": (),
        "truncation_side": (),
        "use_beam_search": (False,),
        "vllm_xargs": ({},),
    }

    stream_options: StreamOptions | None = None
    n: int | None = None
    logit_bias: Annotated[_Bias | None, BeforeValidator(_check_bias_keys, _Bias | None)] = None
    allowed_token_ids: Ids | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_check_stop, str | list[str] | None)] = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: No = False
    ignore_eos: No = False
    skip_special_tokens: Yes = True
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: AnySchema | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None

    def asks_for_nothing(self, name: str, value: Any) -> bool:
        """The best of as many as are asked for are all of them."""
        as_many = name == "best_of" and type(value) is int and value == self.n
        return as_many or super().asks_for_nothing(name, value)

    def sampling_params(
        self, defaults: GenerationDefaults, *, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """The request, then the model's recommendation, then OpenAI's defaults."""
        given = {name: getattr(defaults, name) for name in RECOMMENDED}
        given |= {name: v for name in _PASSED_ON if (v := getattr(self, name)) is not None}
        values = {name: value for name, value in given.items() if value is not None}
        if values.get("top_k") == -1:  # vLLM's "off"
            values["top_k"] = 0
        for name in _TUPLES:
            if name in values:
                values[name] = tuple(values[name])
        values.setdefault("seed", draw_seed())
        named = self.named_grammar
        return SamplingParams(
            **values,
            max_tokens=max_tokens,
            logprobs=logprobs,
            grammar=None if named is None else named.grammar,
        ).without_repeats()

    @cached_property
    def named_grammar(self) -> NamedGrammar | None:
        guided = {
            "json": self.guided_json,
            "regex": self.guided_regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar,
        }
        return read_grammar(self.response_format, self.structured_outputs, guided)

    def check_stream_options(self) -> None:
        if not self.stream and self.stream_options is not None:
            raise RequestError("stream_options", "is allowed with stream=true only")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            name = "stream_options.include_obfuscation"
            raise bad_request(name, f"{name} is not supported", "unsupported_parameter")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs", "is not available with stream=true")


_TUPLES = ("stop", "stop_token_ids", "allowed_token_ids")
_PASSED_ON = (
    *("n", *RECOMMENDED, "presence_penalty", "frequency_penalty", "logit_bias", *_TUPLES),
    *("seed", "min_tokens", "include_stop_str_in_output", "ignore_eos", "prompt_logprobs"),
)
