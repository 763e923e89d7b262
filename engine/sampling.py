"""What a client asks of the sampler: one value that travels with the request.

With the tokens so far it is all that the choice of the next token needs, so a first token may
be drawn on another worker than the rest.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.errors import RequestError

MAX_CHOICES = 128
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Checked when made; a value out of range is a RequestError that names its field.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch the filter off.
    `seed` None lets the engine draw one; choice i of a request draws from (seed, i, position).
    `stop` strings are the detokenizer's business; the engine stops on token ids alone.
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
        _check_range("n", self.n, 1, MAX_CHOICES)
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_k", self.top_k, 0, None)
        _check_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for token, bias in self.logit_bias.items():
            _check_range(f"logit_bias[{token}]", bias, -100.0, 100.0)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids", "must name at least one token")
        if self.seed is not None:
            _check_range("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 1, None)
        _check_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        if any(not s for s in self.stop):
            raise RequestError("stop", "a stop string must not be empty")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check_range(name, value, 0, MAX_LOGPROBS)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def check_token_ids(self, vocab_size: int) -> None:
        """Every token id that the request names must be one of the model's."""
        named = {
            "logit_bias": self.logit_bias,
            "allowed_token_ids": self.allowed_token_ids or (),
            "stop_token_ids": self.stop_token_ids,
        }
        for name, token_ids in named.items():
            for token in token_ids:
                if not 0 <= token < vocab_size:
                    raise RequestError(name, f"token {token}, must be in 0..{vocab_size - 1}")


def _check_range(
    name: str, value: float, low: float, high: float | None, *, low_open: bool = False
) -> None:
    too_low = value <= low if low_open else value < low
    if math.isnan(value) or too_low or (high is not None and value > high):
        opening = f"greater than {low}" if low_open else f"at least {low}"
        closing = "" if high is None else f" and at most {high}"
        raise RequestError(name, f"{value}, must be {opening}{closing}")
