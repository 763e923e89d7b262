"""What each call of the gRPC service does: the ways of the HTTP front, for token ids."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from cluster.backend import Backend, Refusing
from cluster.drawn import new_request_id
from cluster.gate import Asking, Gate
from cluster.http_exchange import HttpLimits
from cluster.metrics.meter import Meter
from cluster.metrics.record import Origin
from cluster.off_loop import off_loop
from cluster.openai.errors import ApiError
from cluster.openai.request_limits import RequestLimits
from cluster.openai.structured import NamedGrammar
from cluster.request_ids import is_request_id
from cluster.served_model import ServedModel
from cluster.token_answer import WholeAnswer, messages
from cluster.token_request import TokenRequest, read_request
from cluster.under_way import LEAST_S, OVERTIME_S, UnderWay
from engine.errors import DeadlineError, EngineError, RequestError
from engine.generation_stream import GenerationStream
from engine.request import GenerationRequest, GenerationUpdate, RequestId
from protos import ingress_pb2 as pb


class Call(Asking, Protocol):
    """One call of a client's."""

    request_id: str  # that the answer is named by


class TokenFront:
    """All of it runs on one event loop. A refusal is an ApiError or an EngineError."""

    def __init__(
        self,
        backend: Backend,
        model: ServedModel,
        limits: HttpLimits,
        gate: Gate,
        request_limits: RequestLimits,
        meter: Meter,
    ) -> None:
        self._backend = backend
        self._model = model
        self._limits = limits
        self._gate = gate
        self._request_limits = request_limits
        self._meter = meter
        self._refusing = backend if isinstance(backend, Refusing) else None
        self._under_way = UnderWay()

    async def generate(
        self, message: pb.GenerateRequest, call: Call
    ) -> AsyncGenerator[pb.GenerateUpdate, None]:
        async with aclosing(self._updates(message, call)) as updates:
            async for update in updates:
                for part in messages(update):
                    yield part

    async def generate_whole(self, message: pb.GenerateRequest, call: Call) -> pb.GenerateUpdate:
        answer = WholeAnswer(min(message.params.n or 1, self._request_limits.max_n))
        async with aclosing(self._updates(message, call)) as updates:
            async for update in updates:
                answer.add(update)
        return answer.message()

    def models(self, call: Call) -> pb.ModelList:
        self._gate.enter(call)
        size = {"max_model_len": self._model.max_model_len, "vocab_size": self._model.vocab_size}
        return pb.ModelList(models=[pb.ServedModel(name=n, **size) for n in self._model.names])

    def ready(self) -> pb.ReadyAnswer:
        self._gate.check_open()
        self._backend.check_health()
        return pb.ReadyAnswer()

    async def end_answers(self, grace_s: float, error: EngineError) -> None:
        """Refuses what is new; what is under way may go on for a while, and then fails."""
        await self._under_way.end(grace_s, error)

    async def _updates(
        self, message: pb.GenerateRequest, call: Call
    ) -> AsyncGenerator[GenerationUpdate, None]:
        arrived_s = time.monotonic()
        _check_name(message)
        self._gate.enter(call)
        self._gate.count(call)
        self._under_way.check_goes_on()
        if self._refusing is not None:
            self._refusing.check_open(call.caller)
        request = await self._read(message, call.caller)
        self._under_way.check_goes_on()
        self._gate.spend(call, len(request.token_ids))
        observed = self._meter.observed(self._backend, Origin(call.request_id, arrived_s))
        deadline_s = arrived_s + request.timeout_s
        stream = observed.submit(_generation(request, call.caller, deadline_s))
        reading = _Reading(stream, deadline_s + OVERTIME_S)

        def fail(error: EngineError) -> None:
            observed.fail(error)
            reading.fail(error)

        num_tokens = 0
        with self._under_way.answering(fail):
            try:
                while (update := await reading.next()) is not None:
                    num_tokens += sum(len(delta.token_ids) for delta in update.deltas)
                    yield update
            finally:
                reading.close()
                self._gate.spend(call, num_tokens)

    async def _read(self, message: pb.GenerateRequest, caller: str) -> TokenRequest:
        most = self._limits.max_body_bytes
        if message.ByteSize() > most:
            raise ApiError(413, f"the request is larger than {most} bytes", param="request")
        request = await off_loop(
            lambda: read_request(
                message, self._model, self._request_limits, self._limits.request_timeout_s
            ),
            message.ByteSize(),
        )
        if request.params.grammar is not None:
            named = NamedGrammar("grammar", request.params.grammar)
            await self._model.check_grammar(named, caller)
        return request


class _Reading:
    """An answer's updates until its deadline, or until it is failed from the outside."""

    def __init__(self, stream: GenerationStream, deadline_s: float) -> None:
        self._stream = stream
        self._deadline_s = deadline_s
        self._error: EngineError | None = None
        self._wait: asyncio.Timeout | None = None

    async def next(self) -> GenerationUpdate | None:
        """None at the end, which an answer that was whole before it failed still comes to."""
        left_s = 0.0 if self._error else self._deadline_s - time.monotonic()
        try:
            async with asyncio.timeout(left_s) as self._wait:
                return await anext(self._stream, None)
        except TimeoutError as error:
            raise self._error or DeadlineError("not finished in the request's time") from error
        finally:
            self._wait = None

    def fail(self, error: EngineError) -> None:
        self._error = error
        if self._wait is not None and not self._wait.expired():
            self._wait.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        self._stream.close()


def _generation(request: TokenRequest, tenant: str, deadline_s: float) -> GenerationRequest:
    return GenerationRequest(
        RequestId(f"tokens-{new_request_id()}"),
        request.token_ids,
        request.params,
        priority=request.priority,
        cache_salt=request.cache_salt,
        timeout_s=max(LEAST_S, deadline_s - time.monotonic()),
        tenant=tenant,
    )


def _check_name(message: pb.GenerateRequest) -> None:
    """The client's own id, if it sends one, comes back with the answer."""
    if message.request_id and not is_request_id(message.request_id):
        raise RequestError("request_id", "must be 1 to 128 visible ASCII characters")
