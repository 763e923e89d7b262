"""A puller maps tokens to blocks, never list positions, and believes nothing that does not fit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache.handover import BlockRun, HeldRange
from kv_transfer.errors import TransferError
from kv_transfer.pull import Copy, Pull, PullState, RemoteRun

BLOCK = 8


def entries(start: int, end: int) -> range:
    return range(start // BLOCK, -(-end // BLOCK))


@dataclass
class Case:
    """A prompt's missing range in two pools; group 1 has a window and lacks early blocks."""

    start: int
    end: int
    first_visible: int
    local: dict[tuple[int, int], int]
    remote: dict[tuple[int, int], int]
    cuts: list[int]

    @property
    def target(self) -> HeldRange:
        runs = []
        for group, first in ((0, self.start // BLOCK), (1, self.first_visible)):
            blocks = [self.local[group, e] for e in entries(self.start, self.end) if e >= first]
            runs.append(BlockRun(group, max(first, self.start // BLOCK), tuple(blocks)))
        return HeldRange(self.start, self.end, tuple(runs), ())

    def runs(self, start: int, end: int) -> list[RemoteRun]:
        runs = []
        for group, first in ((0, 0), (1, self.first_visible)):
            span = [e for e in entries(start, end) if e >= first]
            if span:
                blocks = tuple(self.remote[group, e] for e in span)
                sums = tuple(1000 + b for b in blocks)
                runs.append(RemoteRun(group, span[0], blocks, sums))
        return runs


@st.composite
def cases(draw: st.DrawFn) -> Case:
    start = draw(st.integers(0, 6)) * BLOCK
    end = start + draw(st.integers(1, 12 * BLOCK))
    span = entries(start, end)
    first_visible = draw(st.integers(span.start, span.stop - 1))
    keys = [(group, e) for group in (0, 1) for e in span]
    local = draw(st.permutations(range(1, len(keys) + 1)))
    remote = draw(st.permutations(range(50, 50 + len(keys))))
    inner = range(start + BLOCK, end, BLOCK)
    cuts = sorted(draw(st.sets(st.sampled_from(inner)))) if inner else []
    return Case(
        start,
        end,
        first_visible,
        dict(zip(keys, local, strict=True)),
        dict(zip(keys, remote, strict=True)),
        [*cuts, end],
    )


def pull_of(case: Case, deadline: float | None = None) -> Pull:
    return Pull(case.target, BLOCK, 0.0, stuck_after_s=5.0, deadline=deadline)


@given(cases())
def test_every_wanted_block_is_read_once_from_its_own_twin(case: Case) -> None:
    pull = pull_of(case)
    done: list[tuple[int, int, int, int]] = []
    start = case.start
    for end in case.cuts:
        for copy in pull.note_chunk(0.0, start, end, case.runs(start, end), 0.1):
            for pair in zip(copy.remote_blocks, copy.local_blocks, copy.checksums, strict=True):
                done.append((copy.group, *pair))
            pull.note_read()
        start = end
    wanted = [
        (group, case.remote[group, e], case.local[group, e], 1000 + case.remote[group, e])
        for group, first in ((0, 0), (1, case.first_visible))
        for e in entries(case.start, case.end)
        if e >= first
    ]
    assert sorted(done) == sorted(wanted)
    assert pull.complete
    pull.note_finished(0.0)
    assert pull.may_commit


@given(cases(), st.integers(-2, 2).filter(bool), st.data())
def test_what_does_not_fit_is_refused_and_not_read(
    case: Case, shift: int, data: st.DataObject
) -> None:
    pull = pull_of(case)
    end = case.cuts[0]
    runs = case.runs(case.start, end)
    kind = data.draw(st.sampled_from(["start", "end", "group", "entry", "lost", "sums"]))
    start = case.start
    last = runs[-1]
    match kind:
        case "start":
            start += shift * BLOCK
        case "end":
            end = case.end + 1
        case "group":
            runs[-1] = last._replace(group=7)
        case "entry":
            runs[-1] = last._replace(first_entry=last.first_entry + 100)
        case "lost":
            runs[-1] = last._replace(blocks=last.blocks[:-1], checksums=last.checksums[:-1])
        case "sums":
            runs[-1] = last._replace(checksums=(*last.checksums, 0))
    with pytest.raises(TransferError):
        pull.note_chunk(0.0, start, end, runs, 0.1)
    assert pull.arrived_to == case.start
    assert pull.state is PullState.WAITING


def one_block(deadline: float | None = None) -> tuple[Pull, Sequence[RemoteRun]]:
    target = HeldRange(0, 5, (BlockRun(0, 0, (3,)),), ())
    pull = Pull(target, BLOCK, 0.0, stuck_after_s=5.0, deadline=deadline)
    return pull, [RemoteRun(0, 0, (9,))]


def test_a_chunk_ends_at_a_block_unless_it_is_the_last() -> None:
    target = HeldRange(0, 20, (BlockRun(0, 0, (1, 2, 3)),), ())
    pull = Pull(target, BLOCK, 0.0, stuck_after_s=5.0, deadline=None)
    with pytest.raises(TransferError, match="inside a block"):
        pull.note_chunk(0.0, 0, 12, [RemoteRun(0, 0, (9, 8))], 0.1)


class Looked(dict[tuple[int, int], int]):
    """Counts the entries that are looked at."""

    num_seen = 0

    def __contains__(self, key: object) -> bool:
        self.num_seen += 1
        return super().__contains__(key)

    def items(self) -> Any:
        self.num_seen += len(self)
        return super().items()


def test_a_chunk_costs_its_own_blocks_and_not_the_prompts() -> None:
    num_blocks = 1000
    target = HeldRange(0, num_blocks * BLOCK, (BlockRun(0, 0, tuple(range(num_blocks))),), ())
    pull = Pull(target, BLOCK, 0.0, stuck_after_s=5.0, deadline=None)
    pull._local = looked = Looked(pull._local)
    for entry in range(num_blocks):
        run = RemoteRun(0, entry, (entry,))
        pull.note_chunk(0.0, entry * BLOCK, (entry + 1) * BLOCK, [run], 0.1)
    assert pull.complete
    assert looked.num_seen <= 2 * num_blocks


def test_a_chunk_may_bring_no_blocks() -> None:
    pull, runs = one_block()
    assert pull.note_chunk(0.0, 0, 0, [], 0.1) == []
    assert len(pull.note_chunk(0.0, 0, 5, runs, 0.1)) == 1


def test_messages_out_of_order_are_refused() -> None:
    pull, runs = one_block()
    with pytest.raises(TransferError, match="verdict"):
        pull.note_verdict(True, "")
    with pytest.raises(TransferError, match="'finished' while WAITING"):
        pull.note_finished(0.0)
    pull.note_chunk(0.0, 0, 5, runs, 0.1)
    with pytest.raises(TransferError, match="missing"):
        pull.note_chunk(0.0, 0, 5, runs, 0.1)  # a duplicate
    pull.note_finished(0.0)
    for late in (
        lambda: pull.note_waiting(0.0, 1.0, 1),
        lambda: pull.note_chunk(0.0, 5, 6, runs, 0.1),
        lambda: pull.note_finished(0.0),
    ):
        with pytest.raises(TransferError, match="ARRIVING"):
            late()


def test_nothing_is_committed_before_the_bytes_are_there() -> None:
    pull, runs = one_block()
    (copy,) = pull.note_chunk(0.0, 0, 5, runs, 0.1)
    assert copy == Copy(0, (9,), (3,))
    pull.note_finished(0.0)
    before = pull.may_commit
    pull.note_read()
    assert (before, pull.may_commit) == (False, True)
    pull.note_commit(1.0)
    with pytest.raises(TransferError, match="let go too early: its pool was reset") as caught:
        pull.note_verdict(False, "its pool was reset" + " and so on" * 100_000)
    assert len(str(caught.value)) < 1100
    assert pull.state is not PullState.DONE


def test_a_prompt_that_has_been_read_is_committed_while_its_tokens_are_drawn() -> None:
    target = HeldRange(0, 16, (BlockRun(0, 0, (3, 4)),), ())
    pull = Pull(target, BLOCK, 0.0, stuck_after_s=5.0, deadline=None, whole=True)
    pull.note_chunk(0.0, 0, 8, [RemoteRun(0, 0, (9,))], 0.1)
    pull.note_read()
    may = [pull.may_commit]  # the other block is not even announced
    pull.note_chunk(0.0, 8, 16, [RemoteRun(0, 1, (8,))], 0.1)
    may.append(pull.may_commit)  # nor read
    pull.note_read()
    may.append(pull.may_commit)
    pull.note_commit(1.0)
    may.append(pull.may_commit)
    assert may == [False, False, True, False]
    pull.note_waiting(1.0, 0.1, 7)  # the holder still draws
    with pytest.raises(TransferError, match="verdict"):
        pull.note_verdict(True, "")
    with pytest.raises(TransferError, match="stuck|silent"):
        pull.check_time(9.0)
    pull.note_finished(2.0)
    pull.note_verdict(True, "")
    assert pull.state is PullState.DONE


def test_what_may_come_in_part_is_committed_after_its_end() -> None:
    pull, runs = one_block()
    pull.note_chunk(0.0, 0, 5, runs, 0.1)
    pull.note_read()
    before = pull.may_commit
    pull.note_finished(0.0)
    assert (before, pull.may_commit) == (False, True)


def test_silence_ends_a_pull_and_patience_follows_the_prediction() -> None:
    pull, runs = one_block()
    pull.check_time(4.9)
    with pytest.raises(TransferError, match="silent"):
        pull.check_time(5.1)
    pull.note_chunk(1.0, 0, 5, runs, next_s=2.0)
    pull.check_time(5.9)
    with pytest.raises(TransferError, match="silent|stuck"):
        pull.check_time(8.1)


def test_waiting_in_a_queue_lasts_as_long_as_the_holder_turns() -> None:
    pull, _ = one_block(deadline=100.0)
    for second in range(90):
        pull.note_waiting(float(second), wait_s=60.0, num_turns=second)
        pull.check_time(second + 0.5)
    with pytest.raises(TransferError, match="time is up"):
        pull.check_time(100.0)


def test_a_holder_that_talks_without_turning_is_stuck() -> None:
    pull, _ = one_block()
    for second in range(5):
        pull.note_waiting(float(second), wait_s=1.0, num_turns=7)
        pull.check_time(second + 0.5)
    pull.note_waiting(5.0, wait_s=1.0, num_turns=7)
    with pytest.raises(TransferError, match="stuck"):
        pull.check_time(5.1)


def test_a_holder_whose_turns_are_long_is_not_stuck_in_one() -> None:
    pull, _ = one_block()
    for second in range(30):
        pull.note_waiting(float(second), wait_s=12.0, num_turns=7, turn_s=12.0)
        pull.check_time(second + 0.5)
    pull.note_waiting(38.0, wait_s=12.0, num_turns=7, turn_s=12.0)
    with pytest.raises(TransferError, match="stuck"):
        pull.check_time(38.1)


@given(st.floats(0, 3), st.floats(0, 100), st.integers(0, 3))
def test_the_next_check_is_never_after_the_first_problem(
    now: float, wait_s: float, num_turns: int
) -> None:
    pull, _ = one_block(deadline=50.0)
    pull.note_waiting(now, wait_s, num_turns)
    check = pull.next_check(now)
    assert check >= now
    pull.check_time(now)
    limit = now
    while limit < now + 20:
        try:
            pull.check_time(limit)
        except TransferError:
            break
        limit += 0.01
    assert check <= limit + 0.02


def test_a_holder_that_has_said_all_is_not_looked_after_while_reads_are_under_way() -> None:
    """However long they take: a check that is due already would be made without a pause."""
    pull, runs = one_block()
    pull.note_chunk(0.0, 0, 5, runs, next_s=0.1)
    pull.note_finished(0.1)
    pull.check_time(60.0)
    assert pull.next_check(60.0) == 65.0
