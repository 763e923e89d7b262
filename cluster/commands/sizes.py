"""Sizes as people write them."""

import re

from engine.errors import ConfigError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def parse_bytes(name: str, text: str) -> int:
    """16GiB, 800MB or plain bytes; `name` is the option's, for the error."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", text.strip().lower())
    if match is None:
        raise ConfigError(name, f"{text!r}, must be a size such as 16GiB or 800MB")
    return int(float(match[1]) * _UNITS[match[2] or ""])
