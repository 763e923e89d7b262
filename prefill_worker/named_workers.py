"""Workers that a request names. They come from outside and are checked before they are used."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from engine.errors import RequestError
from protos import handoff_pb2
from protos.address import Address
from protos.errors import PlaneError

MAX_NAMED = 64
_Message = TypeVar("_Message")


class PrefixSource(NamedTuple):
    """A worker that holds the first tokens of the prompt."""

    address: str
    incarnation: int
    num_tokens: int


def decode_sources(messages: Sequence[handoff_pb2.PrefixSource]) -> tuple[PrefixSource, ...]:
    """RequestError for what names no workers, or too many."""
    return tuple(
        PrefixSource(checked_address("sources", m.address), m.incarnation, m.num_tokens)
        for m in not_too_many("sources", messages)
    )


def encode_sources(sources: Iterable[PrefixSource]) -> list[handoff_pb2.PrefixSource]:
    return [handoff_pb2.PrefixSource(**source._asdict()) for source in sources]


def not_too_many(field: str, messages: Sequence[_Message]) -> Sequence[_Message]:
    if len(messages) > MAX_NAMED:
        raise RequestError(field, f"{len(messages)} workers, must be at most {MAX_NAMED}")
    return messages


def checked_address(field: str, text: str) -> str:
    try:
        return str(Address.parse(text, field))
    except PlaneError as error:
        raise RequestError(field, str(error).removeprefix(f"{field}: ")) from None
