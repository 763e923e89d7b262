"""API keys: who may use the HTTP front. Read once, at start; never logged, never an argument."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from engine.errors import ConfigError
from protos.errors import PlaneError
from protos.private_file import read_private_file

VARIABLE = "KVRELAY_API_KEYS"
FILE_FIELD = "api_key_file"
_MAX_FILE_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_KEY = re.compile(r"[\x21-\x7e]{8,512}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """`name` stands for the key wherever one is counted or written of."""

    name: str
    digest: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """At least one. Digests are compared, each of them each time: how long that takes tells
    neither how much of a key was right nor which of them it was."""

    keys: tuple[ApiKey, ...]

    @classmethod
    def load(cls, path: str | None, environ: Mapping[str, str]) -> Self | None:
        """From the file, or else from the environment; None where neither is set."""
        if path is not None:
            return cls.from_file(Path(path))
        if VARIABLE in environ:
            return cls._parse(VARIABLE, _lines(environ[VARIABLE]))
        return None

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Refuses a file that anyone but its owner may touch."""
        try:
            text = read_private_file(FILE_FIELD, path, _MAX_FILE_BYTES + 1)
        except PlaneError as error:
            raise ConfigError(error.field, error.message) from error
        if len(text) > _MAX_FILE_BYTES:  # or a key's beginning would be one, and the rest be none
            raise ConfigError(FILE_FIELD, f"{path} has more than {_MAX_FILE_BYTES} bytes")
        return cls._parse(FILE_FIELD, text.decode("utf-8", "surrogateescape").splitlines())

    @classmethod
    def _parse(cls, source: str, lines: Iterable[str]) -> Self:
        """Errors tell the line's number, never what is in it."""
        keys: list[ApiKey] = []
        for number, line in enumerate(lines, 1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            name, colon, key = line.partition(":")
            if not colon:
                name, key = f"key-{number}", line
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    source, f"line {number}: a name has 1 to 64 letters, digits, '_', '.' and '-'"
                )
            if not _KEY.fullmatch(key):
                raise ConfigError(
                    source, f"line {number}: a key has 8 to 512 visible ASCII characters"
                )
            keys.append(ApiKey(name, _digest(key)))
        if not keys:
            raise ConfigError(source, "holds no key; one a line, as NAME:KEY or KEY")
        if len({key.digest for key in keys}) < len(keys):
            raise ConfigError(source, "the keys must differ")
        ((name, count),) = Counter(key.name for key in keys).most_common(1)
        if count > 1:
            raise ConfigError(source, f"the names must differ: {name!r} is there {count} times")
        return cls(tuple(keys))

    def find(self, authorization: str | None) -> ApiKey | None:
        """Whose key the header `Authorization: Bearer KEY` brings."""
        scheme, _, brought = (authorization or "").partition(" ")
        digest = _digest(brought.strip())
        found = None
        for key in self.keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found if scheme.lower() == "bearer" else None


def _lines(text: str) -> list[str]:
    """Of a variable: a whole file's, or of one line with commas between the keys."""
    lines = text.strip().splitlines()
    one_line = len(lines) == 1 and not lines[0].startswith("#")
    return lines[0].split(",") if one_line else lines


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
