"""Flags made from SamplingParams' fields, whose bounds are those of requests."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

from cluster.commands.numbers import number, whole_number
from engine.sampling import SamplingParams

_HINTS = get_type_hints(SamplingParams)
_PREFIX = "sampling_"
# Of what a command with one answer has no use for, or has other words for.
NOT_HERE = {"n", "grammar", "reasoning", "exits", "entries"}
_HELP = {
    "max_tokens": "of the answer",
    "min_tokens": "of the answer, before anything may end it",
    "temperature": "0: always the likeliest token",
    "top_p": "of the likeliest tokens, as many as have this share",
    "top_k": "as many of the likeliest tokens; 0: all",
    "min_p": "tokens with this share of the likeliest one's probability",
    "repetition_penalty": "on tokens of prompt and answer; 1: none",
    "presence_penalty": "on tokens of the answer",
    "frequency_penalty": "on tokens of the answer, for each time",
    "logit_bias": "added to a token's logit; may be repeated",
    "allowed_token_ids": "no others are drawn",
    "stop": "ends the text; may be repeated",
    "stop_token_ids": "end the answer",
    "include_stop_str_in_output": "also show what ended it",
    "ignore_eos": "go on behind the model's own end",
    "seed": "the same text again",
    "logprobs": "tell each token's, and those of as many others (on stderr)",
    "prompt_logprobs": "tell those of the prompt's tokens, too",
}
_FLAGS = {"seed": "--sampling-seed"}  # `--seed` is the engine's


def add_sampling_flags(parser: argparse.ArgumentParser, more: Mapping[str, str]) -> None:
    """`more` to say of some fields. What is not said is as the model recommends."""
    group = parser.add_argument_group("sampling (default: as the model recommends)")
    for name, text in _HELP.items():
        flag = _FLAGS.get(name, "--" + name.replace("_", "-"))
        text += more.get(name, "")
        group.add_argument(flag, dest=_PREFIX + name, help=text, **_kind(name))


def given_sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """Those that were said, as a request has them."""
    given = {
        name.removeprefix(_PREFIX): value
        for name, value in vars(arguments).items()
        if name.startswith(_PREFIX) and value is not None
    }
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return given


def _kind(name: str) -> dict[str, Any]:
    """How a value of the field's type is written."""
    hint = _HINTS[name]
    types = set(get_args(hint)) - {type(None)} or {hint}
    if name == "logit_bias":
        return {"action": "append", "type": _bias, "metavar": "ID=X"}
    if bool in types:
        return {"action": "store_true", "default": None}
    if str in types:
        return {"action": "append", "metavar": "TEXT"}
    if float in types:
        return {"type": number, "metavar": "X"}
    many = {"nargs": "+", "metavar": "ID"} if types != {int} else {"metavar": "N"}
    return {"type": whole_number, **many}


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return whole_number(token_id), number(bias)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text!r}, must be like 17=-2.5") from error
