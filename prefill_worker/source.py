"""The engine as a hand-off's holder sees it: prompts computed, or found in the cache."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from engine.async_engine import AsyncEngine
from engine.async_streams import HandOverStream
from engine.errors import EngineError, RequestError
from engine.handoff import PromptChunk, PromptEnd
from engine.request import GenerationRequest, HandOver, RequestId
from engine.wire.failures import encode_failure
from engine.wire.logprobs import encode_logprobs
from engine.wire.params import decode_params
from kv_cache.handover import HeldRange
from kv_cache.transfers import TransferHold
from kv_transfer.errors import Refused
from kv_transfer.faults import Faults
from kv_transfer.source import PromptStream, ReadyChunk, ReadyEnd
from prefill_worker.fetching import Fetcher, FetchPlan
from prefill_worker.named_workers import decode_sources
from prefill_worker.queued_work import QueuedWork
from protos.generation_pb2 import Failure
from protos.handoff_pb2 import Ask, FirstToken, PrefixSource


class EngineSource:
    """Serves asks from one engine; used on the event loop's thread.

    A worker that does not compute for others hands out what it has cached. One that does may
    have a prompt's beginning from a third one, by `fetcher`, which is there before it is asked.
    """

    fetcher: Fetcher

    def __init__(self, engine: AsyncEngine, computes: bool, faults: Faults) -> None:
        self._engine = engine
        self._faults = faults
        self._computes = computes
        self._serial = count(1)
        self._queued = QueuedWork()
        self._rests = 0

    def next_turn(self) -> int:
        """An engine whose thread rests is asked for nothing, which is not being stuck."""
        if self._engine.at_rest:
            self._rests += 1
        return self._engine.engine.num_steps + self._rests

    @property
    def num_queued_tokens(self) -> int:
        return self._queued.num_tokens

    def open(self, ask: Ask) -> PromptStream:
        if not ask.HasField("compute"):
            return CachedPrompt(self._engine, ask)
        if not self._computes:
            return RefusedPrompt(_unavailable("this worker computes no prompts for others"))
        try:
            request = self._plan_prefix(self._decode(ask), ask.compute.sources)
        except RequestError as error:
            return RefusedPrompt(encode_failure(error))
        self._faults.hold_up(self._faults.reach("source.open"), self._engine.call)
        stream = self._engine.hand_over(request)
        return ComputedPrompt(stream, request, self._queued, self.fetcher)

    def _decode(self, ask: Ask) -> GenerationRequest:
        """A priority counts only where the engine goes by it, and more choices than run at once
        here are drawn where they are answered."""
        request, limits = _decode(ask, next(self._serial)), self._engine.engine.limits
        if not limits.by_priority:
            request = replace(request, priority=0)
        if request.params.n > limits.max_num_seqs:
            request = replace(request, hand_over=HandOver(ask.first_token, draw=False))
        return request

    def _plan_prefix(
        self, request: GenerationRequest, sources: Sequence[PrefixSource]
    ) -> GenerationRequest:
        """RequestError for what names no workers."""
        named = decode_sources(sources)
        plan = self.fetcher.prefixes.plan(named, len(request.prompt_token_ids))
        if plan is None:
            return request
        request = replace(request, prefix=plan.prefix)
        self.fetcher.expect(request, FetchPlan(prefix=plan))
        return request

    def predict_s(self) -> float:
        """As if all that is queued were computed in one step before it."""
        return self._engine.engine.step_times.predict(self._queued.as_one_step())

    def turn_s(self) -> float:
        chunk = self._engine.engine.info.shape.chunk_tokens
        return self._engine.engine.step_times.predict(self._queued.longest_step(chunk))

    def drop(self, holds: Sequence[TransferHold]) -> None:
        if holds:
            self._engine.drop_holds(holds)


class ComputedPrompt:
    """A prompt on its way through the engine."""

    def __init__(
        self,
        stream: HandOverStream,
        request: GenerationRequest,
        queued: QueuedWork,
        fetcher: Fetcher,
    ) -> None:
        self._stream = stream
        self._fetcher = fetcher
        self._queued = queued
        self._num_tokens = len(request.prompt_token_ids)
        self._num_done = 0
        self._num_logprobs = 0
        self._closed = False
        queued.add(self._num_tokens)

    async def wait(self) -> None:
        await self._stream.wait()

    def take(self) -> ReadyChunk | ReadyEnd | None:
        try:
            news = self._stream.take()
        except EngineError as error:
            raise Refused(encode_failure(error)) from None
        match news:
            case PromptChunk():
                self._num_logprobs += len(news.prompt_logprobs)
                self._count_down(max(news.held.end, self._num_logprobs))
                return ReadyChunk(news.held, encode_logprobs(news.prompt_logprobs))
            case PromptEnd():
                self._count_down(self._num_tokens)
                queued_s, prefill_s, _ = news.times
                return ReadyEnd(_first_tokens(news), news.num_cached_tokens, queued_s, prefill_s)
        return None

    def close(self) -> None:
        self._count_down(self._num_tokens)
        if not self._closed:
            self._queued.ended(self._num_tokens)
        self._closed = True
        self._stream.close()
        self._fetcher.forget(self._stream.request_id)

    def _count_down(self, num_done: int) -> None:
        """Blocks may come before their tokens' logprobs, or logprobs without blocks."""
        if num_done > self._num_done:
            self._queued.computed(self._num_done, num_done)
            self._num_done = num_done


class CachedPrompt:
    """What the cache has of a prompt, all at once."""

    def __init__(self, engine: AsyncEngine, ask: Ask) -> None:
        self._engine = engine
        held = engine.hold_cached(list(ask.token_ids), ask.cache_salt, ask.first_token)
        self._held = asyncio.ensure_future(held)
        self._taken = self._closed = False

    async def wait(self) -> None:
        await asyncio.wait({self._held})

    def take(self) -> ReadyChunk | ReadyEnd | None:
        if not self._held.done():
            return None
        try:
            held = self._held.result()
        except EngineError as error:
            raise Refused(encode_failure(error)) from None
        if self._taken:
            return ReadyEnd((), held.end)
        self._taken = True
        return ReadyChunk(held)

    def close(self) -> None:
        """What nobody took is dropped as soon as it is there."""
        if not (self._taken or self._closed):
            self._held.add_done_callback(self._drop)
        self._closed = True

    def _drop(self, done: asyncio.Task[HeldRange]) -> None:
        if not done.cancelled() and done.exception() is None:
            self._engine.drop_holds(done.result().holds)


class RefusedPrompt:
    """An ask that cannot be served."""

    def __init__(self, failure: Failure) -> None:
        self._failure = failure

    async def wait(self) -> None:
        pass

    def take(self) -> ReadyChunk | ReadyEnd | None:
        raise Refused(self._failure)

    def close(self) -> None:
        pass


def _decode(ask: Ask, serial: int) -> GenerationRequest:
    compute = ask.compute
    return GenerationRequest(
        request_id=RequestId(f"{ask.handoff_id}#{serial}"),
        prompt_token_ids=list(ask.token_ids),
        params=decode_params(compute.params),
        priority=compute.priority,
        cache_salt=ask.cache_salt,
        timeout_s=compute.deadline_ms / 1e3 if compute.deadline_ms else None,
        hand_over=HandOver(ask.first_token, compute.draw),
    )


def _first_tokens(end: PromptEnd) -> list[FirstToken]:
    return [
        FirstToken(
            token_id=token.token_id,
            logprobs=None if token.logprobs is None else encode_logprobs([token.logprobs])[0],
        )
        for token in end.first_tokens
    ]


def _unavailable(message: str) -> Failure:
    return Failure(kind=Failure.KIND_UNAVAILABLE, message=message)
