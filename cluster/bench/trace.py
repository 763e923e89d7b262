"""Recorded traffic as a workload: one JSON object a line, as Mooncake publishes it.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

`timestamp` is in milliseconds; `hash_ids`, which may be missing, name blocks of the prompt (512
tokens each) together with all that precedes them: equal ids are equal beginnings.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Self

from cluster.bench.lengths import MOST_TOKENS
from cluster.bench.workload import Conversation, Piece, Turn
from engine.errors import ConfigError

BLOCK_TOKENS = 512


@dataclass(frozen=True)
class Trace:
    """Conversations of one turn, in the order of their times.

    `scale` multiplies all lengths, those of shared blocks too. `most`: so many of them; a file may
    grow while it is sent.
    """

    path: Path
    scale: float = 1.0
    most: int | None = None
    many_turns: bool = field(default=False, init=False)

    def checked(self) -> Self:
        """With as many as there are now. Reads all of it, so that a bad line is told before
        anything is asked: what can be read once, as a pipe, would be empty then."""
        try:
            is_again = self.path.is_file() or not self.path.exists()
        except OSError as error:
            raise ConfigError("trace", f"{self.path}: {error}") from error
        if not is_again:
            raise ConfigError("trace", f"{self.path}: must be a file, which is read several times")
        num_requests = sum(1 for _ in self.conversations())
        if not num_requests:
            raise ConfigError("trace", f"{self.path}: has no requests")
        return replace(self, most=num_requests)

    def conversations(self) -> Iterator[Conversation]:
        start_ms = last_ms = None
        for number, (where, entry) in enumerate(islice(self._entries(), self.most)):
            at_ms = _number(where, entry, "timestamp", least=0)
            start_ms = at_ms if start_ms is None else start_ms
            if last_ms is not None and at_ms < last_ms:
                raise ConfigError("trace", f"{where}: timestamp: before that of the line above")
            last_ms = at_ms
            turn = Turn(
                self._pieces(where, number, entry),
                self._length(where, entry, "output_length"),
            )
            yield Conversation(number, (turn,), (at_ms - start_ms) / 1e3)

    def _entries(self) -> Iterator[tuple[str, dict[str, Any]]]:
        try:
            with self.path.open(encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    where = f"{self.path}:{number}"
                    if line.strip():
                        yield where, _entry(where, line)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("trace", f"{self.path}: {error}") from error

    def _pieces(self, where: str, number: int, entry: dict[str, Any]) -> tuple[Piece, ...]:
        left = self._length(where, entry, "input_length")
        block = self._scaled(BLOCK_TOKENS)
        pieces = []
        for hash_id in _hash_ids(where, entry):
            if left <= 0:
                break
            pieces.append(Piece(f"block {hash_id}", min(block, left)))
            left -= block
        if left > 0:
            pieces.append(Piece(f"own {number}", left))
        return tuple(pieces)

    def _length(self, where: str, entry: dict[str, Any], key: str) -> int:
        length = _number(where, entry, key, least=1)
        if length * self.scale > MOST_TOKENS:
            times = "" if self.scale == 1 else f" times {self.scale:g}"
            problem = f"{length}{times}, must be at most {MOST_TOKENS} tokens"
            raise ConfigError("trace", f"{where}: {key}: {problem}")
        return self._scaled(length)

    def _scaled(self, length: float) -> int:
        return max(1, round(length * self.scale))


def _entry(where: str, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError("trace", f"{where}: no JSON: {error}") from error
    if not isinstance(entry, dict):
        raise ConfigError("trace", f"{where}: must be an object with timestamp, input_length, ...")
    return entry


def _number(where: str, entry: dict[str, Any], key: str, *, least: int) -> float:
    value = entry.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool) and least <= value < 1e15:
        return value
    raise ConfigError("trace", f"{where}: {key}: must be a number of at least {least}")


def _hash_ids(where: str, entry: dict[str, Any]) -> list[int]:
    ids = entry.get("hash_ids", [])
    if isinstance(ids, list) and all(type(one) is int for one in ids):
        return ids
    raise ConfigError("trace", f"{where}: hash_ids: must be an array of whole numbers")
