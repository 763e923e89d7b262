"""What a client asks of the sampler: one value that travels with the request.

With the tokens so far it is all that the choice of the next token needs, so a first token may
be drawn on another worker than the rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from engine.errors import RequestError
from engine.grammar.value import Grammar, Reasoning, Tokens

MAX_CHOICES = 128
MAX_LOGPROBS = 20
# Every step looks at each of them as long as an answer may still become it.
MAX_MARKS, MAX_MARK_TOKENS = 1024, 1024
# Lower temperatures leave probability to equal logits alone; of those, greedy takes the first.
GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Checked when made: a value of a wrong type or out of range is a RequestError that names
    its field.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch the filter off.
    `seed` None lets the engine draw one; choice i of a request draws from (seed, i, position).
    `stop` strings are the detokenizer's business; the engine stops on token ids alone.
    An answer with a `grammar` ends where that is complete, also before `min_tokens`; `reasoning`
    is what it may begin with. One that begins with one of `exits` in its place is free of it. With
    `entries` all of it is free but what follows one of them, each time, until the grammar is
    complete.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    grammar: Grammar | None = None
    reasoning: Reasoning | None = None
    exits: tuple[Tokens, ...] = ()
    entries: tuple[Tokens, ...] = ()
    seed: int | None = None
    max_tokens: int | None = None  # None: up to the model's length
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives reported beside each sampled token
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_token_lists()
        self._check_stops()

    def _check_numbers(self) -> None:
        _check_int("n", self.n, 1, MAX_CHOICES)
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_int("top_k", self.top_k, 0, None)
        _check_float("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, None)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)

    def _check_token_lists(self) -> None:
        _check_type("logit_bias", self.logit_bias, Mapping, "a map from token ids to numbers")
        _check_token_ids("logit_bias", tuple(self.logit_bias))
        for token, bias in self.logit_bias.items():
            _check_float(f"logit_bias[{token}]", bias, -100.0, 100.0)
        if self.allowed_token_ids is not None:
            _check_token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids", "must name at least one token")
        _check_token_ids("stop_token_ids", self.stop_token_ids)

    def _check_stops(self) -> None:
        _check_type("stop", self.stop, tuple, "a tuple of strings")
        if any(not isinstance(s, str) for s in self.stop):
            raise RequestError("stop", "must hold nothing but strings")
        if any(not s for s in self.stop):
            raise RequestError("stop", "a stop string must not be empty")
        for name in ("include_stop_str_in_output", "ignore_eos"):
            _check_type(name, getattr(self, name), bool, "true or false")
        if self.grammar is not None:
            _check_type("grammar", self.grammar, Grammar, "a Grammar")
            if self.ignore_eos and not self.entries:
                raise RequestError("ignore_eos", "does not go with a grammar, which has an end")
        if self.reasoning is not None:
            _check_type("reasoning", self.reasoning, Reasoning, "a Reasoning")
            _check_token_ids("reasoning", self.reasoning.token_ids)
            _check_marks("reasoning.exits", self.reasoning.exits)
            if max(map(len, self.reasoning.marks)) > MAX_MARK_TOKENS:
                raise RequestError(
                    "reasoning", f"each of its marks must be at most {MAX_MARK_TOKENS} tokens"
                )
            if self.reasoning.end in self.reasoning.start:
                raise RequestError("reasoning", "begins and ends with the same token")
            if self.grammar is None:
                raise RequestError("reasoning", "goes with a grammar alone, which it comes before")
        for name, given in (("exits", self.exits), ("entries", self.entries)):
            _check_marks(name, given)
            if given and self.grammar is None:
                raise RequestError(name, "go with a grammar alone")
        if self.exits and self.entries:
            raise RequestError("entries", "do not go with exits")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def without_repeats(self) -> "SamplingParams":
        """The same, with every token id named once: no list is longer than a vocabulary."""
        allowed, stops = self.allowed_token_ids, self.stop_token_ids
        if allowed is None and not stops:
            return self
        return replace(
            self,
            allowed_token_ids=None if allowed is None else tuple(dict.fromkeys(allowed)),
            stop_token_ids=tuple(dict.fromkeys(stops)),
        )

    @property
    def num_named_tokens(self) -> int:
        return len(self.logit_bias) + len(self.allowed_token_ids or ()) + len(self.stop_token_ids)

    def check_token_ids(self, vocab_size: int) -> None:
        """Every token id that the request names must be one of the model's."""
        named = {
            "logit_bias": self.logit_bias,
            "allowed_token_ids": self.allowed_token_ids or (),
            "stop_token_ids": self.stop_token_ids,
            "reasoning": self.reasoning.token_ids if self.reasoning is not None else (),
            "exits": tuple(chain(*self.exits)),
            "entries": tuple(chain(*self.entries)),
        }
        for name, token_ids in named.items():
            for token in token_ids:
                if not 0 <= token < vocab_size:
                    raise RequestError(name, f"token {token}, must be in 0..{vocab_size - 1}")


def _check_int(name: str, value: object, low: int, high: int | None) -> None:
    # a bool is an int to Python, but not to whoever sent `true` for a number
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong_type(name, value, "an integer")
    _check_range(name, value, low, high)


def _check_float(
    name: str, value: object, low: float, high: float, *, low_open: bool = False
) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _wrong_type(name, value, "a number")
    _check_range(name, value, low, high, low_open=low_open)


def _check_token_ids(name: str, value: object) -> None:
    if not isinstance(value, tuple):
        raise _wrong_type(name, value, "a tuple of token ids")
    if any(type(token) is not int or not 0 <= token < 2**31 for token in value):
        raise RequestError(name, f"token ids must be integers in 0..{2**31 - 1}")


def _check_marks(name: str, value: tuple[Tokens, ...]) -> None:
    if len(value) > MAX_MARKS:
        raise RequestError(name, f"{len(value)} of them, must be at most {MAX_MARKS}")
    for tokens in value:
        _check_token_ids(name, tokens)
        if not 0 < len(tokens) <= MAX_MARK_TOKENS:
            raise RequestError(name, f"each must name 1 to {MAX_MARK_TOKENS} tokens")


def _check_type(name: str, value: object, kind: type, words: str) -> None:
    if not isinstance(value, kind):
        raise _wrong_type(name, value, words)


def _wrong_type(name: str, value: object, words: str) -> RequestError:
    return RequestError(name, f"must be {words}, not {type(value).__name__}")


def _check_range(
    name: str, value: float, low: float, high: float | None, *, low_open: bool = False
) -> None:
    too_low = value <= low if low_open else value < low
    is_nan = value != value  # math.isnan fails on an int beyond every float
    if is_nan or too_low or (high is not None and value > high):
        opening = f"greater than {low}" if low_open else f"at least {low}"
        closing = "" if high is None else f" and at most {high}"
        # Python refuses to print an int of thousands of digits
        shown = "too large" if abs(value) >= 2**64 else value
        raise RequestError(name, f"{shown}, must be {opening}{closing}")
