"""Sizes as people write them."""

import math
import re

from engine.errors import ConfigError

_UNITS = {"": 1} | {
    unit: factor
    for power, letter in enumerate("kmgt", 1)
    for unit, factor in ((letter, 1000**power), (f"{letter}i", 1024**power))
}


def parse_bytes(name: str, text: str) -> int:
    """16GiB, 800MB or plain bytes; `name` is the option's, for the error."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    if match is None:
        raise ConfigError(name, f"{text!r}, must be a size such as 16GiB or 800MB")
    size = float(match[1]) * _UNITS[match[2] or ""]
    if size == math.inf:
        raise ConfigError(name, "is more than any machine has")
    return int(size)
