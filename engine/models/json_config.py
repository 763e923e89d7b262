"""Typed reading of the JSON files of a model folder; every error names file and key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from engine.errors import ModelError

MOST = 2**31 - 1  # of what is counted: far beyond every model
# Of what is measured: what is computed from it by a few products is a finite number of 32 bits.
_SMALLEST, _LARGEST = 1e-30, 1e30
_RANGE = f"{_SMALLEST} to {_LARGEST}"


def read_json_object(path: Path) -> dict[str, Any]:
    """ModelError says which file is not one."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # numbers too long for int, too many brackets
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds a {type(value).__name__}, an object is needed")
    return value


class JsonConfig:
    """One JSON object, read key by key; remembers which keys were asked for.

    A key that is missing or null takes the default; without a default that is an error.
    """

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values = values
        self.where = where
        self.seen: set[str] = set()

    @property
    def unseen(self) -> set[str]:
        """Keys with a value that nobody has asked for."""
        return {key for key, value in self.values.items() if value is not None} - self.seen

    def overlaid_on(self, defaults: Mapping[str, object]) -> JsonConfig:
        """The same object with `defaults` for keys that are absent; a null stays a null."""
        return JsonConfig({**defaults, **self.values}, self.where)

    def raw(self, key: str) -> object:
        self.seen.add(key)
        return self.values.get(key)

    def fail(self, key: str, message: str) -> ModelError:
        return ModelError(f"{self.where}: {key}: {message}")

    def _missing(self, key: str, needed: str) -> ModelError:
        return self.fail(key, f"missing, {needed} is needed")

    def optional_integer(self, key: str, minimum: int = 1, maximum: int = MOST) -> int | None:
        value = self.raw(key)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.fail(key, f"{value!r}, must be an integer of at least {minimum}")
        if value > maximum:
            raise self.fail(key, f"{value}, must be at most {maximum}")
        return value

    def integer(
        self, key: str, default: int | None = None, minimum: int = 1, maximum: int = MOST
    ) -> int:
        value = self.optional_integer(key, minimum, maximum)
        if value is None:
            value = default
        if value is None:
            raise self._missing(key, f"an integer of at least {minimum}")
        return value

    def optional_number(self, key: str) -> float | None:
        """A positive number."""
        value = self.raw(key)
        if value is None:
            return None
        if not _is_positive(value):
            raise self.fail(key, f"{value!r}, must be a positive number, {_RANGE}")
        return float(value)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.optional_number(key)
        if value is None:
            value = default
        if value is None:
            raise self._missing(key, "a positive number")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self.raw(key)
        if value is None:
            value = default
        if value is None:
            raise self._missing(key, "true or false")
        if not isinstance(value, bool):
            raise self.fail(key, f"{value!r}, must be true or false")
        return value

    def optional_text(self, key: str) -> str | None:
        value = self.raw(key)
        if value is not None and not isinstance(value, str):
            raise self.fail(key, f"{value!r}, must be a string")
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self.raw(key)
        if value is None:
            raise self._missing(key, "a list of numbers")
        if not isinstance(value, list) or not all(map(_is_positive, value)):
            raise self.fail(key, f"must be a list of positive numbers, {_RANGE}")
        return tuple(float(v) for v in value)

    def texts(self, key: str) -> tuple[str, ...] | None:
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self.fail(key, f"{value!r}, must be a list of strings")
        return tuple(value)

    def section(self, key: str) -> JsonConfig | None:
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(key, f"{value!r}, must be an object")
        return JsonConfig(value, f"{self.where}: {key}")


def _is_positive(value: object) -> TypeGuard[int | float]:
    """And of a size that can be computed with."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return _SMALLEST <= value <= _LARGEST
