"""What is asked: requests at their times, with the names of the blocks that they could share."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b

from kv_cache.names import NAME_BYTES, BlockName
from router.ask import key_of

BLOCK_TOKENS = 512  # of the published traces, and of what is made after them


def block_name(identity: str | int) -> BlockName:
    """For a block that is known by an id instead of its tokens; equal ids are equal beginnings."""
    return BlockName(blake2b(str(identity).encode(), digest_size=NAME_BYTES).digest())


@dataclass(frozen=True)
class Request:
    """`names` are those of all full blocks that prompt and answer have together in the end."""

    number: int
    at_s: float
    num_tokens: int
    num_output: int
    names: Sequence[BlockName]
    tenant: str = ""

    @cached_property
    def keys(self) -> Sequence[int]:
        """What routers know the blocks by."""
        return tuple(map(key_of, self.names))


def full_blocks(num_tokens: int, num_output: int, block_tokens: int) -> int:
    """Blocks that are full when the answer ends, whose last token is never computed."""
    return (num_tokens + num_output - 1) // block_tokens


def in_order(requests: Iterable[Request]) -> list[Request]:
    """By time, numbered from 0 and beginning at 0."""
    ordered = sorted(requests, key=lambda request: request.at_s)
    start_s = ordered[0].at_s if ordered else 0.0
    return [
        replace(request, number=number, at_s=request.at_s - start_s)
        for number, request in enumerate(ordered)
    ]


def sped_up(requests: Iterable[Request], speed: float) -> list[Request]:
    return [replace(request, at_s=request.at_s / speed) for request in requests]


def first_seconds(requests: Sequence[Request], seconds: float | None) -> list[Request]:
    """Those of the beginning alone."""
    return [r for r in requests if seconds is None or r.at_s < seconds]


def mean_rate(requests: Sequence[Request]) -> float:
    """Requests a second."""
    span_s = requests[-1].at_s - requests[0].at_s if requests else 0.0
    return len(requests) / span_s if span_s else 0.0
