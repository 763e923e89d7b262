"""Mooncake's trace format: one JSON object a line.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

`timestamp` is in milliseconds; `hash_ids` name the prompt's blocks of 512 tokens, each together
with all that precedes it, the last of them perhaps in part.

Answers have no ids. Where a later prompt begins with all full blocks of a request (more than the
first block, which strangers share) and is long enough to contain its answer, it is taken for the
conversation's next turn: the blocks that the answer fills are the ones that this prompt has there.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from benchmarks.simulate.traffic import BLOCK_TOKENS, Request, block_name, full_blocks, in_order
from engine.errors import ConfigError
from kv_cache.names import BlockName

_MOST = 10**9  # of any length, id or time


class Line(NamedTuple):
    at_ms: float
    num_tokens: int
    num_output: int
    ids: list[int]


def load_mooncake(path: Path, seed: int = 0) -> list[Request]:
    """Stamps that many requests share stand for the time up to the next one: they are spread
    uniformly over it."""
    lines = list(_lines(path))
    if not lines:
        raise ConfigError("trace", f"{path}: has no requests")
    spread_ms = _stamp_distance(lines)
    random = Random(f"spread {seed}")
    names: dict[int, BlockName] = {}
    requests = []
    for number, (line, ids) in enumerate(zip(lines, _with_answers(lines), strict=True)):
        at_s = (line.at_ms + random.uniform(0, spread_ms)) / 1e3
        own = [names.get(i) or names.setdefault(i, block_name(i)) for i in ids]
        length = full_blocks(line.num_tokens, line.num_output, BLOCK_TOKENS)
        own += [block_name(f"answer {number} {i}") for i in range(len(own), length)]
        requests.append(Request(number, at_s, line.num_tokens, line.num_output, tuple(own)))
    return in_order(requests)


def _stamp_distance(lines: list[Line]) -> float:
    """The smallest distance of two stamps, if on average more than two requests share one."""
    stamps = sorted({line.at_ms for line in lines})
    if len(stamps) < 2 or len(lines) <= 2 * len(stamps):
        return 0.0
    return min(after - before for before, after in zip(stamps, stamps[1:], strict=False))


def _with_answers(lines: list[Line]) -> list[list[int]]:
    """The ids of every request's full blocks, those of its answer among them where known."""
    later: dict[int, Line] = {}  # the next prompt with that block
    found = []
    for line in reversed(lines):
        num_full = line.num_tokens // BLOCK_TOKENS
        ids = line.ids[:num_full]
        following = later.get(ids[-1]) if num_full > 1 else None
        if following and following.num_tokens >= line.num_tokens + line.num_output:
            length = full_blocks(line.num_tokens, line.num_output, BLOCK_TOKENS)
            ids = following.ids[:length]
        found.append(ids)
        for one in line.ids[:num_full]:
            later[one] = line
    return found[::-1]


def _lines(path: Path) -> Iterator[Line]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield _line(f"{path}:{number}", text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("trace", f"{path}: {error}") from error


def _line(where: str, text: str) -> Line:
    try:
        entry = json.loads(text)
    except ValueError as error:
        raise ConfigError("trace", f"{where}: no JSON: {error}") from error
    if not isinstance(entry, dict):
        raise ConfigError("trace", f"{where}: must be an object with timestamp, input_length, ...")
    at_ms = _number(where, entry, "timestamp")
    num_tokens = _whole(where, entry, "input_length")
    num_output = _whole(where, entry, "output_length")
    ids = entry.get("hash_ids")
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise ConfigError("trace", f"{where}: hash_ids: must be an array of whole numbers")
    num_full = num_tokens // BLOCK_TOKENS
    if not num_full <= len(ids) <= num_full + 1:
        raise ConfigError(
            "trace",
            f"{where}: hash_ids: {len(ids)} of them, but input_length {num_tokens} has "
            f"{num_full} full blocks of {BLOCK_TOKENS} tokens and at most one in part",
        )
    return Line(at_ms, num_tokens, num_output, ids)


def _number(where: str, entry: dict[str, Any], key: str) -> float:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError("trace", f"{where}: {key}: {value!r}, must be a number")
    if not math.isfinite(value) or not 0 <= value < _MOST * 1e3:
        raise ConfigError("trace", f"{where}: {key}: {value!r}, must be at least 0 and finite")
    return value


def _whole(where: str, entry: dict[str, Any], key: str) -> int:
    value = entry.get(key)
    if type(value) is not int or not 1 <= value < _MOST:
        raise ConfigError("trace", f"{where}: {key}: {value!r}, must be a whole number above 0")
    return value
