"""The holder's side of hand-offs: a gRPC service over whatever computes the prompts."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError

from kv_cache.handover import BlockRun
from kv_transfer.errors import Refused, TransferError
from kv_transfer.faults import DAMAGE, TWICE, Faults
from kv_transfer.lease import Lease
from kv_transfer.source import PromptSource, PromptStream, ReadyChunk, ReadyEnd
from kv_transfer.tally import HolderTally
from protos.generation_pb2 import Failure
from protos.handoff_pb2 import (
    Ask,
    Chunk,
    Finished,
    HolderMessage,
    PullerMessage,
    Verdict,
    Waiting,
)
from protos.handoff_pb2 import BlockRun as WireRun
from protos.handoff_pb2_grpc import HandOffServicer
from protos.rpc import PROTOCOL

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[PullerMessage, HolderMessage]

ASK_TIMEOUT_S = 5.0
WAITING_PERIOD_S = 0.5  # a prompt that is ready sooner needs no prediction
WRITE_TIMEOUT_S = 10.0  # a puller that answers pings and reads nothing is stuck
COMMIT_TIMEOUT_S = 600.0  # all bytes must have arrived by then, or by the request's deadline
MAX_ID_CHARS = 512  # a request's own, and the attempt
MAX_LOGPROBS = 2048  # in a message: with 20 alternatives each they take 0.6 MB


@dataclass(frozen=True)
class HolderConfig:
    incarnation: int
    max_leases: int = 1024


_ENDED = Failure(kind=Failure.KIND_UNAVAILABLE, message="this worker has drained long enough")


class Holder(HandOffServicer):
    """Serves one hand-off a stream; every block that it names is held until the stream ends."""

    def __init__(
        self,
        config: HolderConfig,
        source: PromptSource,
        checksum: Callable[[int, int], int] | None,  # of a group's block, if asked for
        faults: Faults,
    ) -> None:
        self._config = config
        self._source = source
        self._checksum = checksum
        self._faults = faults
        self.tally = HolderTally()
        self._num_leases = 0
        self._draining = self._ended = False
        self._serving: set[asyncio.Task[object]] = set()

    @property
    def num_leases(self) -> int:
        return self._num_leases

    def drain(self) -> None:
        """Takes no new ask; what is under way goes on."""
        self._draining = True

    def end_leases(self) -> None:
        """Those that are left; their pullers are told."""
        self._ended = True
        for task in self._serving:
            task.cancel()

    async def Open(  # type: ignore[override]  # noqa: N802 - the service's own name
        self, requests: AsyncIterator[PullerMessage], context: Context
    ) -> None:
        try:
            ask = await self._first(requests)
        except Refused as refused:
            await context.write(HolderMessage(failure=refused.failure))
            return
        self._faults.reach("holder.ask")
        task = asyncio.current_task()
        assert task is not None
        lease = Lease(ask.first_token, len(ask.token_ids))
        stream: PromptStream | None = None
        self.tally.num_leases += 1
        self._num_leases += 1
        self._serving.add(task)
        try:
            stream = self._source.open(ask)
            await _HandOff(self, lease, stream, requests, context, _deadline(ask)).run()
        except Refused as refused:
            await _tell(context, refused.failure)
        except TransferError as error:
            await _tell(context, Failure(kind=Failure.KIND_INTERNAL, message=str(error)))
        except asyncio.CancelledError:
            if not self._ended:  # the stream is gone
                raise
            # A handler that is cancelled by anyone else leaves its stream open.
            await _tell(context, _ENDED)
        finally:
            if stream is not None:
                stream.close()
            self._source.drop(lease.end())
            self._serving.discard(task)
            self._num_leases -= 1

    async def _first(self, requests: AsyncIterator[PullerMessage]) -> Ask:
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                message = await _next(requests)
        except TimeoutError:
            raise _refused(Failure.KIND_INVALID, "ask", "nothing was asked for") from None
        if message is None or message.WhichOneof("kind") != "ask":
            raise _refused(Failure.KIND_INVALID, "ask", "must be a stream's first message")
        ask = message.ask
        if ask.protocol != PROTOCOL:
            raise _refused(
                Failure.KIND_INCOMPATIBLE, "protocol", f"{ask.protocol}, must be {PROTOCOL}"
            )
        if ask.holder_incarnation != self._config.incarnation:
            raise _refused(
                Failure.KIND_STALE,
                "holder_incarnation",
                "another process had this address before",
            )
        if len(ask.handoff_id) > MAX_ID_CHARS or not ask.handoff_id.isprintable():
            raise _refused(
                Failure.KIND_INVALID,
                "handoff_id",
                f"must be printable, and of {MAX_ID_CHARS} characters at most",
            )
        if self._draining:
            raise _refused(Failure.KIND_UNAVAILABLE, "", "this worker is draining")
        if self._num_leases >= self._config.max_leases:
            raise _refused(
                Failure.KIND_BUSY, "", f"{self._num_leases} hand-offs are under way already"
            )
        return ask

    def wire_run(self, run: BlockRun) -> WireRun:
        checksum = self._checksum
        return WireRun(
            group=run.group,
            first_entry=run.first_entry,
            blocks=run.blocks,
            checksums=() if checksum is None else [checksum(run.group, b) for b in run.blocks],
        )

    def waiting(self) -> Waiting:
        source = self._source
        return Waiting(
            wait_s=source.predict_s(),
            num_turns=source.next_turn(),
            turn_s=source.turn_s(),
        )

    def predict_s(self) -> float:
        return self._source.predict_s()

    def reach(self, point: str, lease: Lease) -> str | None:
        action = self._faults.reach(point)
        if action == "release":
            self._source.drop(lease.release_early("a fault let go of it"))
        return action


class _HandOff:
    """One stream, from the ask to the verdict."""

    def __init__(
        self,
        holder: Holder,
        lease: Lease,
        stream: PromptStream,
        requests: AsyncIterator[PullerMessage],
        context: Context,
        deadline: float,
    ) -> None:
        self._deadline = deadline
        self._holder = holder
        self._lease = lease
        self._stream = stream
        self._context = context
        self._requests = requests
        self._next_message = asyncio.ensure_future(_next(requests))
        self._committed = False  # says the puller: it has read all

    async def run(self) -> None:
        try:
            if await self._announce() and not self._committed and await self._wait_for_commit():
                await self._write(HolderMessage(verdict=self._judge()))
        finally:
            self._next_message.cancel()

    async def _announce(self) -> bool:
        """All chunks and the end; False if the puller left."""
        while True:
            ready = self._stream.take()
            if ready is None:
                if not await self._wait():
                    return False
            elif isinstance(ready, ReadyEnd):
                if self._next_message.done() and not self._hear():
                    return False
                await self._finish(ready)
                return True
            else:
                self._lease.announce(ready.held)
                action = self._holder.reach("holder.chunk", self._lease)
                for message in self._chunk(ready):
                    if action == DAMAGE and message.chunk.blocks:
                        message.chunk.blocks[0].checksums[0] ^= 1
                    for _ in range(2 if action == TWICE else 1):
                        await self._write(message)

    async def _finish(self, ready: ReadyEnd) -> None:
        """A puller that has read all by now need not ask again."""
        self._lease.offer()
        self._holder.reach("holder.finished", self._lease)
        verdict = self._judge() if self._committed else None
        finished = Finished(
            tokens=ready.tokens,
            num_cached_tokens=ready.num_cached_tokens,
            verdict=verdict,
            queued_s=ready.queued_s,
            prefill_s=ready.prefill_s,
        )
        await self._write(HolderMessage(finished=finished))

    async def _wait(self) -> bool:
        """Keeps the puller patient until there is news; False if it left."""
        news = asyncio.ensure_future(self._stream.wait())
        try:
            while not news.done():
                done, _ = await asyncio.wait(
                    {news, self._next_message},
                    timeout=WAITING_PERIOD_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if self._next_message.done() and not self._hear():
                    return False
                if not done:
                    await self._say_waiting()
        finally:
            news.cancel()
        return True

    def _hear(self) -> bool:
        """The puller has said that it has read all, or left: then False."""
        message = self._next_message.result()
        if message is None:
            return False
        if message.WhichOneof("kind") != "commit" or self._committed:
            raise _refused(Failure.KIND_INVALID, "commit", "must follow the ask, once")
        if not self._lease.complete:
            raise _refused(Failure.KIND_INVALID, "commit", "came before the end")
        self._committed = True
        self._next_message = asyncio.ensure_future(_next(self._requests))
        return True

    async def _say_waiting(self) -> None:
        await self._write(HolderMessage(waiting=self._holder.waiting()))

    async def _write(self, message: HolderMessage) -> None:
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self._context.write(message)
        except TimeoutError:
            raise TransferError(
                f"the puller has read nothing for {WRITE_TIMEOUT_S:.0f} s"
            ) from None

    def _chunk(self, ready: ReadyChunk) -> Iterator[HolderMessage]:
        """Logprobs that are too many for one message go before the blocks."""
        held, logprobs, next_s = ready.held, ready.prompt_logprobs, self._holder.predict_s()
        while len(logprobs) > MAX_LOGPROBS:
            part, logprobs = logprobs[:MAX_LOGPROBS], logprobs[MAX_LOGPROBS:]
            yield HolderMessage(
                chunk=Chunk(start=held.start, end=held.start, prompt_logprobs=part, next_s=next_s)
            )
        blocks = [self._holder.wire_run(run) for run in held.runs]
        yield HolderMessage(
            chunk=Chunk(
                start=held.start,
                end=held.end,
                blocks=blocks,
                prompt_logprobs=logprobs,
                next_s=next_s,
            )
        )

    async def _wait_for_commit(self) -> bool:
        """False if the puller left without one."""
        left_s = max(0.0, self._deadline - time.monotonic())
        timeout_s = min(COMMIT_TIMEOUT_S, left_s)
        done, _ = await asyncio.wait({self._next_message}, timeout=timeout_s)
        if not done:
            is_over = timeout_s == left_s
            kind = Failure.KIND_TIMED_OUT if is_over else Failure.KIND_UNAVAILABLE
            raise _refused(kind, "commit", f"did not come within {timeout_s:.0f} s")
        return self._hear()

    def _judge(self) -> Verdict:
        self._holder.reach("holder.commit", self._lease)
        held, reason = self._lease.commit()
        self._holder.tally.num_commits += held
        self._holder.tally.num_refused_commits += not held
        return Verdict(held=held, reason=reason)


async def _next(requests: AsyncIterator[PullerMessage]) -> PullerMessage | None:
    """None at the stream's end."""
    try:
        return await anext(requests, None)
    except DecodeError:
        raise _refused(Failure.KIND_INVALID, "message", "unreadable") from None


def _deadline(ask: Ask) -> float:
    """Of the request that an ask is for."""
    deadline_ms = ask.compute.deadline_ms
    return time.monotonic() + deadline_ms / 1e3 if deadline_ms else math.inf


async def _tell(context: Context, failure: Failure) -> None:
    with contextlib.suppress(TimeoutError, grpc.aio.UsageError, grpc.aio.InternalError):
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await context.write(HolderMessage(failure=failure))


def _refused(kind: Failure.Kind.ValueType, field: str, message: str) -> Refused:
    return Refused(Failure(kind=kind, field=field, message=message))
