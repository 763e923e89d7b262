"""The puller's side of a hand-off: one ask, its reads, and the commit."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from kv_cache.handover import HeldRange
from kv_transfer.connector import Read
from kv_transfer.errors import LinkLost, Refused, TransferError
from kv_transfer.faults import Faults
from kv_transfer.link import Link
from kv_transfer.pull import Copy, Pull, PullState, RemoteRun
from kv_transfer.quarantine import Unfinished
from kv_transfer.tally import CANCELLED, DONE, FAILED, NOT_HELD, PullRecord, PullTally
from protos.generation_pb2 import TokenLogprobs
from protos.handoff_pb2 import (
    Ask,
    Chunk,
    Commit,
    FirstToken,
    HolderMessage,
    PullerMessage,
    Verdict,
)

GIVE_UP_GRACE_S = 0.05  # in which most reads end that are not wanted any more
_ENDED = (asyncio.InvalidStateError, grpc.aio.UsageError)  # of what is written to a call then

Stream = grpc.aio.StreamStreamCall[PullerMessage, HolderMessage]


@dataclass(frozen=True, slots=True)
class Pulled:
    """What came with the blocks of tokens target.start .. end, which may be used now.

    Without a computing holder `end` may be less than what was wanted, and there is no token.
    """

    end: int
    tokens: Sequence[FirstToken]
    prompt_logprobs: Sequence[TokenLogprobs]
    num_cached_tokens: int
    queued_s: float = 0.0  # on the holder, as it says
    prefill_s: float = 0.0


@dataclass(frozen=True)
class PullerConfig:
    block_size: int
    stuck_after_s: float = 5.0


@dataclass(slots=True, eq=False)
class _Reading:
    copy: Copy
    unfinished: Unfinished
    started: float


class HandOff:
    """Pulls one prompt over one link; `run` once, then `unfinished`, however it ended."""

    def __init__(
        self,
        config: PullerConfig,
        link: Link,
        ask: Ask,
        target: HeldRange,
        checksum: Callable[[int, int], int],  # of a block of ours
        faults: Faults,
        deadline: float | None = None,
        tally: PullTally | None = None,
    ) -> None:
        self._record = PullRecord(tally or PullTally())
        self._ended = FAILED
        self._link = link
        self._ask = ask
        self._checksum = checksum
        self._faults = faults
        self._pull = Pull(
            target,
            config.block_size,
            time.monotonic(),
            config.stuck_after_s,
            deadline,
            whole=ask.HasField("compute"),
        )
        self._reads: dict[asyncio.Future[None], _Reading] = {}
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._tokens: Sequence[FirstToken] = ()
        self._num_cached = 0
        self._queued_s = self._prefill_s = 0.0

    async def run(self) -> Pulled:
        """TransferError for whatever went wrong; then nothing of the target may be used."""
        stream = self._link.open_handoff()
        try:
            await stream.write(PullerMessage(ask=self._ask))
            await self._follow(stream)
        except grpc.aio.AioRpcError as error:
            message = f"the holder's stream broke: {error.details()}"
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise TransferError(message) from None
            self._link.lose(f"the stream broke: {error.details()}")
            raise LinkLost(message) from None
        except asyncio.CancelledError:
            self._ended = CANCELLED
            raise
        except _ENDED as error:
            raise TransferError(f"the holder's stream has ended: {error}") from None
        finally:
            stream.cancel()
            if self._pull.state is not PullState.DONE:
                self._give_up()
            self._record.end(self._ended)
        return Pulled(
            self._pull.arrived_to,
            self._tokens,
            self._prompt_logprobs,
            self._num_cached,
            self._queued_s,
            self._prefill_s,
        )

    @property
    def backlog(self) -> list[Read]:
        """Reads that are under way and wanted."""
        if self._pull.state is PullState.FAILED:
            return []
        return [reading.unfinished.read for reading in self._reads.values()]

    async def unfinished(self) -> list[Unfinished]:
        """Reads without an end; their blocks must be kept until there is one."""
        if self._reads:
            await asyncio.wait(self._reads, timeout=GIVE_UP_GRACE_S)
        return [r.unfinished for ended, r in self._reads.items() if not ended.done()]

    def _give_up(self) -> None:
        self._pull.fail()
        for reading in self._reads.values():
            reading.unfinished.read.give_up()

    async def _follow(self, stream: Stream) -> None:
        """Messages and ends of reads, as they come, until the verdict."""
        message = asyncio.ensure_future(_read(stream))
        try:
            while self._pull.state is not PullState.DONE:
                now = time.monotonic()
                self._pull.check_time(now)
                self._check_reads(now)
                next_check = max(now, min(self._pull.next_check(now), self._first_late))
                both: list[asyncio.Future[Any]] = [message, *self._reads]
                await asyncio.wait(
                    both,
                    timeout=next_check - now,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for ended in [f for f in self._reads if f.done()]:
                    self._note_read(self._reads.pop(ended))
                if message.done():
                    self._handle(message.result())
                    message = asyncio.ensure_future(_read(stream))
                if self._pull.may_commit:
                    self._faults.reach("puller.commit")
                    self._pull.note_commit(time.monotonic())
                    try:
                        await stream.write(PullerMessage(commit=Commit()))
                    except (grpc.aio.AioRpcError, *_ENDED):
                        # Why it has just ended is said in what is being read.
                        self._handle(await message)
                        raise
        finally:
            message.cancel()

    def _handle(self, message: HolderMessage | None) -> None:
        now = time.monotonic()
        if message is None:
            raise TransferError("the holder ended the stream")
        match message.WhichOneof("kind"):
            case "waiting":
                waiting = message.waiting
                self._pull.note_waiting(now, waiting.wait_s, waiting.num_turns, waiting.turn_s)
            case "chunk":
                self._faults.reach("puller.chunk")
                self._start(now, message.chunk)
            case "finished":
                self._faults.reach("puller.finished")
                self._pull.note_finished(now)
                self._record.note_finished(now)
                self._queued_s = message.finished.queued_s
                self._prefill_s = message.finished.prefill_s
                self._tokens = list(message.finished.tokens)
                self._num_cached = message.finished.num_cached_tokens
                if message.finished.HasField("verdict"):
                    self._note_verdict(message.finished.verdict)
            case "verdict":
                self._note_verdict(message.verdict)
            case "failure":
                if message.failure.field == "holder_incarnation":
                    self._link.lose(str(Refused(message.failure)))
                raise Refused(message.failure)  # that no frame has: it has all of theirs
            case _:
                raise TransferError("the holder speaks of what this version does not know")

    def _note_verdict(self, verdict: Verdict) -> None:
        if self._pull.state is PullState.COMMITTING:
            self._ended = DONE if verdict.held else NOT_HELD
        self._pull.note_verdict(verdict.held, verdict.reason)

    def _start(self, now: float, chunk: Chunk) -> None:
        runs = [RemoteRun(r.group, r.first_entry, r.blocks, r.checksums) for r in chunk.blocks]
        copies = self._pull.note_chunk(now, chunk.start, chunk.end, runs, chunk.next_s)
        self._keep(chunk.prompt_logprobs)
        for copy in copies:
            began = time.perf_counter()
            read = self._link.begin_read(copy.group, copy.remote_blocks, copy.local_blocks)
            took_s = time.perf_counter() - began
            self._record.note_post(now, took_s, len(copy.local_blocks))
            unfinished = Unfinished(copy.group, copy.local_blocks, read)
            self._reads[read.ended] = _Reading(copy, unfinished, now)
        self._faults.reach("puller.reading")

    def _keep(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """No more than was asked for: a holder that goes on and on fills no memory of ours."""
        params = self._ask.compute.params
        num_wanted = len(self._ask.token_ids) if params.HasField("prompt_logprobs") else 0
        if len(self._prompt_logprobs) + len(logprobs) > num_wanted:
            raise TransferError("more prompt logprobs came than were asked for")
        for one in logprobs:
            num_top = max(len(one.top_token_ids), len(one.top_logprobs))
            if num_top > params.prompt_logprobs:
                raise TransferError(f"a prompt logprob came with {num_top} alternatives")
        self._prompt_logprobs += logprobs

    @property
    def _first_late(self) -> float:
        """As far as is known now: reads that are begun later give all of them more time."""
        first = min((reading.started for reading in self._reads.values()), default=math.inf)
        return first + self._link.patience_s

    def _check_reads(self, now: float) -> None:
        """LinkLost for a READ that hangs: whoever asks next has the link made anew, and tried."""
        patience_s = self._link.patience_s
        late = (e for e, reading in self._reads.items() if now >= reading.started + patience_s)
        if not all(ended.done() for ended in late):
            problem = "a READ did not end in time"
            self._link.lose(problem)
            raise LinkLost(problem)

    def _note_read(self, reading: _Reading) -> None:
        """TransferError if the bytes are not there, or not those that were sent."""
        read, copy = reading.unfinished.read, reading.copy
        try:
            read.ended.result()
        except LinkLost as error:  # the hand-off's own connection may live on and never notice
            self._link.lose(f"a READ failed: {error}")
            raise
        now = time.monotonic()
        self._record.note_read(now, read.num_bytes)
        for block, sent in zip(copy.local_blocks, copy.checksums, strict=False):
            if self._checksum(copy.group, block) != sent:
                raise TransferError(f"block {block} of group {copy.group} arrived damaged")
        self._pull.note_read()


async def _read(stream: Stream) -> HolderMessage | None:
    message = await stream.read()
    return message if isinstance(message, HolderMessage) else None
