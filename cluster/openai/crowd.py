"""How many values a JSON text holds, told before it is read.

While a parser makes objects of them no other thread runs: 7 s for 32 MiB of empty arrays, in which
every stream of the process stands still. Numbers and strings take a tenth of that, and a prompt may
be many of them, of several bytes each.
"""

import re
from collections.abc import Iterable

from cluster.openai.errors import ApiError
from cluster.openai.request_limits import MAX_CONTAINERS, MAX_NAMES, MAX_VALUES

_PART_BYTES = 1 << 16  # some milliseconds each at most
_NO_MARKS = bytes(set(range(256)) - set(b'"[{:,'))
_STRING = re.compile(rb'"[^"]*"')


def check_crowd(*texts: bytes, param: str | None = None) -> None:
    """ApiError for texts that have too many arrays and objects together, or names in them. What
    stands in their strings is no matter."""
    if _fits(*_added(map(_counted, texts))):
        return
    if not _fits(*_added(map(_outside_strings, texts))):
        where = "the body" if param is None else f"{param}: their texts of JSON together"
        raise ApiError(
            413,
            f"{where} must have at most {MAX_CONTAINERS} arrays and objects with {MAX_NAMES} names"
            f" and {MAX_VALUES} values",
            param=param,
        )


def _added(counts: Iterable[tuple[int, int, int]]) -> tuple[int, int, int]:
    containers, names, commas = zip(*counts, strict=True)
    return sum(containers), sum(names), sum(commas)


def _counted(text: bytes) -> tuple[int, int, int]:
    return text.count(b"[") + text.count(b"{"), text.count(b":"), text.count(b",")


def _fits(num_containers: int, num_names: int, num_commas: int) -> bool:
    few = num_containers <= MAX_CONTAINERS and num_names <= MAX_NAMES
    return few and num_commas < MAX_VALUES


def _outside_strings(data: bytes) -> tuple[int, int, int]:
    """Right up to the first byte that is no JSON, where a parser ends; no farther than until there
    are too many."""
    bare = data.replace(rb"\\", b"").replace(rb"\"", b"")  # every quote left begins or ends one
    num_containers, num_names, num_commas, in_string = 0, 0, 0, False
    for start in range(0, len(bare), _PART_BYTES):
        marks = bare[start : start + _PART_BYTES].translate(None, _NO_MARKS)
        if in_string:
            _, ended, marks = marks.partition(b'"')
            if not ended:
                continue
        marks, begun, _ = _STRING.sub(b"", marks).partition(b'"')
        in_string = bool(begun)
        containers, names, commas = _counted(marks)
        num_containers += containers
        num_names += names
        num_commas += commas
        if not _fits(num_containers, num_names, num_commas):
            break
    return num_containers, num_names, num_commas
