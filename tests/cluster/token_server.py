"""The gRPC service behind a real server, which treats its context as Serve's replicas do."""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from ray.serve.grpc_util import RayServegRPCContext

from cluster.api_keys import ApiKeys
from cluster.gate import Gate
from cluster.http_exchange import HttpLimits
from cluster.metrics.meter import Meter
from cluster.openai.request_limits import RequestLimits
from cluster.rate_limit import Rates
from cluster.replicas import token_service
from cluster.served_model import ServedModel
from cluster.token_front import TokenFront
from protos.generation_pb2 import Failure
from protos.ingress_pb2 import GenerateUpdate
from protos.ingress_pb2_grpc import GenerationServicer, GenerationStub
from protos.ingress_service import add_to_server
from tests.cluster.fakes import FakeBackend, Script, small_model

if TYPE_CHECKING:
    from protos.ingress_pb2_grpc import GenerationAsyncStub


class _Service(token_service.TokenService):
    def __init__(self, tokens: TokenFront, admits: Callable[[str], bool]) -> None:
        self._tokens = tokens
        self._admits = admits


class _Servicer(GenerationServicer):
    def __init__(self, service: _Service) -> None:
        self._service = service

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[GenerateUpdate]:
        told = RayServegRPCContext(context)
        async with aclosing(self._service.Generate(request, told)) as updates:  # type: ignore[type-var]
            async for update in updates:
                yield update
        told._set_on_grpc_context(context)

    async def GenerateWhole(self, request: Any, context: Any) -> Any:
        return await self._unary(self._service.GenerateWhole, request, context)

    async def Models(self, request: Any, context: Any) -> Any:
        return await self._unary(self._service.Models, request, context)

    async def Ready(self, request: Any, context: Any) -> Any:
        return await self._unary(self._service.Ready, request, context)

    async def _unary(self, method: Callable[..., Any], request: Any, context: Any) -> Any:
        told = RayServegRPCContext(context)
        answer = await method(request, told)
        told._set_on_grpc_context(context)
        return answer


@dataclass
class TokenServer:
    address: str
    stub: "GenerationAsyncStub"
    backend: FakeBackend
    front: TokenFront
    gate: Gate
    meter: Meter


class Refused(Exception):
    """How a call failed, as a client sees it."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        super().__init__(str(error))
        self.code = error.code()
        self.trailing = dict(error.trailing_metadata() or ())
        raw = self.trailing.get("kvrelay-failure-bin", b"")
        assert isinstance(raw, bytes)
        self.failure = Failure.FromString(raw)


@asynccontextmanager
async def token_server(
    script: Script | None = None,
    *,
    keys: ApiKeys | None = None,
    rates: Rates | None = None,
    limits: HttpLimits | None = None,
    request_limits: RequestLimits | None = None,
    admits: Callable[[str], bool] = lambda peer: True,
    model: ServedModel | None = None,
) -> AsyncIterator[TokenServer]:
    backend, model = FakeBackend(script), model or small_model()
    gate, meter = Gate(keys, rates), Meter(model)
    front = TokenFront(
        backend, model, limits or HttpLimits(), gate, request_limits or RequestLimits(), meter
    )
    server = grpc.aio.server()
    add_to_server(_Servicer(_Service(front, admits)), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    address = f"127.0.0.1:{port}"
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = GenerationStub(channel)
        yield TokenServer(address, stub, backend, front, gate, meter)
    await server.stop(None)
    # Whatever was asked, nothing is left running at the engine.
    assert all(stream.num_closed for stream in backend.streams)
