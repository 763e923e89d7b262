"""Azure's trace format: CSV with a line for each request, in the order of their times.

    TIMESTAMP,ContextTokens,GeneratedTokens
    2023-11-16 18:17:03.9799600,4808,10

It says nothing of shared beginnings: no two prompts have a block in common.
"""

import csv
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from benchmarks.simulate.traffic import BLOCK_TOKENS, Request, block_name, full_blocks, in_order
from engine.errors import ConfigError

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOST = 10**9


def load_azure(path: Path) -> list[Request]:
    requests = list(_requests(path))
    if not requests:
        raise ConfigError("trace", f"{path}: has no requests")
    return in_order(requests)


def _requests(path: Path) -> Iterator[Request]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            if tuple(rows.fieldnames or ()) != COLUMNS:
                raise ConfigError("trace", f"{path}:1: header: must be {','.join(COLUMNS)}")
            for number, row in enumerate(rows):
                where = f"{path}:{rows.line_num}"
                num_tokens = _whole(where, row, "ContextTokens")
                num_output = _whole(where, row, "GeneratedTokens")
                blocks = range(full_blocks(num_tokens, num_output, BLOCK_TOKENS))
                names = tuple(block_name(f"{number} {i}") for i in blocks)
                yield Request(number, _seconds(where, row), num_tokens, num_output, names)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError("trace", f"{path}: {error}") from error


def _seconds(where: str, row: dict[str, str | None]) -> float:
    text = row["TIMESTAMP"] or ""
    whole, _, fraction = text.strip().partition(".")
    try:
        # Python reads six digits of a second at most, Azure writes seven.
        return datetime.fromisoformat(whole).timestamp() + float(f"0.{fraction[:9] or 0}")
    except ValueError as error:
        raise ConfigError("trace", f"{where}: TIMESTAMP: {text!r}, {error}") from error


def _whole(where: str, row: dict[str, str | None], key: str) -> int:
    text = row[key] or ""
    if text.isascii() and text.isdigit() and 1 <= int(text[:10]) < _MOST and len(text) < 10:
        return int(text)
    raise ConfigError("trace", f"{where}: {key}: {text!r}, must be a whole number above 0")
