"""The cluster's secret: every call of the worker plane brings it, every server asks for it."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
import grpc.aio

from protos.errors import PlaneError
from protos.private_file import read_private_file

VARIABLE = "KVRELAY_SECRET"
MIN_CHARS = 16
MAX_CHARS = 4096
# "-bin": any bytes are a value, and gRPC does not print them
_KEY = "kvrelay-secret-bin"

_Callable = TypeVar("_Callable")


@dataclass(frozen=True, slots=True)
class Secret:
    value: bytes = field(repr=False)

    @classmethod
    def load(cls, path: str | None, environ: Mapping[str, str]) -> Self | None:
        """From the file, or else from the environment; None where neither is set."""
        if path is not None:
            return cls.from_file(Path(path))
        if VARIABLE in environ:
            return cls._checked(VARIABLE, environ[VARIABLE].encode("utf-8", "surrogateescape"))
        return None

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Refuses a file that anyone but its owner may touch."""
        value = read_private_file("secret_file", path, MAX_CHARS + 2)
        return cls._checked("secret_file", value)

    @classmethod
    def _checked(cls, source: str, value: bytes) -> Self:
        value = value.strip()
        if not MIN_CHARS <= len(value) <= MAX_CHARS:
            raise PlaneError(source, f"{len(value)} characters, must be {MIN_CHARS} to {MAX_CHARS}")
        return cls(value)


class SecretChannel(grpc.aio.Channel):
    """A channel whose every call brings the secret. Takes over the channel it is made with.

    No client interceptor: those put a task and a queue between a stream and its messages.
    """

    def __init__(self, channel: grpc.aio.Channel, secret: Secret) -> None:
        self._channel = channel
        self._metadata = ((_KEY, secret.value),)

    def _with_secret(self, call: Callable[..., _Callable]) -> Callable[..., _Callable]:
        metadata = self._metadata

        def start(*arguments: Any, **options: Any) -> _Callable:
            own = options.pop("metadata", None) or ()
            return call(*arguments, metadata=(*metadata, *own), **options)

        return start

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._with_secret(self._channel.unary_unary(*arguments, **options))

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._with_secret(self._channel.unary_stream(*arguments, **options))

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._with_secret(self._channel.stream_unary(*arguments, **options))

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._with_secret(self._channel.stream_stream(*arguments, **options))

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self.close()


class SecretCheck(grpc.aio.ServerInterceptor):
    """Refuses whoever lacks the secret before a handler is looked up or a message is read."""

    def __init__(self, secret: Secret) -> None:
        self._secret = secret.value

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        if self._knows(handler_call_details.invocation_metadata):
            return await continuation(handler_call_details)
        # A stream's handler, whatever the call is: it need not wait for a message.
        return grpc.stream_stream_rpc_method_handler(_refuse)

    def _knows(self, metadata: Any) -> bool:
        brought = [value for key, value in metadata or () if key == _KEY]
        return len(brought) == 1 and hmac.compare_digest(bytes(brought[0]), self._secret)


async def _refuse(requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the cluster secret is missing or wrong")
