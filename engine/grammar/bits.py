"""Single tokens of a mask, of which bit i of word j is for token 32 * j + i."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from engine.grammar.interface import Bits

_BITS = 32


def allow(bits: Bits, token_ids: Iterable[int]) -> None:
    words = bits.view(np.uint32)
    for token_id in token_ids:
        words[token_id // _BITS] |= _bit(token_id)


def forbid(bits: Bits, token_ids: Iterable[int]) -> None:
    words = bits.view(np.uint32)
    for token_id in token_ids:
        words[token_id // _BITS] &= ~_bit(token_id)


def _bit(token_id: int) -> np.uint32:
    return np.uint32(1 << token_id % _BITS)
