"""Command-line flags made from EngineConfig's fields, so that the two never differ."""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from typing import Any, get_args, get_type_hints

from cluster.commands.numbers import number, whole_number
from cluster.commands.sizes import parse_bytes
from engine.config import EngineConfig
from engine.errors import ConfigError

_HINTS = get_type_hints(EngineConfig)
_PREFIX = "knob_"
_MORE = {"scheduling_policy": "; 'shortest' of prefill workers"}


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for every knob but the model, which commands take as an argument."""
    group = parser.add_argument_group("engine")
    for knob in fields(EngineConfig):
        if knob.name == "model":
            continue
        flag = "--" + knob.name.replace("_", "-")
        more = _MORE.get(knob.name, "")
        default = "" if knob.default is None else f" (default: {knob.default}{more})"
        text = f"{knob.metadata['help']}{default}".replace("%", "%%")
        options: dict[str, Any] = {"dest": _PREFIX + knob.name, "help": text}
        if bool in _types(knob.name):
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = _reader(knob.name)
            options["metavar"] = _metavar(knob.name, knob.metadata["choices"])
        group.add_argument(flag, **options)


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """What was said on the command line; the rest is the config's own default."""
    return EngineConfig.from_mapping({"model": arguments.model, **given_knobs(arguments)})


def given_knobs(arguments: argparse.Namespace) -> dict[str, Any]:
    """Those that were said, but for the model."""
    return {
        name.removeprefix(_PREFIX): value
        for name, value in vars(arguments).items()
        if name.startswith(_PREFIX) and value is not None
    }


def _types(name: str) -> tuple[type, ...]:
    hint = _HINTS[name]
    return get_args(hint) or (hint,)


def _reader(name: str) -> Callable[[str], Any]:
    """Text to the field's type; values are judged by the config."""
    if name.endswith("_bytes"):
        return partial(_size, name)
    if int in _types(name):
        return whole_number
    return number if float in _types(name) else str


def _size(name: str, text: str) -> int:
    try:
        return parse_bytes(name, text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(error.message) from error


def _metavar(name: str, choices: Iterable[str] | None) -> str:
    if choices:
        return "{" + ",".join(choices) + "}"
    if name.endswith("_bytes"):
        return "SIZE"
    kinds = {int: "N", float: "X", str: "TEXT"}
    return next(word for kind, word in kinds.items() if kind in _types(name))
