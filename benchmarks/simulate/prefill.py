"""A prefill worker: prompts in the order they came, in chunks, handed over as they are computed."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.simulate.device import NO_PROMPTS
from benchmarks.simulate.flight import Flight
from benchmarks.simulate.worker import SimulatedWorker, Surroundings, WorkerLimits
from kv_cache.names import BlockName
from kv_cache.sequence import SequenceBlocks
from router.workers import Leg, Load, Worker

# What a worker says of its steps that takes one whole prompt in each.
WHOLE_STEP_TOKENS = 8192


@dataclass(slots=True, eq=False)
class Job:
    """A prompt for a decode worker, which has the first `num_there` tokens already.

    `done` is called when the last byte is there. One that was cancelled has nobody waiting.
    """

    flight: Flight
    names: Sequence[BlockName]
    num_tokens: int
    num_there: int
    receiver: int  # incarnation of the decode worker
    done: Callable[["Job"], None]
    blocks: SequenceBlocks | None = None
    num_computed: int = 0  # tokens, cached ones among them
    num_expected: int = 0  # tokens to compute, as it looked when the prompt came
    num_fetched: int = 0
    cancelled: bool = False

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed


class PrefillWorker(SimulatedWorker):
    """First come, first served. A step's chunks are those of as many prompts as fit into it.

    submit -> (fetch) -> queue -> active -> leased -> done
                                    │ steps   └ until the decode worker has read everything
    """

    leg = Leg.PREFILL

    def __init__(self, around: Surroundings, identity: Worker, limits: WorkerLimits) -> None:
        super().__init__(around, identity, limits)
        self._queue: deque[Job] = deque()
        self._active: deque[Job] = deque()
        self._leased: set[Job] = set()
        self._stepping = False
        self._num_queued_tokens = 0

    def load(self) -> Load:
        return Load(
            at=0.0,
            num_steps=self.num_steps,
            num_running=len(self._active),
            num_waiting=len(self._queue),
            num_fetching=self.num_fetching,
            num_queued_tokens=self._num_queued_tokens,
            num_free_tokens=self.num_free_tokens,
            num_total_tokens=self.limits.num_blocks * self._device.block_tokens,
            max_sequences=self.limits.max_sequences,
            max_step_tokens=self.limits.step_tokens or WHOLE_STEP_TOKENS,
            costs=self.limits.costs,
            links=self._around.feed.links,
        )

    def submit(self, job: Job, holder: SimulatedWorker | None = None) -> None:
        """`holder`: who has more of the prompt's beginning than we have, as the router knows."""
        if not self.alive:
            return
        if holder is None or holder is self:
            self._enqueue(job, 0)
        else:
            self._fetch(holder, job.names, job.num_tokens, partial(self._enqueue, job))

    def _enqueue(self, job: Job, num_fetched: int) -> None:
        if job.cancelled:
            return
        job.num_fetched = num_fetched
        job.num_expected = job.num_tokens - self.num_cached(job.names, job.num_tokens)
        self._num_queued_tokens += job.num_expected
        self._queue.append(job)
        self._step()
        self._tell()

    def cancel(self, job: Job) -> None:
        """Its decode worker is gone. What was begun is given up at the end of the step."""
        job.cancelled = True
        if job in self._queue:
            self._queue.remove(job)
            self._num_queued_tokens -= job.num_expected
        if not self._stepping:
            self._step()

    def _step(self) -> None:
        """Begins the next step if there is work and none is under way."""
        if self._stepping or not self.alive:
            return
        chunks = self._chunks()
        if not chunks:
            return
        work = NO_PROMPTS
        for job, num_new in chunks:
            work = work.plus(num_new, job.num_computed, num_new == job.num_uncomputed)
        step_s = self._device.step_s(work)
        self._stepping = True
        self._clock.at(self._clock.now + step_s, partial(self._stepped, chunks, step_s))

    def _chunks(self) -> list[tuple[Job, int]]:
        self._give_up_cancelled()
        whole = self.limits.step_tokens is None
        budget = 1 << 60 if self.limits.step_tokens is None else self.limits.step_tokens
        chunks: list[tuple[Job, int]] = []
        for job in self._active:
            num_new = min(budget, job.num_uncomputed)
            if num_new:
                chunks.append((job, num_new))
                budget -= num_new
        while budget and self._queue and not (whole and chunks):
            job = self._queue[0]
            if not self._begin(job):
                break
            self._queue.popleft()
            num_new = min(budget, job.num_uncomputed)
            chunks.append((job, num_new))
            budget -= num_new
        return chunks

    def _begin(self, job: Job) -> bool:
        """Takes room for the prompt and hands over at once what is cached of it."""
        num_cached = self.num_cached(job.names, job.num_tokens)
        job.blocks = self._open(job.names, job.num_tokens)
        if job.blocks is None:
            return False
        flight = job.flight
        flight.num_begun += 1
        job.num_computed = num_cached
        job.num_fetched = min(job.num_fetched, num_cached)
        flight.num_fetched += job.num_fetched
        flight.num_own_cached += num_cached - job.num_fetched
        self._num_queued_tokens -= num_cached + job.num_expected - job.num_tokens
        self._active.append(job)
        self._hand_over(job, 0)
        return True

    def _give_up_cancelled(self) -> None:
        for job in [job for job in self._active if job.cancelled]:
            self._active.remove(job)
            self._num_queued_tokens -= job.num_uncomputed
            self._release(job)

    def _stepped(self, chunks: list[tuple[Job, int]], step_s: float) -> None:
        if not self.alive:
            return
        self._stepping = False
        self.num_steps += 1
        self.busy_s += step_s
        for job, num_new in chunks:
            before = job.num_computed
            job.num_computed += num_new
            job.flight.num_computed += num_new
            self._num_queued_tokens -= num_new
            assert job.blocks is not None, "a chunk of a prompt without blocks"
            self._advance(job.blocks, job.names, job.num_computed)
            there_at = self._hand_over(job, before)
            if not job.num_uncomputed:
                self._active.remove(job)
                self._leased.add(job)
                self._clock.at(there_at, partial(self._read, job))
        self._step()
        self._tell()

    def _hand_over(self, job: Job, before: int) -> float:
        """Sends what was computed since; when it is there."""
        num_new = job.num_computed - max(before, job.num_there)
        if num_new <= 0:
            return self._clock.now
        num_bytes = num_new * self._device.kv_token_bytes
        return self._around.network.send(
            self.identity.incarnation, job.receiver, num_bytes, self._clock.now
        )

    def _read(self, job: Job) -> None:
        """The decode worker has everything."""
        if not self.alive:
            return
        self._leased.remove(job)
        self._release(job)
        if not job.cancelled:
            job.done(job)
        self.look_for_room()

    def look_for_room(self) -> None:
        self._step()
        self._tell()

    def _release(self, job: Job) -> None:
        assert job.blocks is not None, "a prompt that was begun has blocks"
        self.cache.release(job.blocks)

    def check_idle(self) -> None:
        assert not self._queue, "a prompt waits"
        assert not self._active, "a prompt is not complete"
        assert not self._leased, "a lease has no end"
        assert not self._num_queued_tokens, "tokens are queued for nobody"
        super().check_idle()
