"""A Failure as the status of a call that has no message to carry it."""

from typing import Any, Never

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from protos.generation_pb2 import Failure

FAILURE_KEY = "kvrelay-failure-bin"
# Whoever checks a certificate knows why it is wrong; the other end sees a closed connection.
_HUNG_UP = ("failed to connect", "Socket closed")
_HINT = "; the peer may want TLS, or not take our certificate"
_CODES = {
    Failure.KIND_INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Failure.KIND_BUSY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Failure.KIND_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Failure.KIND_INCOMPATIBLE: grpc.StatusCode.FAILED_PRECONDITION,
    Failure.KIND_STALE: grpc.StatusCode.ABORTED,
    Failure.KIND_TIMED_OUT: grpc.StatusCode.DEADLINE_EXCEEDED,
}


async def abort_with(context: "grpc.aio.ServicerContext[Any, Any]", failure: Failure) -> Never:
    """Ends the call; never returns."""
    code = _CODES.get(failure.kind, grpc.StatusCode.INTERNAL)
    details = f"{failure.field}: {failure.message}" if failure.field else failure.message
    await context.abort(code, details, ((FAILURE_KEY, failure.SerializeToString()),))


def failure_of(error: grpc.aio.AioRpcError) -> Failure:
    """What the peer said; of a call that ended otherwise (a peer that is dead, stopped, cut
    off, or refuses us) what gRPC says."""
    for key, value in error.trailing_metadata() or ():
        if key == FAILURE_KEY and isinstance(value, bytes):
            try:
                return Failure.FromString(value)
            except DecodeError:
                break
    code = error.code()
    if code is grpc.StatusCode.UNAUTHENTICATED:
        kind = Failure.KIND_INCOMPATIBLE
        return Failure(kind=kind, field="secret", message=error.details() or code.name)
    details = error.details() or ""
    message = f"{code.name}: {details}" if details else code.name
    if all(words in details for words in _HUNG_UP):
        message += _HINT
    return Failure(kind=Failure.KIND_UNAVAILABLE, message=message)
