"""A decode worker: all sequences take each step together; prompts are fetched or computed here.

One without any prefill worker beside it is a colocated worker: its steps carry chunks of prompts.
"""

import heapq
from collections import deque
from functools import partial

from benchmarks.simulate.device import NO_PROMPTS, PromptWork
from benchmarks.simulate.flight import Flight
from benchmarks.simulate.prefill import Job, PrefillWorker
from benchmarks.simulate.sequence import Sequence, Stage
from benchmarks.simulate.span import Span, decode_span
from benchmarks.simulate.worker import SimulatedWorker, Surroundings, WorkerLimits
from kv_cache.config import blocks_of
from router.workers import Leg, Load, Worker


class DecodeWorker(SimulatedWorker):
    """
        submit ─┬─> remote: room for all of the prompt and a block, then a prefill worker ─┬─> running
                └─> local: room and a place in a step, then chunks in our own steps ───────┘     │
                      ^────────────── no block is left: the youngest is computed again ──────────┘

    `_context` counts the tokens that the next step reads. Milestones are the decode steps after
    which something happens to a sequence: it ends, or a block of it is full. Those who end come
    first, since they leave room to the others.
    """  # fmt: skip  # noqa: E501

    leg = Leg.DECODE

    def __init__(self, around: Surroundings, identity: Worker, limits: WorkerLimits) -> None:
        super().__init__(around, identity, limits)
        self._sequences: dict[str, Sequence] = {}  # all of them, by their requests
        self._remote: deque[Sequence] = deque()
        self._local: deque[Sequence] = deque()
        self._computed: deque[Sequence] = deque()
        self._fetched_ones: set[Sequence] = set()
        self._joining: list[Sequence] = []
        self._running: dict[Sequence, None] = {}  # in the order in which they joined
        self._milestones: list[tuple[int, bool, int, Sequence]] = []
        self._context = 0
        self._num_decode_steps = 0
        self._num_turns = 0
        self._num_queued_tokens = 0
        self._span: Span | None = None
        self._mixed_until: float | None = None
        self._plan = 0  # number of the step or span under way

    # What others ask

    def load(self) -> Load:
        done = self._span.num_done(self._clock.now) if self._span else 0
        return Load(
            at=0.0,
            num_steps=self.num_steps + done,
            num_running=len(self._running) + len(self._joining) + len(self._computed),
            num_waiting=len(self._local) + len(self._remote),
            num_fetching=len(self._fetched_ones) + self.num_fetching,
            num_queued_tokens=self._num_queued_tokens,
            num_context_tokens=self._context + done * len(self._running),
            num_free_tokens=self.num_free_tokens,
            num_total_tokens=self.limits.num_blocks * self._device.block_tokens,
            max_sequences=self.limits.max_sequences,
            max_step_tokens=self.limits.step_tokens or 0,
            costs=self.limits.costs,
            links=self._around.feed.links,
        )

    def submit(self, sequence: Sequence) -> None:
        if not self.alive:
            return
        self._sequences[sequence.flight.request_id] = sequence
        if sequence.candidates:
            self._remote.append(sequence)
            self._admit_remote()
        elif sequence.holder is None or sequence.holder is self:
            self._queue(sequence, 0)
        else:
            self._fetch(
                sequence.holder, sequence.names, sequence.num_prompt, partial(self._queue, sequence)
            )
        self._tell()

    def prefill_worker_died(self, worker: SimulatedWorker) -> None:
        """Its prompts go to the next candidate, or are computed here."""
        for sequence in [s for s in self._fetched_ones if s.prefiller is worker]:
            self._ask_next(sequence)
        self._wake()
        self._tell()

    def abandon(self, flight: Flight) -> int:
        """What a dead worker leaves of a request: how many tokens had left it. The prefill worker
        that computes for it is told."""
        done = self._span.num_done(self.died_at or self._clock.now) if self._span else 0
        sequence = self._sequences.get(flight.request_id)
        if sequence is None:
            return 0
        if sequence.job is not None and isinstance(sequence.prefiller, PrefillWorker):
            sequence.prefiller.cancel(sequence.job)
        generated = sequence.num_generated(self._num_decode_steps, done)
        return sequence.num_prompt + generated - flight.num_prompt

    # Admission

    def _queue(self, sequence: Sequence, num_fetched: int, *, first: bool = False) -> None:
        """To be computed here."""
        sequence.stage = Stage.WAITING
        sequence.num_fetched = num_fetched
        sequence.num_computed = 0
        self._num_queued_tokens += sequence.num_prompt
        self._local.insert(0 if first else len(self._local), sequence)
        self._wake()

    @property
    def _num_admitted(self) -> int:
        return (
            len(self._running) + len(self._joining) + len(self._computed) + len(self._fetched_ones)
        )

    def _admit_remote(self) -> None:
        while self._remote and self._num_admitted < self.limits.max_sequences:
            sequence = self._remote[0]
            sequence.blocks = self._open(sequence.names, sequence.num_prompt, spare_blocks=1)
            if sequence.blocks is None:
                return
            self._remote.popleft()
            sequence.stage = Stage.FETCHED
            self._fetched_ones.add(sequence)
            self._ask_next(sequence)

    def _ask_next(self, sequence: Sequence) -> None:
        """The next prefill worker, or ourselves if none is left."""
        if sequence.job is not None:
            sequence.job.cancelled = True
        while sequence.candidates and sequence.candidates[0].known_dead:
            sequence.candidates.pop(0)
        if not sequence.candidates:
            self._fetched_ones.remove(sequence)
            self._release(sequence)
            return self._queue(sequence, 0)
        worker = sequence.prefiller = sequence.candidates.pop(0)
        assert isinstance(worker, PrefillWorker), "prompts are handed over by prefill workers"
        assert sequence.blocks is not None, "room is taken before anybody is asked"
        sequence.flight.num_prefill_workers += 1
        sequence.job = Job(
            sequence.flight,
            sequence.names,
            sequence.num_prompt,
            sequence.blocks.num_named * self._device.block_tokens,
            self.identity.incarnation,
            partial(self._handed_over, sequence),
        )
        worker.submit(sequence.job, sequence.holder)
        return None

    def _handed_over(self, sequence: Sequence, job: Job) -> None:
        if not self.alive or sequence.job is not job:
            return
        self._fetched_ones.remove(sequence)
        sequence.num_computed = sequence.num_prompt
        self._begin(sequence)
        self.look_for_room()

    def look_for_room(self) -> None:
        self._admit_remote()
        self._wake()
        self._tell()

    def _begin(self, sequence: Sequence) -> None:
        """Its prompt is here, and its first token."""
        assert sequence.blocks is not None, "a prompt that is complete has blocks"
        self._advance(sequence.blocks, sequence.names, sequence.num_prompt)
        sequence.stage = Stage.RUNNING
        sequence.flight.owner.began(sequence.flight)
        if sequence.num_left == 1:
            self._end(sequence)
        else:
            self._joining.append(sequence)

    # Steps

    def _wake(self) -> None:
        """Something is to be in the next step: it begins when the one under way ends."""
        if not self.alive or self._mixed_until is not None:
            return
        if self._span is None:
            self._step()
            return
        span = self._span.cut(self._clock.now)
        if span.num_steps < self._span.num_steps:
            self._schedule(span)

    def _schedule(self, span: Span) -> None:
        self._span = span
        self._plan += 1
        end = span.start + span.after_s(span.num_steps)
        self._clock.at(end, partial(self._span_ended, self._plan))

    def _step(self) -> None:
        """Begins the next step, or as many as nothing happens in."""
        self._join()
        chunks = self._chunks()
        if chunks:
            work = NO_PROMPTS
            for sequence, num_new in chunks:
                done = num_new == sequence.num_uncomputed
                work = work.plus(num_new, sequence.num_computed, done)
            self._mixed_step(chunks, work)
        elif self._running:
            most = self._milestones[0][0] - self._num_decode_steps
            self._schedule(
                decode_span(self._device, self._clock.now, len(self._running), self._context, most)
            )

    def _mixed_step(self, chunks: list[tuple[Sequence, int]], work: PromptWork) -> None:
        step_s = self._device.step_s(work, len(self._running), self._context)
        self._plan += 1
        self._mixed_until = self._clock.now + step_s
        self._clock.at(self._mixed_until, partial(self._mixed_ended, self._plan, chunks, step_s))

    def _join(self) -> None:
        for sequence in self._joining:
            self._num_turns += 1
            sequence.turn = self._num_turns
            sequence.joined_step = self._num_decode_steps
            self._running[sequence] = None
            self._context += sequence.num_prompt + 1
            self._plan_milestone(sequence)
        self._joining.clear()

    def _plan_milestone(self, sequence: Sequence) -> None:
        """After s steps it has computed s tokens more than its prompt."""
        done = self._num_decode_steps - sequence.joined_step
        last = sequence.num_left - 1
        block = self._device.block_tokens
        until_full = ((sequence.num_prompt + done) // block + 1) * block - sequence.num_prompt
        step = sequence.joined_step + min(last, until_full)
        goes_on = until_full < last
        heapq.heappush(self._milestones, (step, goes_on, sequence.turn, sequence))

    def _chunks(self) -> list[tuple[Sequence, int]]:
        assert self.limits.step_tokens is not None, "a decode worker's steps have a limit"
        budget = self.limits.step_tokens - len(self._running)
        chunks: list[tuple[Sequence, int]] = []
        for sequence in self._computed:
            if budget <= 0:
                return chunks
            chunks.append((sequence, min(budget, sequence.num_uncomputed)))
            budget -= chunks[-1][1]
        while budget > 0 and self._local and self._num_admitted < self.limits.max_sequences:
            sequence = self._local[0]
            if not self._compute(sequence):
                break
            self._local.popleft()
            chunks.append((sequence, min(budget, sequence.num_uncomputed)))
            budget -= chunks[-1][1]
        return chunks

    def _compute(self, sequence: Sequence) -> bool:
        """Takes room for a prompt that is computed here."""
        num_cached = self.num_cached(sequence.names, sequence.num_prompt)
        sequence.blocks = self._open(sequence.names, sequence.num_prompt, spare_blocks=1)
        if sequence.blocks is None:
            return False
        sequence.stage = Stage.COMPUTED
        sequence.num_computed = num_cached
        self._num_queued_tokens -= num_cached
        flight = sequence.flight
        flight.num_begun += 1
        num_fetched = min(sequence.num_fetched, num_cached)
        flight.num_fetched += num_fetched
        flight.num_own_cached += num_cached - num_fetched
        self._computed.append(sequence)
        return True

    def _mixed_ended(self, plan: int, chunks: list[tuple[Sequence, int]], step_s: float) -> None:
        if not self.alive or plan != self._plan:
            return
        self._mixed_until = None
        self._steps_done(1, step_s, decoding=bool(self._running))
        for sequence, num_new in chunks:
            assert sequence.blocks is not None, "a chunk of a prompt without blocks"
            sequence.num_computed += num_new
            sequence.flight.num_computed += num_new
            self._num_queued_tokens -= num_new
            if sequence.num_uncomputed:
                self._advance(sequence.blocks, sequence.names, sequence.num_computed)
            else:
                self._computed.remove(sequence)
                self._begin(sequence)
        self._next()

    def _span_ended(self, plan: int) -> None:
        if not self.alive or plan != self._plan or self._span is None:
            return
        span, self._span = self._span, None
        self._steps_done(span.num_steps, self._clock.now - span.start, decoding=True)
        self._next()

    def _steps_done(self, num_steps: int, seconds: float, *, decoding: bool) -> None:
        self.num_steps += num_steps
        self.busy_s += seconds
        if decoding:
            self._num_decode_steps += num_steps
            self._context += num_steps * len(self._running)
            self._reach_milestones()

    def _next(self) -> None:
        self._admit_remote()
        if self._span is None and self._mixed_until is None:
            self._step()
        self._tell()

    def _reach_milestones(self) -> None:
        while self._milestones and self._milestones[0][0] <= self._num_decode_steps:
            _, goes_on, turn, sequence = heapq.heappop(self._milestones)
            if sequence.stage is not Stage.RUNNING or sequence.turn != turn:
                continue
            done = self._num_decode_steps - sequence.joined_step
            if not goes_on:
                self._leave(sequence)
                self._end(sequence)
            elif self._grow(sequence, sequence.num_prompt + done):
                self._plan_milestone(sequence)

    def _grow(self, sequence: Sequence, num_computed: int) -> bool:
        """A block is full; False if the sequence itself had to make room for others."""
        assert sequence.blocks is not None, "a running sequence has blocks"
        self._advance(sequence.blocks, sequence.names, num_computed)
        while self.cache.extend(sequence.blocks, num_computed + 1) is None:
            youngest = next(reversed(self._running))
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Its tokens so far become a prompt, to be computed here before all others."""
        generated = sequence.num_generated(self._num_decode_steps, 0)
        self._leave(sequence)
        self._release(sequence)
        sequence.flight.num_preemptions += 1
        sequence.num_prompt += generated
        sequence.num_left -= generated
        sequence.stage = Stage.WAITING
        sequence.num_fetched = sequence.num_computed = sequence.turn = 0
        self._num_queued_tokens += sequence.num_prompt
        self._local.appendleft(sequence)

    def _leave(self, sequence: Sequence) -> None:
        del self._running[sequence]
        self._context -= sequence.num_prompt + sequence.num_generated(self._num_decode_steps, 0)

    def _end(self, sequence: Sequence) -> None:
        assert sequence.blocks is not None, "an answer that is complete has blocks"
        num_computed = sequence.num_prompt + sequence.num_left - 1
        self._advance(sequence.blocks, sequence.names, num_computed)
        self._release(sequence)
        sequence.stage = Stage.ENDED
        del self._sequences[sequence.flight.request_id]
        sequence.flight.owner.ended(sequence.flight)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.blocks is not None, "nothing to give back"
        self.cache.release(sequence.blocks)
        sequence.blocks = None

    def check_idle(self) -> None:
        assert self._num_admitted == 0, "a sequence is not complete"
        assert not self._local, "a prompt waits to be computed"
        assert not self._remote, "a prompt waits for room"
        assert not self._context, "a step would read tokens of nobody"
        assert not self._num_queued_tokens, "tokens are queued for nobody"
        super().check_idle()


def fits_alone(limits: WorkerLimits, block_tokens: int, num_tokens: int, num_output: int) -> bool:
    """Whether an idle worker could answer at all."""
    needed = blocks_of(num_tokens + num_output, block_tokens) + 1
    return needed <= limits.num_blocks
