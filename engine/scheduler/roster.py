"""Who is in the engine, in which state, and which slot each one has."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from itertools import count

from engine.errors import QueueFullError, RequestError
from engine.grammar.interface import CompiledGrammar
from engine.request import GenerationRequest, RequestId
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.order import make_key
from engine.scheduler.queue import WaitingQueue
from engine.scheduler.sequence import QUEUED, RunningRequest, Sequence, SequenceState
from engine.scheduler.swap import SwapSpace
from kv_cache.cache import KvCache
from kv_cache.names import SequenceNames
from kv_cache.sequence import SequenceBlocks


class Roster:
    """The transitions of `SequenceState`; it decides nothing.

    A sequence's blocks and slots change hands here only, so what a state holds (see there)
    is true after every call. What ends while a step is in flight with it gives back nothing
    before `dismiss`: its blocks are still written to.
    """

    def __init__(self, limits: SchedulerLimits, cache: KvCache, swap: SwapSpace) -> None:
        self._limits = limits
        self._cache = cache
        self._swap = swap
        self._requests: dict[RequestId, RunningRequest] = {}
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._arrivals = count()
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # by key
        self.fetching: set[Sequence] = set()
        self.in_flight: frozenset[Sequence] = frozenset()  # of the step that ends last
        self._leaving: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, request_id: RequestId) -> RunningRequest:
        return self._requests[request_id]

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._requests

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def doubts(self) -> bool:
        """Whether what may not be finite is held until the step in flight has ended."""
        return any(sequence.request.in_doubt for sequence in self._leaving)

    def requests(self) -> Iterable[RunningRequest]:
        return self._requests.values()

    def sequences(self) -> Iterator[Sequence]:
        for request in self._requests.values():
            yield from request.choices

    def add(
        self,
        source: GenerationRequest,
        seed: int,
        due: float,
        names: SequenceNames,
        grammar: CompiledGrammar | None = None,
        arrived_s: float = 0.0,
    ) -> None:
        """`due` orders it, `names` are those of its prompt or none yet."""
        if source.request_id in self._requests:
            raise RequestError("request_id", f"{source.request_id!r} is running already")
        # Of an answer that another engine began, a client has a part already.
        if not source.sent and len(self.waiting) >= self._limits.max_num_queued_reqs:
            raise QueueFullError(f"{len(self.waiting)} requests are waiting already")
        room = self._limits.max_model_len - len(source.prompt_token_ids)
        request = RunningRequest(source, seed, source.params.max_tokens or room, grammar)
        request.course.arrived_s = arrived_s
        arrival = next(self._arrivals)
        open_choices = _open_choices(source)
        leader_sent = open_choices[0][1]
        apart = any(list(sent) != list(leader_sent) for _, sent in open_choices)
        for choice, sent in open_choices:
            leads = apart or not request.choices
            state = SequenceState.WAITING if leads else SequenceState.FORKING
            key = make_key(source, due, arrival, choice)
            request.add(Sequence(request, choice, state, key, sent, names.fork()))
        self._requests[source.request_id] = request
        for sequence in request.choices:
            if sequence.state is SequenceState.WAITING:
                self.waiting.push(sequence)

    def start(self, sequence: Sequence, blocks: SequenceBlocks) -> None:
        """The first in line leaves the queue; choices to be forked from it get slots too."""
        self._leave_queue(sequence, blocks)
        self._run(sequence)

    def start_fetch(self, sequence: Sequence, blocks: SequenceBlocks) -> None:
        """As `start`, but its blocks are filled from elsewhere until `end_fetch`."""
        self._leave_queue(sequence, blocks)
        sequence.state = SequenceState.FETCHING
        self.fetching.add(sequence)

    def end_fetch(self, sequence: Sequence) -> None:
        """The blocks are filled."""
        self.fetching.remove(sequence)
        self._run(sequence)

    def _leave_queue(self, sequence: Sequence, blocks: SequenceBlocks) -> None:
        popped = self.waiting.pop()
        assert popped is sequence
        sequence.blocks = blocks
        sequence.admitted = True
        for one in (sequence, *sequence.request.forking):
            one.slot = self._free_slots.pop()

    def fork(self, leader: Sequence, sibling: Sequence) -> None:
        """Both have computed the leader's tokens; what follows is each one's own."""
        assert leader.blocks is not None
        sibling.blocks = self._cache.fork(leader.blocks, leader.num_computed)
        sibling.num_computed = leader.num_computed
        sibling.names = leader.names.fork()
        sibling.admitted = True
        sibling.may_fetch = sibling.may_fetch_prefix = False
        self._run(sibling)

    def requeue(self, sequence: Sequence, state: SequenceState) -> None:
        """Preempted, or its fetch came to nothing: into the queue, without blocks and slot."""
        assert state in QUEUED
        for one in (sequence, *sequence.request.forking):
            self._give_slot_back(one)
        self._give_blocks_back(sequence)
        sequence.state = state
        if state is SequenceState.WAITING:
            sequence.num_computed = sequence.num_written = 0
        self.waiting.push(sequence)

    def retry(self, sequence: Sequence, of_prefix: bool, again: bool) -> None:
        """Its fetch came to nothing: it is admitted as if it came now, and fetches `again` what
        was to be fetched, or does not."""
        self.requeue(sequence, SequenceState.WAITING)
        sequence.admitted = False
        if not sequence.request.has_begun:
            sequence.request.course.begin_again()
        if of_prefix:
            sequence.may_fetch_prefix = again
        else:
            sequence.may_fetch = again

    def finish(self, sequence: Sequence) -> None:
        """Nothing is left of the sequence but its tokens; the last one ends its request.

        Siblings that wait to be forked take the place of a leader that ends before them.
        """
        heirs = sequence.request.forking
        if heirs and sequence.state is not SequenceState.FORKING:
            heir = heirs[0]
            sequence.choice, heir.choice = heir.choice, sequence.choice
            sequence.enters = True
            sequence = heir
        previous, sequence.state = sequence.state, SequenceState.FINISHED
        if sequence in self.in_flight:
            self._stop_running(sequence)
            self._leaving.append(sequence)
        elif previous in (SequenceState.RUNNING, SequenceState.FETCHING):
            self._give_blocks_back(sequence)
        elif previous is not SequenceState.FORKING:
            self.waiting.forget()
        self._swap.forget(sequence)
        if sequence not in self.in_flight:
            self._give_slot_back(sequence)
        request = sequence.request
        if not request.live:
            del self._requests[request.source.request_id]
            request.forget_choices()

    def end(self, request: RunningRequest) -> None:
        """What still lives of it is finished, siblings before the leader that they wait for."""
        for sequence in request.choices[::-1]:
            if sequence.state is not SequenceState.FINISHED:
                self.finish(sequence)

    def _run(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.RUNNING
        sequence.enters = True
        insort(self.running, sequence)

    def dismiss(self) -> None:
        """A step is over, and with it the last part of all that ended while it was in flight."""
        for sequence in self._leaving:
            self._release(sequence)
            self._give_slot_back(sequence)
        self._leaving.clear()

    def _give_blocks_back(self, sequence: Sequence) -> None:
        """Of one that runs or fetches, and does so no more."""
        if sequence in self.fetching:
            self.fetching.remove(sequence)
        else:
            self._stop_running(sequence)
        self._release(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        position = bisect_left(self.running, sequence)
        assert self.running[position] is sequence
        del self.running[position]

    def _release(self, sequence: Sequence) -> None:
        assert sequence.blocks is not None
        self._cache.release(sequence.blocks)
        if sequence.request.in_doubt:
            self._cache.forget(sequence.names.names)
        sequence.blocks = None
        sequence.changes.clear()

    def _give_slot_back(self, sequence: Sequence) -> None:
        if sequence.slot is not None:
            self._free_slots.append(sequence.slot)
            sequence.slot = None

    def _host_blocks(self) -> list[list[dict[int, int]]]:
        groups = range(len(self._swap.num_blocks))
        holders = [s.host_blocks for s in self.sequences() if s.host_blocks]
        return [[places[group] for places in holders] for group in groups]

    def check_integrity(self) -> None:
        """Asserts that slots, queue and cache add up to what the states say."""
        present = {*self.sequences(), *self._leaving}
        assert all(s.state is SequenceState.FINISHED for s in self._leaving)
        held = [s.slot for s in present if s.slot is not None]
        assert sorted(held + self._free_slots) == list(range(self._limits.max_num_seqs))
        assert self.running == sorted(self._in_state(SequenceState.RUNNING))
        assert self.fetching == set(self._in_state(SequenceState.FETCHING))
        holders = [s.blocks for s in present if s.blocks is not None]
        assert len(holders) == len(self.running) + len(self.fetching) + len(self._leaving)
        swapped = [sum(map(len, per_group)) for per_group in self._host_blocks()]
        assert swapped == list(self._swap.num_used)
        assert len(self.waiting) == sum(s.state in QUEUED for s in self.sequences())
        self._cache.check_integrity(holders)

    def _in_state(self, state: SequenceState) -> list[Sequence]:
        return [s for s in self.sequences() if s.state is state]


def _open_choices(source: GenerationRequest) -> list[tuple[int, Seq[int]]]:
    """The choices that are to run, with the tokens that were sent of each."""
    if source.sent:
        return [
            (i, so_far.token_ids) for i, so_far in enumerate(source.sent) if not so_far.finished
        ]
    draws = source.hand_over is None or source.hand_over.draw
    return [(choice, ()) for choice in range(source.params.n if draws else 1)]
