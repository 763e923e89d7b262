"""One hand-off as its puller sees it: what to read where, and when to stop waiting. Pure."""

from collections.abc import Sequence
from enum import Enum, auto
from itertools import product
from typing import NamedTuple

from kv_cache.handover import BlockRun, HeldRange
from kv_transfer.errors import TransferError
from protos.limits import shortened

PATIENCE = 3.0  # times what the holder predicted
PATIENCE_S = 1.0  # and so much more
LONGEST_TURN_S = 60.0
FIRST_ANSWER_S = 5.0  # nothing is predicted before it; a dead holder's stream breaks sooner
PROMISED_S = 0.5  # at least so often a holder says something


class PullState(Enum):
    """
    ask ---> WAITING ---- the first range is announced ----> READING
                |                                               | the first tokens are there
                |                                               v
                |                                            ARRIVING ---- all reads ended
                |                                               |             |
                |     a deadline, a failure, a broken stream    v             v
                +--------------------------------------------> FAILED <--- COMMITTING ---> DONE
                                                                     not held       held

    The commit goes out when all reads have ended, on the way into COMMITTING; of a prompt that
    the holder computes already in READING, once it is announced to its end: while the first
    tokens are still drawn.

    The target blocks belong to the reservation all along. Before DONE nothing that was read
    may be used; after FAILED the blocks of reads that have not ended are quarantined.
    """

    WAITING = auto()
    READING = auto()
    ARRIVING = auto()
    COMMITTING = auto()
    DONE = auto()
    FAILED = auto()


class Copy(NamedTuple):
    """Blobs of one group to be read, pair by pair, with the holder's checksums if it has them."""

    group: int
    remote_blocks: tuple[int, ...]
    local_blocks: tuple[int, ...]
    checksums: tuple[int, ...] = ()


class RemoteRun(NamedTuple):
    """A `BlockRun` of the holder, as it came over the wire."""

    group: int
    first_entry: int
    blocks: Sequence[int]
    checksums: Sequence[int] = ()


class Pull:
    """Follows the holder's messages and the reads; time is passed in.

    `target` are our own blocks for the wanted tokens. A holder that announces what does not
    fit them fails the pull, and nothing is read.
    """

    def __init__(
        self,
        target: HeldRange,
        block_size: int,
        now: float,
        stuck_after_s: float,
        deadline: float | None,
        whole: bool = False,
    ) -> None:
        """`whole`: nothing less than the target comes, of a holder that computes."""
        self.state = PullState.WAITING
        self.target = target
        self.arrived_to = target.start  # announced, and being read or read
        self._block_size = block_size
        self._local = {(r.group, r.first_entry + i): b for r in target.runs for i, b in _entries(r)}
        self._groups = {run.group for run in target.runs}
        self._whole = whole
        self._committed = False
        self._unread = 0
        self._least_stuck_after_s = self._stuck_after_s = stuck_after_s
        self._request_deadline = deadline
        self._next_message = now + FIRST_ANSWER_S
        self._num_turns = -1
        self._progress_at = now

    @property
    def complete(self) -> bool:
        return self.arrived_to == self.target.end

    def note_waiting(self, now: float, wait_s: float, num_turns: int, turn_s: float = 0.0) -> None:
        """The holder lives; whether its engine does, its turns say, of which one may take
        `turn_s`."""
        if self.state not in (PullState.WAITING, PullState.READING):
            raise TransferError(f"'waiting' while {self.state.name}")
        if num_turns != self._num_turns:
            self._num_turns, self._progress_at = num_turns, now
        patience_s = PATIENCE_S + PATIENCE * max(0.0, min(turn_s, LONGEST_TURN_S))
        self._stuck_after_s = max(self._least_stuck_after_s, patience_s)
        self._expect(now, min(wait_s, 2 * PROMISED_S))

    def note_chunk(
        self, now: float, start: int, end: int, runs: Sequence[RemoteRun], next_s: float
    ) -> list[Copy]:
        """What is to be read now."""
        if self.state not in (PullState.WAITING, PullState.READING):
            raise TransferError(f"a chunk while {self.state.name}")
        copies = self._check(start, end, runs)
        self.state = PullState.READING
        self.arrived_to = end
        self._progress_at = now
        self._expect(now, min(next_s, LONGEST_TURN_S))
        self._unread += len(copies)
        return copies

    def _expect(self, now: float, within_s: float) -> None:
        self._next_message = now + PATIENCE_S + PATIENCE * max(PROMISED_S, within_s)

    def note_finished(self, now: float) -> None:
        if self.state is not PullState.READING:  # a holder that has nothing announces that
            raise TransferError(f"'finished' while {self.state.name}")
        if self._whole and not self.complete:
            raise TransferError("the holder computed only a part of the prompt")
        self.state = PullState.ARRIVING
        if self._committed:
            self._await_verdict(now)

    def note_read(self) -> None:
        """One of the copies has ended well."""
        self._unread -= 1

    @property
    def may_commit(self) -> bool:
        if self._unread or self._committed:
            return False
        to_its_end = self.state is PullState.READING and self._whole and self.complete
        return to_its_end or self.state is PullState.ARRIVING

    def note_commit(self, now: float) -> None:
        assert self.may_commit
        self._committed = True
        if self.state is PullState.ARRIVING:
            self._await_verdict(now)

    def _await_verdict(self, now: float) -> None:
        self.state = PullState.COMMITTING
        self._next_message = now + PATIENCE_S + PATIENCE

    def note_verdict(self, held: bool, reason: str) -> None:
        if self.state is not PullState.COMMITTING:
            raise TransferError(f"a verdict while {self.state.name}")
        if not held:
            raise TransferError(f"the holder let go too early: {shortened(reason)}")
        self.state = PullState.DONE

    def fail(self) -> None:
        self.state = PullState.FAILED

    def check_time(self, now: float) -> None:
        """TransferError once there is nothing to hope for."""
        if self._request_deadline is not None and now >= self._request_deadline:
            raise TransferError("its time is up", retryable=False)
        if self.state is PullState.ARRIVING:
            return  # reads end, or are late, or their link breaks
        if now >= self._next_message:
            raise TransferError("the holder is silent")
        if self.state is PullState.COMMITTING:
            return
        if now - self._progress_at >= self._stuck_after_s:
            raise TransferError("the holder's engine is stuck")

    def next_check(self, now: float) -> float:
        """When `check_time` is to be asked again at the latest, if nothing comes before."""
        times = [now + self._stuck_after_s]
        if self.state is not PullState.ARRIVING:
            times.append(self._next_message)
        if self._request_deadline is not None:
            times.append(self._request_deadline)
        return max(now, min(times))

    def _check(self, start: int, end: int, runs: Sequence[RemoteRun]) -> list[Copy]:
        """The chunk's blocks beside ours, mapped by token ranges."""
        target = self.target
        if start != self.arrived_to or not start <= end <= target.end:
            raise TransferError(
                f"tokens {start}..{end} were announced, {self.arrived_to}..{target.end} are missing"
            )
        if end != target.end and end % self._block_size:
            raise TransferError(f"tokens {start}..{end} end inside a block")
        if start == end:
            return []  # prompt logprobs without a block that has become full
        span = range(start // self._block_size, -(-end // self._block_size))
        keys = product(self._groups, span)  # of each group some, where it has a window
        wanted = {key: self._local[key] for key in keys if key in self._local}
        copies = []
        for run in runs:
            if run.checksums and len(run.checksums) != len(run.blocks):
                raise TransferError(f"{len(run.checksums)} checksums of {len(run.blocks)} blocks")
            pairs = [
                (block, local, i)
                for i, block in enumerate(run.blocks)
                if (local := wanted.pop((run.group, run.first_entry + i), None)) is not None
            ]
            if pairs:
                copies.append(_copy(run, pairs))
        if wanted:
            group, entry = min(wanted)
            raise TransferError(f"block {entry} of group {group} was left out of {start}..{end}")
        return copies


def _entries(run: BlockRun) -> enumerate[int]:
    return enumerate(run.blocks)


def _copy(run: RemoteRun, pairs: Sequence[tuple[int, int, int]]) -> Copy:
    remote, local, places = zip(*pairs, strict=True)
    checksums = tuple(run.checksums[i] for i in places) if run.checksums else ()
    return Copy(run.group, remote, local, checksums)
