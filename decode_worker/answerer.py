"""What an ingress asks of a decode worker, and whoever answers it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol, TypeVar

from engine.errors import RequestError
from engine.generation_stream import GenerationStream
from engine.request import GenerationRequest
from engine.wire.requests import decode_request, encode_request
from protos import handoff_pb2, session_pb2
from protos.address import Address
from protos.errors import PlaneError

MAX_WORKERS = 64
_Message = TypeVar("_Message")


class LocalPrefill(Enum):
    """Where the prompt's uncached rest may be computed."""

    AUTO = session_pb2.LOCAL_PREFILL_AUTO  # here where that is sooner, or as the last resort
    ALWAYS = session_pb2.LOCAL_PREFILL_ALWAYS
    NEVER = session_pb2.LOCAL_PREFILL_NEVER


class PrefillCandidate(NamedTuple):
    """A worker that may compute the prompt; incarnation 0 is whichever is there."""

    address: str
    incarnation: int = 0


class PrefixSource(NamedTuple):
    """A worker that holds the first tokens of the prompt."""

    address: str
    incarnation: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Route:
    """Who else takes part in a request, in order of preference."""

    prefill_workers: tuple[PrefillCandidate, ...] = ()
    sources: tuple[PrefixSource, ...] = ()
    local_prefill: LocalPrefill = LocalPrefill.AUTO


@dataclass(frozen=True, slots=True)
class SubmittedRequest:
    request: GenerationRequest
    route: Route = field(default_factory=Route)


class Answerer(Protocol):
    """Answers requests on the event loop's thread."""

    def submit(self, submitted: SubmittedRequest) -> GenerationStream:
        """Never blocks and never raises: a refusal comes from the stream."""
        ...


def encode_submit(submitted: SubmittedRequest) -> session_pb2.Submit:
    """RequestError for what no message can say."""
    message, route = encode_request(submitted.request), submitted.route
    for address, incarnation in route.prefill_workers:
        message.prefill_workers.add(address=address, incarnation=incarnation)
    for source in route.sources:
        message.sources.add(
            address=source.address, incarnation=source.incarnation, num_tokens=source.num_tokens
        )
    message.local_prefill = route.local_prefill.value
    return message


def decode_submit(message: session_pb2.Submit) -> SubmittedRequest:
    """RequestError, naming the field, for what is no request."""
    return SubmittedRequest(decode_request(message), _decode_route(message))


def _decode_route(message: session_pb2.Submit) -> Route:
    return Route(
        tuple(_decode_candidate(c) for c in _few("prefill_workers", message.prefill_workers)),
        tuple(_decode_source(source) for source in _few("sources", message.sources)),
        _mode(message),
    )


def _decode_candidate(message: session_pb2.PrefillCandidate) -> PrefillCandidate:
    return PrefillCandidate(_address("prefill_workers", message.address), message.incarnation)


def _decode_source(message: handoff_pb2.PrefixSource) -> PrefixSource:
    address = _address("sources", message.address)
    return PrefixSource(address, message.incarnation, message.num_tokens)


def _mode(message: session_pb2.Submit) -> LocalPrefill:
    try:
        return LocalPrefill(message.local_prefill)
    except ValueError:
        raise RequestError("local_prefill", f"{message.local_prefill} is unknown") from None


def _few(field: str, messages: Sequence[_Message]) -> Sequence[_Message]:
    if len(messages) > MAX_WORKERS:
        raise RequestError(field, f"{len(messages)} workers, must be at most {MAX_WORKERS}")
    return messages


def _address(field: str, text: str) -> str:
    try:
        return str(Address.parse(text, field))
    except PlaneError as error:
        raise RequestError(field, str(error).removeprefix(f"{field}: ")) from None
