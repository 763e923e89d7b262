"""The gRPC service as Serve calls it: a method for each of its own, its context for the rest."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import TypeVar
from urllib.parse import unquote

import grpc
from google.protobuf.message import Message
from ray.serve.grpc_util import RayServegRPCContext

from cluster.drawn import new_request_id
from cluster.openai.errors import ApiError, api_error, internal_error
from cluster.request_ids import is_request_id
from cluster.token_front import TokenFront
from engine.errors import EngineError, RequestError, UnavailableError
from protos import ingress_pb2 as pb
from protos.failures import FAILURE_KEY
from protos.generation_pb2 import Failure

Request = TypeVar("Request", bound=Message)

log = logging.getLogger("kvrelay.grpc")

_STATUSES = {
    400: (grpc.StatusCode.INVALID_ARGUMENT, Failure.KIND_INVALID),
    401: (grpc.StatusCode.UNAUTHENTICATED, Failure.KIND_INVALID),
    403: (grpc.StatusCode.PERMISSION_DENIED, Failure.KIND_INVALID),
    404: (grpc.StatusCode.NOT_FOUND, Failure.KIND_INVALID),
    408: (grpc.StatusCode.DEADLINE_EXCEEDED, Failure.KIND_TIMED_OUT),
    413: (grpc.StatusCode.INVALID_ARGUMENT, Failure.KIND_INVALID),
    422: (grpc.StatusCode.INVALID_ARGUMENT, Failure.KIND_INVALID),
    429: (grpc.StatusCode.RESOURCE_EXHAUSTED, Failure.KIND_BUSY),
    503: (grpc.StatusCode.UNAVAILABLE, Failure.KIND_UNAVAILABLE),
}
_INTERNAL = (grpc.StatusCode.INTERNAL, Failure.KIND_INTERNAL)
_RETRY_AFTER = "Retry-After"
_MAX_CHARS = 500  # errors quote what clients send; HAProxy has 16 KiB for all metadata


class ServeCall:
    """One call: who asks, and how it ended."""

    def __init__(self, context: RayServegRPCContext, request_id: str = "") -> None:
        self.caller = ""
        self.request_id = request_id if is_request_id(request_id) else new_request_id()
        self._context = context
        self._metadata = dict(context.invocation_metadata())
        self._trailing: list[tuple[str, str | bytes]] = []
        self._trail("x-request-id", self.request_id)

    def header(self, name: str) -> str | None:
        value = self._metadata.get(name)
        return value.decode("latin-1") if isinstance(value, bytes) else value

    @property
    def peer(self) -> str:
        """`ipv4:address:port`, or `ipv6:[address]:port` with percents."""
        return unquote(self._context.peer())

    def fail(self, error: ApiError) -> None:
        code, kind = _STATUSES.get(error.status, _INTERNAL)
        field, message = _text(error.param or ""), _text(error.message)
        self._context.set_code(code)
        self._context.set_details(_ascii(message))
        failure = Failure(kind=kind, field=field, message=message.removeprefix(f"{field}: "))
        self._trail(FAILURE_KEY, failure.SerializeToString())
        if _RETRY_AFTER in error.headers:
            self._trail("retry-after", error.headers[_RETRY_AFTER])

    def _trail(self, key: str, value: str | bytes) -> None:
        self._trailing.append((key, value))
        self._context.set_trailing_metadata(self._trailing)  # type: ignore[arg-type]


class TokenService:
    """Methods that a replica has for Serve, None being bytes that are no message. A refusal is
    returned like an answer, and the call has its status: with what is raised Serve would send no
    metadata."""

    _tokens: TokenFront
    _admits: Callable[[str], bool]  # by the peer's address

    async def Generate(
        self, request: pb.GenerateRequest | None, grpc_context: RayServegRPCContext
    ) -> AsyncIterator[pb.GenerateUpdate]:
        call = ServeCall(grpc_context, "" if request is None else request.request_id)
        try:
            self._check_peer(call)
            async with aclosing(self._tokens.generate(_read(request), call)) as updates:
                async for update in updates:
                    yield update
        except Exception as error:  # noqa: BLE001  whatever it is, the client is told
            call.fail(_told(error))
            # Serve's own proxy, which stands in while no replica is known to the front, learns
            # of a status with a message alone.
            yield pb.GenerateUpdate()

    async def GenerateWhole(
        self, request: pb.GenerateRequest | None, grpc_context: RayServegRPCContext
    ) -> pb.GenerateUpdate:
        call = ServeCall(grpc_context, "" if request is None else request.request_id)
        try:
            self._check_peer(call)
            return await self._tokens.generate_whole(_read(request), call)
        except Exception as error:  # noqa: BLE001
            call.fail(_told(error))
            return pb.GenerateUpdate()

    async def Models(
        self, request: pb.ListModels | None, grpc_context: RayServegRPCContext
    ) -> pb.ModelList:
        call = ServeCall(grpc_context)
        try:
            self._check_peer(call)
            _read(request)
            return self._tokens.models(call)
        except Exception as error:  # noqa: BLE001
            call.fail(_told(error))
            return pb.ModelList()

    async def Ready(
        self, request: pb.ReadyRequest | None, grpc_context: RayServegRPCContext
    ) -> pb.ReadyAnswer:
        call = ServeCall(grpc_context)
        try:
            _read(request)
            return self._tokens.ready()
        except Exception as error:  # noqa: BLE001
            call.fail(_told(error))
            return pb.ReadyAnswer()

    def _check_peer(self, call: ServeCall) -> None:
        if not self._admits(call.peer):
            raise ApiError(403, "without API keys this server is for its own machine alone")


def _read(request: Request | None) -> Request:
    if request is None:
        raise RequestError("request", "the bytes are no message that this call takes")
    return request


def on_this_machine(peer: str, node_address: str) -> bool:
    """Whether a call came from here: from the front, or from whoever found the replica's port,
    which Serve opens to every network."""
    host = peer.partition(":")[2].rpartition(":")[0].strip("[]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return peer.startswith("unix:")
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback or address == ipaddress.ip_address(node_address)


def _told(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, EngineError):
        log.error("a call failed", exc_info=error)
        return internal_error()
    answer = api_error(error)
    if answer.status >= 500 and not isinstance(error, UnavailableError):
        log.error("a call failed: %s", error)
    return answer


def _ascii(text: str) -> str:
    """HAProxy refuses a status message of other characters."""
    return text.encode("ascii", "backslashreplace").decode()[:_MAX_CHARS]


def _text(text: str) -> str:
    return text[:_MAX_CHARS].encode(errors="backslashreplace").decode()
