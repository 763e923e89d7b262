"""How many values a JSON text holds, told before it is read.

While a parser makes objects of them no other thread runs: 7 s for 32 MiB of empty arrays, in which
every stream of the process stands still. Numbers and strings take a tenth of that, and a prompt may
be many of them.
"""

import numpy as np

from cluster.openai.errors import ApiError
from cluster.openai.request_limits import MAX_CONTAINERS, MAX_NAMES

_PART_BYTES = 1 << 20  # some milliseconds each


def check_crowd(data: bytes, param: str | None = None) -> None:
    """ApiError for a text with too many arrays and objects, or names in them. What stands in its
    strings is no matter."""
    if _fits(data.count(b"[") + data.count(b"{"), data.count(b":")):
        return
    num_containers, num_names = _outside_strings(data)
    if not _fits(num_containers, num_names):
        where = "the body" if param is None else f"{param}: a text of JSON"
        raise ApiError(
            413,
            f"{where} has {num_containers} arrays and objects with {num_names} names, must have at "
            f"most {MAX_CONTAINERS} with {MAX_NAMES}",
            param=param,
        )


def _fits(num_containers: int, num_names: int) -> bool:
    return num_containers <= MAX_CONTAINERS and num_names <= MAX_NAMES


def _outside_strings(data: bytes) -> tuple[int, int]:
    """Right up to the first byte that is no JSON, where a parser ends."""
    bare = data.replace(rb"\\", b"").replace(rb"\"", b"")  # every quote left begins or ends one
    num_containers, num_names, in_string = 0, 0, False
    for start in range(0, len(bare), _PART_BYTES):
        part = np.frombuffer(bare[start : start + _PART_BYTES], np.uint8)
        inside = np.logical_xor.accumulate(part == ord('"')) ^ in_string
        in_string = bool(inside[-1])
        opens = (part == ord("[")) | (part == ord("{"))
        num_containers += int(np.count_nonzero(opens & ~inside))
        num_names += int(np.count_nonzero((part == ord(":")) & ~inside))
    return num_containers, num_names
