"""What is wrong, by the name that its user gave it: of the flag, or of its place in a file."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, NamedTuple

from engine.errors import ConfigError, EngineError, RequestError, in_full

# What the values of flags for a part of a file, or of a request, are called among a command's.
_PREFIXES = {"engine": "knob_", "front": "front_", "rpc": "plane_", "request": "sampling_"}


class Flag(NamedTuple):
    name: str
    default: Any


def told(
    error: EngineError, arguments: argparse.Namespace | None, flags: Mapping[str, Flag]
) -> str:
    """`flags` go by what their values are called."""
    if arguments is None or not isinstance(error, ConfigError | RequestError):
        return in_full(error)
    field, bracket, key = error.field.partition("[")
    flag = _flag_of(field, arguments, flags)
    return in_full(error) if flag is None else f"{flag}{bracket}{key}: {error.message}"


def _flag_of(field: str, arguments: argparse.Namespace, flags: Mapping[str, Flag]) -> str | None:
    """None where no flag says it, or the file does."""
    has_file = getattr(arguments, "config", None) is not None
    for name in _names(field):
        flag = flags.get(name)
        if flag is not None and not (has_file and getattr(arguments, name) == flag.default):
            return flag.name
    return None


def _names(field: str) -> list[str]:
    """That a flag's value may have."""
    place, _, name = field.rpartition(".")
    parts = [prefix for part, prefix in _PREFIXES.items() if place in ("", part)]
    names = [field.replace(".", "_"), *(prefix + name for prefix in parts)]
    return [*names, *(one.removesuffix("_s") for one in names)]  # seconds, which are a flag's unit
