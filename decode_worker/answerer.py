"""What an ingress asks of a decode worker, and whoever answers it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from engine.errors import RequestError
from engine.request import GenerationRequest, GenerationUpdate, RequestId
from engine.wire.requests import decode_request, encode_request
from prefill_worker.named_workers import PrefixSource as PrefixSource
from prefill_worker.named_workers import (
    checked_address,
    decode_sources,
    encode_sources,
    not_too_many,
)
from protos import session_pb2


class LocalPrefill(Enum):
    """Where the prompt's uncached rest may be computed."""

    AUTO = session_pb2.LOCAL_PREFILL_AUTO  # here where that is sooner, or as the last resort
    ALWAYS = session_pb2.LOCAL_PREFILL_ALWAYS
    NEVER = session_pb2.LOCAL_PREFILL_NEVER


class PrefillCandidate(NamedTuple):
    """A worker that may compute the prompt; incarnation 0 is whichever is there."""

    address: str
    incarnation: int = 0


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


class AnswerStream(Protocol):
    """The answer to one request, taken as it comes. Nothing here waits."""

    def listen(self, on_news: Callable[[], None]) -> None:
        """It is called whenever there may be something to take, or nothing more comes."""
        ...

    def take(self) -> GenerationUpdate | None:
        """What came and was not taken yet, if anything. Whatever keeps the request from its end
        is raised, once, as an `EngineError`."""
        ...

    @property
    def has_ended(self) -> bool:
        """All that came was taken, and nothing more will."""
        ...

    def stop_choice(self, choice: int) -> None:
        """Nothing more is wanted of a choice (its stop string was found). It counts as finished;
        tokens of it that are under way may still come and are ignored."""
        ...

    def close(self) -> None:
        """Aborts what still runs and frees its blocks. Idempotent; whoever submitted it must, also
        after it ended."""
        ...


class Answerer(Protocol):
    """Answers requests on the event loop's thread."""

    def submit(self, submitted: SubmittedRequest) -> AnswerStream:
        """Never blocks and never raises: a refusal comes from the stream."""
        ...


def encode_submit(submitted: SubmittedRequest) -> session_pb2.Submit:
    """RequestError for what no message can say."""
    message, route = encode_request(submitted.request), submitted.route
    for address, incarnation in route.prefill_workers:
        message.prefill_workers.add(address=address, incarnation=incarnation)
    message.sources.extend(encode_sources(route.sources))
    message.local_prefill = route.local_prefill.value
    return message


def decode_submit(message: session_pb2.Submit, own_id: RequestId | None = None) -> SubmittedRequest:
    """RequestError, naming the field, for what is no request."""
    return SubmittedRequest(decode_request(message, own_id), _decode_route(message))


def _decode_route(message: session_pb2.Submit) -> Route:
    named = not_too_many("prefill_workers", message.prefill_workers)
    return Route(
        tuple(_decode_candidate(candidate) for candidate in named),
        decode_sources(message.sources),
        _mode(message),
    )


def _decode_candidate(message: session_pb2.PrefillCandidate) -> PrefillCandidate:
    return PrefillCandidate(
        checked_address("prefill_workers", message.address), message.incarnation
    )


def _mode(message: session_pb2.Submit) -> LocalPrefill:
    try:
        return LocalPrefill(message.local_prefill)
    except ValueError:
        raise RequestError("local_prefill", f"{message.local_prefill} is unknown") from None
