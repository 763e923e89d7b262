"""What the scheduler promises to whoever carries a prompt's cache, case by case."""

from collections.abc import Sequence as Seq
from itertools import pairwise

import pytest

from engine.errors import RequestError, StepError
from engine.handoff import (
    ComputeHere,
    Delivered,
    FetchFailed,
    FirstToken,
    PromptChunk,
    PromptEnd,
    Refetch,
    Reservation,
    UnfinishedReads,
)
from engine.request import ChoiceSoFar, HandOver, PromptTimes, RemotePrefix, RequestId
from engine.scheduler.draft import Draft
from engine.scheduler.outbox import HandOverNews
from engine.step_times import StepCosts
from kv_cache.events import KvEvent
from kv_cache.layout import KvGroup
from kv_cache.transfers import TransferHold
from tests.engine.scheduler.fake_runner import VOCAB, answer, digest
from tests.engine.scheduler.test_cases import report
from tests.engine.scheduler.test_scheduler import BLOCK, FULL, WINDOW, Bench

PROMPT = [i % 7 for i in range(4 * BLOCK + 3)]  # 35 tokens
R = RequestId("r")


def news_of(bench: Bench, name: str = "r", max_steps: int = 100) -> list[HandOverNews]:
    """Everything that is told of a prompt, until it is over."""
    told: list[HandOverNews] = []
    for _ in range(max_steps):
        output = bench.step()
        assert output is not None
        told += output.hand_overs.get(RequestId(name), ())
        if told and isinstance(told[-1], PromptEnd):
            return told
    raise AssertionError("no end")


def chunks_of(told: Seq[HandOverNews]) -> list[PromptChunk]:
    return [news for news in told if isinstance(news, PromptChunk)]


def drop(bench: Bench, told: Seq[HandOverNews]) -> None:
    for chunk in chunks_of(told):
        for hold in chunk.held.holds:
            bench.cache.transfers.drop(hold)
    bench.scheduler.check_integrity()


def held(bench: Bench) -> int:
    return sum(group.held for group in bench.cache.stats().groups)


def reserve(bench: Bench) -> Reservation:
    """What the next step reserves."""
    output = bench.step()
    assert output is not None
    (reservation,) = output.reservations
    return reservation


def fill(bench: Bench, reservation: Reservation) -> None:
    """As a transfer does."""
    tokens = list(reservation.token_ids)
    for group, first_entry, blocks in reservation.held.runs:
        for i, block in enumerate(blocks):
            start = (first_entry + i) * BLOCK
            bench.runner.cells[group, block] = [
                digest(tokens[: start + j + 1]) if start + j < len(tokens) else None
                for j in range(BLOCK)
            ]


def end(bench: Bench, reservation: Reservation, *args: object) -> None:
    output, _ = bench.scheduler.end_fetch(reservation, *args)  # type: ignore[arg-type]
    bench.take(output)


def first_tokens(*choices: int) -> list[FirstToken]:
    return [FirstToken(answer(PROMPT, 1, choice, 1)[0]) for choice in choices]


def test_chunks_end_with_blocks_and_the_last_with_the_prompt() -> None:
    bench = Bench(budget=10)
    bench.add("r", PROMPT, hand_over=HandOver())
    told = news_of(bench)
    assert [(c.held.start, c.held.end) for c in chunks_of(told)] == [
        (0, 8),
        (8, 16),
        (16, 24),
        (24, 35),
    ]
    assert told[-1] == PromptEnd((first_tokens(0)[0],), 0)
    assert not bench.scheduler.has_work
    assert bench.scheduler.stats().num_running == 0
    assert held(bench) == 5, "what was announced is its reader's"
    drop(bench, told)
    assert held(bench) == 0


def test_a_reader_gets_what_it_asked_for_and_what_is_cached_at_once() -> None:
    bench = Bench(budget=10)
    bench.add("warm", PROMPT[:24], max_tokens=1)
    bench.run()
    bench.add("r", PROMPT, hand_over=HandOver(first_token=8, draw=False))
    step = bench.scheduler.schedule()
    assert step is not None
    (chunk,) = chunks_of(bench.scheduler.take_news().hand_overs[R])
    assert (chunk.held.start, chunk.held.end) == (8, 24), "before anything is computed"
    output = bench.scheduler.complete(step, bench.runner.execute(step.plan))
    told = [chunk, *output.hand_overs[R], *news_of(bench)]
    assert [(c.held.start, c.held.end) for c in chunks_of(told)] == [(8, 24), (24, 32), (32, 35)]
    assert told[-1] == PromptEnd((), 24)
    drop(bench, told)


def test_what_a_step_has_written_is_read_while_its_tokens_are_drawn() -> None:
    bench = Bench(budget=len(PROMPT))
    bench.add("r", PROMPT, hand_over=HandOver(), prompt_logprobs=0)
    step = bench.scheduler.schedule()
    assert step is not None
    result = bench.runner.execute(step.plan)
    bench.scheduler.announce(step)
    (chunk,) = chunks_of(bench.scheduler.take_news().hand_overs[R])
    assert (chunk.held.start, chunk.held.end, chunk.prompt_logprobs) == (0, 35, ())
    assert bench.cache.match(bench.scheduler._new_names("").grow(PROMPT), 35).num_tokens == 0
    rest, last = bench.scheduler.complete(step, result).hand_overs[R]
    assert isinstance(rest, PromptChunk)
    assert (rest.held.start, rest.held.end, len(rest.prompt_logprobs)) == (35, 35, 34)
    assert isinstance(last, PromptEnd)
    drop(bench, [chunk, rest])
    assert held(bench) == 0


def test_a_step_that_fails_after_its_chunks_were_announced_names_nothing() -> None:
    bench = Bench(budget=len(PROMPT))
    bench.add("r", PROMPT, hand_over=HandOver())
    step = bench.scheduler.schedule()
    assert step is not None
    bench.scheduler.announce(step)
    told = bench.scheduler.take_news().hand_overs[R]
    output = bench.scheduler.fail(step, StepError("no more memory"))
    assert list(output.failures) == [R]
    assert R not in output.hand_overs
    assert held(bench) == 5, "what was announced is its reader's"
    assert bench.cache.match(bench.scheduler._new_names("").grow(PROMPT), 35).num_tokens == 0
    drop(bench, told)
    assert held(bench) == 0


def test_what_is_not_finite_is_not_found_again_while_a_reader_holds_it() -> None:
    bench = Bench(num_blocks=40, budget=2 * BLOCK)
    prompt = [*PROMPT, VOCAB - 1]
    bench.add("r", prompt, hand_over=HandOver())
    bench.runner.poison = VOCAB - 1
    told: list[HandOverNews] = []
    while "r" not in bench.failures:
        output = bench.step()
        assert output is not None
        told += output.hand_overs.get(R, ())
    assert len(chunks_of(told)) == 2
    bench.runner.poison = None
    bench.add("next", prompt, max_tokens=1)
    bench.run()
    assert report(bench, "next").num_cached_tokens == 0
    drop(bench, told)


def test_nothing_is_computed_where_all_is_cached_and_nothing_drawn() -> None:
    bench = Bench()
    bench.add("warm", PROMPT[:32], max_tokens=1)
    bench.run()
    steps = bench.num_steps
    bench.add("r", PROMPT[:32], hand_over=HandOver(draw=False))
    told = news_of(bench)
    assert bench.num_steps == steps
    assert [(c.held.start, c.held.end) for c in chunks_of(told)] == [(0, 32)]
    drop(bench, told)
    bench.add("r", PROMPT[:32], hand_over=HandOver())
    told = news_of(bench)
    assert bench.num_steps == steps + 1
    assert told[-1] == PromptEnd((FirstToken(answer(PROMPT[:32], 1, 0, 1)[0]),), 31)
    drop(bench, told)


def test_of_a_window_only_what_is_seen_later_is_announced() -> None:
    """The window is 11; from the last whole block's end, 32, tokens from 22 on are seen."""
    bench = Bench(groups=(FULL, WINDOW), num_blocks=20, budget=10)
    bench.add("r", PROMPT, hand_over=HandOver())
    told = news_of(bench)
    entries: list[list[int]] = [[], []]
    for chunk in chunks_of(told):
        for run in chunk.held.runs:
            entries[run.group] += range(run.first_entry, run.first_entry + len(run.blocks))
    assert entries == [[0, 1, 2, 3, 4], [2, 3, 4]]
    drop(bench, told)


def test_prompt_logprobs_come_with_the_chunks_each_once() -> None:
    bench = Bench(budget=10)
    bench.add("warm", PROMPT, max_tokens=1)
    bench.run()
    bench.add("r", PROMPT, hand_over=HandOver(), prompt_logprobs=0)
    told = news_of(bench)
    entries = [entry.token_id for chunk in chunks_of(told) for entry in chunk.prompt_logprobs]
    assert entries == PROMPT[1:]
    drop(bench, told)


def test_a_preempted_prompt_reads_no_cache_for_logprobs_that_it_has_not() -> None:
    """Of the last token of a block that is cached the next one's are still to come."""
    bench = Bench(budget=BLOCK - 1)
    bench.add("warm", PROMPT, max_tokens=1)
    bench.run()
    bench.add("r", PROMPT, hand_over=HandOver(), prompt_logprobs=0)
    output = bench.step()
    assert output is not None
    told = output.hand_overs[R]
    preempt(bench)
    told += news_of(bench)
    entries = [entry.token_id for chunk in chunks_of(told) for entry in chunk.prompt_logprobs]
    assert entries == PROMPT[1:]
    drop(bench, told)


@pytest.mark.parametrize("swap_blocks", [0, 40])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("groups", [(FULL,), (WINDOW,), (FULL, WINDOW)])
def test_a_preempted_prompt_announces_nothing_twice(
    groups: tuple[KvGroup, ...], prefix_caching: bool, swap_blocks: int
) -> None:
    bench = Bench(
        groups=groups,
        num_blocks=20,
        budget=5,
        swap_blocks=swap_blocks,
        prefix_caching=prefix_caching,
    )
    bench.add("r", PROMPT, hand_over=HandOver())
    told: list[HandOverNews] = []
    for _ in range(6):
        output = bench.step()
        assert output is not None
        told += output.hand_overs.get(R, ())
    kept = {hold: contents(bench, hold) for chunk in chunks_of(told) for hold in chunk.held.holds}
    assert kept
    preempt(bench)
    told += news_of(bench)
    ranges = [(chunk.held.start, chunk.held.end) for chunk in chunks_of(told)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == len(PROMPT)
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    assert all(contents(bench, hold) == cells for hold, cells in kept.items())
    drop(bench, told)
    assert held(bench) == 0


def contents(bench: Bench, hold: TransferHold) -> list[list[int | None]]:
    return [list(bench.runner.cells[hold.group, block]) for block in hold.blocks]


def preempt(bench: Bench, request_id: RequestId = R) -> None:
    """As if blocks had run out, in a step of which nothing is left but that."""
    draft = Draft(bench.scheduler.limits, BLOCK)
    bench.scheduler._service._preempt(bench.scheduler._roster[request_id].choices[0], draft)
    step = draft.finish(0)
    if step is not None:
        bench.take(bench.scheduler.complete(step, bench.runner.execute(step.plan)))


def test_a_prompt_that_waits_for_its_own_announcements_fails() -> None:
    """Without names it cannot find again what it has computed, and nobody else lets go."""
    bench = Bench(num_blocks=7, budget=8, prefix_caching=False)
    bench.add("r", PROMPT, hand_over=HandOver())
    output = bench.step()
    assert output is not None
    told = output.hand_overs[R]
    preempt(bench)
    bench.step()
    assert isinstance(bench.failures["r"], StepError)
    assert bench.step() is None
    drop(bench, told)
    assert held(bench) == 0


def test_of_prompts_that_wait_for_each_others_announcements_the_last_fails() -> None:
    bench = Bench(num_blocks=8, budget=8, prefix_caching=False, by_priority=True)
    last, first = RequestId("last"), RequestId("first")
    told: dict[RequestId, list[HandOverNews]] = {}
    for name, priority in ((last, 0), (first, -1)):
        bench.add(name, PROMPT, priority=priority, hand_over=HandOver())
        output = bench.step()
        assert output is not None
        told[name] = output.hand_overs[name]
        preempt(bench, name)
    bench.step()
    assert bench.failures.keys() == {"last"}
    assert bench.step() is None
    drop(bench, told[last])
    told[first] += news_of(bench, first)
    assert isinstance(told[first][-1], PromptEnd)
    drop(bench, told[first])
    assert held(bench) == 0


def test_a_prompt_that_waits_for_anothers_reader_does_not_fail() -> None:
    bench = Bench(num_blocks=7, budget=8, by_priority=True)
    bench.add("r", PROMPT, hand_over=HandOver())
    output = bench.step()
    assert output is not None
    told = output.hand_overs[R]
    preempt(bench)
    bench.add("read", [9] * 24, priority=-1, hand_over=HandOver())
    being_read = news_of(bench, "read")
    assert bench.step() is None
    assert not bench.failures
    drop(bench, being_read)
    told += news_of(bench)
    drop(bench, told)
    assert held(bench) == 0


def test_aborting_a_prompt_leaves_its_holds_to_the_reader() -> None:
    bench = Bench(budget=10)
    bench.add("r", PROMPT, hand_over=HandOver())
    output = bench.step()
    assert output is not None
    told = output.hand_overs[R]
    bench.scheduler.abort(R)
    assert held(bench) == 1
    drop(bench, told)
    assert held(bench) == 0


def stored(bench: Bench) -> list[KvEvent]:
    """What was told since it began, up to now."""
    bench.cache.events.flush()
    batches = bench.cache.events.since(0)
    assert isinstance(batches, list)
    return [event for batch in batches for event in batch.events]


@pytest.mark.parametrize("n", [1, 3])
def test_delivered_blocks_count_from_then_on(n: int) -> None:
    bench = Bench()
    bench.add("r", PROMPT, fetch_above=10, n=n, max_tokens=4)
    reservation = reserve(bench)
    assert (reservation.held.start, reservation.held.end) == (0, 35)
    assert not bench.scheduler.has_work
    assert bench.scheduler.stats().num_fetching == 1
    assert stored(bench) == list(bench.cache._tree.stored()) == [], "no name before its bytes"
    fill(bench, reservation)
    end(bench, reservation, Delivered(first_tokens(*range(n))))
    assert stored(bench) == list(bench.cache._tree.stored())
    assert len(stored(bench)) == 4
    assert all(len(bench.tokens["r", choice]) == 1 for choice in range(n))
    bench.run()
    for choice in range(n):
        assert bench.tokens["r", choice] == answer(PROMPT, 1, choice, 4)
    bench.add("again", PROMPT, fetch_above=10, max_tokens=1)
    bench.run()
    assert bench.tokens["again", 0] == answer(PROMPT, 1, 0, 1), "found, and computed here"


@pytest.mark.parametrize(("cached_there", "reported"), [(0, 0), (24, 24), (34, 34), (99, 34)])
def test_what_the_other_side_had_is_what_nobody_computed(cached_there: int, reported: int) -> None:
    """It computed the rest, also where that was cached here."""
    bench = Bench()
    bench.add("before", PROMPT[:17], max_tokens=1)
    bench.run()
    bench.add("r", PROMPT, fetch_above=0, max_tokens=2)
    reservation = reserve(bench)
    assert reservation.held.start == 16
    fill(bench, reservation)
    end(bench, reservation, Delivered(first_tokens(0), num_cached_tokens=cached_there))
    assert report(bench, "r").num_cached_tokens == reported


def apart(bench: Bench) -> tuple[Reservation, Reservation]:
    """Of a request with two choices, of which another worker has sent one token and two."""
    told = (answer(PROMPT, 1, choice, 3)[: choice + 1] for choice in range(2))
    sent = tuple(ChoiceSoFar(tokens) for tokens in told)
    bench.add("r", PROMPT, sent=sent, fetch_above=len(PROMPT), n=2, max_tokens=3)
    output = bench.step()
    assert output is not None
    first, second = output.reservations
    return first, second


def test_choices_that_went_apart_count_the_prompt_once() -> None:
    """The second finds in the cache what was pulled for the first."""
    bench = Bench(num_blocks=40)
    first, second = apart(bench)
    fill(bench, first)
    end(bench, first, Delivered())
    end(bench, second, ComputeHere())  # as if it came now
    bench.run()
    for choice in range(2):
        assert bench.tokens["r", choice] == answer(PROMPT, 1, choice, 3)[choice + 1 :]
    figures = bench.scheduler.figures()
    assert (figures.num_computed_tokens, figures.num_cached_tokens) == (0, 0)
    assert figures.num_pulled_tokens == len(PROMPT)
    assert report(bench, "r").num_cached_tokens == 0


def test_choices_that_went_apart_begin_with_the_first() -> None:
    """Also where its fetch comes to nothing, and the other's does not."""
    bench = Bench(num_blocks=40)
    first, second = apart(bench)
    end(bench, first, ComputeHere(), (), 1.0)
    fill(bench, second)
    times = PromptTimes(prefill_s=2.0)
    end(bench, second, Delivered(times=times), (), 3.0)
    step = bench.scheduler.schedule(3.0)
    assert step is not None
    bench.take(bench.scheduler.complete(step, bench.runner.execute(step.plan), 4.0))
    assert report(bench, "r").times == times


def test_without_first_tokens_the_last_one_is_computed_again() -> None:
    bench = Bench()
    bench.add("r", PROMPT, fetch_above=0, n=2, max_tokens=3)
    reservation = reserve(bench)
    fill(bench, reservation)
    end(bench, reservation, Delivered())
    step = bench.scheduler.schedule()
    assert step is not None
    (part,) = step.plan.slices
    assert (part.start, part.num_tokens, part.write_start) == (34, 1, 35)
    bench.take(bench.scheduler.complete(step, bench.runner.execute(step.plan)))
    bench.run()
    for choice in range(2):
        assert bench.tokens["r", choice] == answer(PROMPT, 1, choice, 3)


def test_a_window_that_ends_with_a_block_is_seen_by_the_last_token_too() -> None:
    """It sees one block more than the next one does."""
    narrow = KvGroup((0,), 1, (8, 8), window=BLOCK + 1)
    bench = Bench(groups=(narrow,))
    bench.add("r", PROMPT[: 4 * BLOCK], fetch_above=0, max_tokens=3)
    reservation = reserve(bench)
    assert [run.first_entry for run in reservation.held.runs] == [2]
    fill(bench, reservation)
    end(bench, reservation, Delivered())
    bench.run()
    assert bench.tokens["r", 0] == answer(PROMPT[: 4 * BLOCK], 1, 0, 3)


@pytest.mark.parametrize("drawn_there", [True, False])
def test_what_is_delivered_joins_the_next_step_that_is_planned_ahead(drawn_there: bool) -> None:
    """Steps that follow each other without an end would else leave it out for ever."""
    bench = Bench(num_blocks=40, ahead=True)
    bench.add("runs", [1], max_tokens=60, ignore_eos=True)
    bench.step()
    bench.add("r", PROMPT, fetch_above=0, max_tokens=4)
    reservation = reserve(bench)
    assert bench.in_flight is not None
    fill(bench, reservation)
    end(bench, reservation, Delivered(first_tokens(0) if drawn_there else ()))
    ahead = bench.num_steps_ahead
    for _ in range(5):
        bench.step()
    assert bench.num_steps_ahead == ahead + 5
    assert bench.tokens["r", 0] == answer(PROMPT, 1, 0, 4)


def deliver_choices(bench: Bench, delivered: Delivered) -> None:
    """Two of request r, while a step that was planned ahead is in flight."""
    bench.add("runs", [1], max_tokens=60, ignore_eos=True)
    bench.step()
    bench.add("r", PROMPT, fetch_above=0, n=2, max_tokens=5)
    bench.step()  # what was in flight ends before choices are admitted
    reservation = reserve(bench)
    bench.step()
    assert bench.in_flight is not None
    fill(bench, reservation)
    end(bench, reservation, delivered)


@pytest.mark.parametrize("drawn_there", [True, False])
def test_choices_that_are_delivered_join_a_batch_that_is_planned_ahead(drawn_there: bool) -> None:
    """They share a block that both are about to write."""
    bench = Bench(num_blocks=40, ahead=True)
    deliver_choices(bench, Delivered(first_tokens(0, 1) if drawn_there else ()))
    bench.run()
    for choice in range(2):
        assert bench.tokens["r", choice] == answer(PROMPT, 1, choice, 5)
    assert bench.tokens["runs", 0] == answer([1], 1, 0, 60)


def test_a_choice_that_is_stopped_before_it_is_forked_leaves_the_other_its_own() -> None:
    bench = Bench(num_blocks=40, ahead=True)
    deliver_choices(bench, Delivered())
    bench.step()
    bench.scheduler.stop_choice(R, 0)
    bench.run()
    assert bench.tokens["r", 1] == answer(PROMPT, 1, 1, 5)


def test_a_fetch_that_comes_to_nothing_is_tried_again_or_computed_here() -> None:
    bench = Bench()
    bench.add("r", PROMPT, fetch_above=0, max_tokens=3)
    first = reserve(bench)
    end(bench, first, Refetch())
    second = reserve(bench)
    assert second.attempt != first.attempt
    end(bench, second, ComputeHere())
    bench.run()
    assert bench.tokens["r", 0] == answer(PROMPT, 1, 0, 3)
    with pytest.raises(AssertionError, match="once"):
        end(bench, first, Delivered())


def test_a_prompt_whose_fetch_came_to_nothing_is_as_cached_as_if_it_came_then() -> None:
    bench = Bench(num_blocks=40)
    bench.add("r", PROMPT, fetch_above=0, max_tokens=1)
    reservation = reserve(bench)
    bench.add("meanwhile", PROMPT, max_tokens=1)
    bench.run()
    end(bench, reservation, ComputeHere())
    bench.run()
    assert report(bench, "r").num_cached_tokens == 32
    figures = bench.scheduler.figures()
    assert (figures.num_computed_tokens, figures.num_cached_tokens) == (len(PROMPT) + 3, 32)


def test_what_may_still_be_written_stays_in_quarantine() -> None:
    bench = Bench()
    bench.add("r", PROMPT, fetch_above=0, max_tokens=1)
    reservation = reserve(bench)
    stuck = reservation.held.runs[0].blocks[1:3]
    failed = FetchFailed(StepError("no"))
    output, holds = bench.scheduler.end_fetch(reservation, failed, [UnfinishedReads(0, stuck)])
    assert set(output.failures) == {"r"}
    bench.scheduler.check_integrity()
    assert bench.cache.stats().groups[0].quarantined == 2
    assert held(bench) == 0
    (hold,) = holds
    bench.cache.transfers.end_quarantine(hold)
    assert bench.cache.stats().groups[0].quarantined == 0


def test_an_aborted_fetch_keeps_its_blocks_until_it_is_ended() -> None:
    bench = Bench()
    bench.add("r", PROMPT, fetch_above=0, n=2)
    reservation = reserve(bench)
    bench.scheduler.abort(R)
    bench.scheduler.check_integrity()
    assert held(bench) == 5
    assert bench.scheduler.num_fetching == 0
    end(bench, reservation, Delivered(first_tokens(0, 1)))
    assert held(bench) == 0
    assert not bench.tokens


def test_a_stopped_choice_leaves_the_fetch_to_its_sibling() -> None:
    bench = Bench()
    bench.add("r", PROMPT, fetch_above=0, n=2, max_tokens=3)
    reservation = reserve(bench)
    bench.scheduler.stop_choice(R, 0)
    fill(bench, reservation)
    end(bench, reservation, Delivered(first_tokens(0, 1)))
    bench.run()
    assert bench.tokens == {("r", 1): answer(PROMPT, 1, 1, 3)}


@pytest.mark.parametrize(
    "wrong",
    [
        Delivered(first_tokens(0)),
        Delivered(first_tokens(0, 1, 2)),
        Delivered([FirstToken(VOCAB), FirstToken(0)]),
        Delivered(first_tokens(0, 1), [None]),  # type: ignore[list-item]
    ],
)
def test_what_was_not_asked_for_fails_the_request(wrong: Delivered) -> None:
    bench = Bench()
    bench.add("r", PROMPT, fetch_above=0, n=2)
    end(bench, reserve(bench), wrong)
    assert isinstance(bench.failures["r"], StepError)
    assert held(bench) == 0


def test_the_first_in_line_waits_for_blocks_that_are_being_filled() -> None:
    """It keeps what it has computed, and goes on when the others have theirs."""
    bench = Bench(num_blocks=8)
    bench.add("runs", [5] * 14, max_tokens=20)
    bench.step()
    bench.add("r", PROMPT[:30], fetch_above=0, max_tokens=1)
    reservation = reserve(bench)
    for _ in range(30):
        if bench.step() is None:
            break
    else:
        raise AssertionError("it found blocks")
    assert bench.scheduler.has_work
    assert bench.scheduler.stats().num_preemptions == 0
    end(bench, reservation, FetchFailed(StepError("no")))
    bench.run()
    assert bench.tokens["runs", 0] == answer([5] * 14, 1, 0, 20)


def test_nobody_takes_the_blocks_that_the_first_in_line_waits_for() -> None:
    """Its next chunk needs three and two are there, of which somebody could begin with one: he
    would be preempted again and again."""
    slow = StepCosts(0.0, 1 / 8, 0.0, 0.0, 0.0)
    bench = Bench(groups=(WINDOW,), num_blocks=9, max_pause_s=1.0, costs=slow)
    prompts = {"first": [1] * 60, "small": [3] * 7}
    bench.add("first", prompts["first"], max_tokens=1)
    bench.add("fetched", PROMPT[:30], fetch_above=0, max_tokens=1)
    bench.add("fetched too", [2] * 7, fetch_above=0, max_tokens=1)
    output = bench.step()
    assert output is not None
    assert len(output.reservations) == 2
    bench.costs = None
    bench.add("small", prompts["small"], max_tokens=1)
    (group,) = bench.cache.stats().groups
    assert group.free == 2
    assert bench.step() is None
    for reservation in output.reservations:
        end(bench, reservation, FetchFailed(StepError("no")))
    bench.run()
    for name, prompt in prompts.items():
        assert bench.tokens[name, 0] == answer(prompt, 1, 0, 1)


def test_what_was_to_be_copied_in_the_step_of_its_preemption_is_computed_again() -> None:
    """Two choices are about to write to the block that they share when a prompt that goes first
    wants blocks. What is swapped out is read before anything is copied."""
    bench = Bench(groups=(WINDOW,), num_blocks=9, swap_blocks=10, by_priority=True)
    urgent = [i % 5 for i in range(60)]
    prefix = RemotePrefix(3 * BLOCK)
    bench.add("urgent", urgent, priority=-1, prefix=prefix, max_tokens=2, ignore_eos=True)
    bench.add("fetched", PROMPT[:30], fetch_above=0, max_tokens=1)
    bench.add("r", [1] * 12, n=2, max_tokens=9, ignore_eos=True)
    output = bench.step()
    assert output is not None
    of_urgent, of_fetched = output.reservations
    fill(bench, of_urgent)
    end(bench, of_urgent, Delivered())
    bench.step()
    stats = bench.scheduler.stats()
    assert (stats.num_preemptions, stats.num_running, stats.num_swapped_blocks) == (2, 1, 2)
    end(bench, of_fetched, FetchFailed(StepError("no")))
    bench.run()
    assert bench.tokens["urgent", 0] == answer(urgent, 1, 0, 2)
    for choice in range(2):
        assert bench.tokens["r", choice] == answer([1] * 12, 1, choice, 9)


def test_what_is_cached_is_held_for_a_reader() -> None:
    bench = Bench(groups=(FULL, WINDOW), num_blocks=20)
    bench.add("warm", PROMPT, max_tokens=1)
    bench.run()
    found = bench.scheduler.hold_cached(PROMPT, "", 8)
    assert (found.start, found.end) == (8, 32)
    assert [(run.group, run.first_entry, len(run.blocks)) for run in found.runs] == [
        (0, 1, 3),
        (1, 2, 2),
    ]
    bench.cache.reset()
    bench.scheduler.check_integrity()
    assert held(bench) == 5
    for hold in found.holds:
        bench.cache.transfers.drop(hold)
    assert held(bench) == 0
    nothing = bench.scheduler.hold_cached(PROMPT, "another", 8)
    assert (nothing.start, nothing.end, nothing.holds) == (8, 8, ())


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("first_token", {"hand_over": HandOver(first_token=3)}),
        ("first_token", {"hand_over": HandOver(first_token=40)}),
        ("first_token", {"hand_over": HandOver(first_token=-8)}),
        ("first_token", {"hand_over": HandOver(first_token="0")}),  # type: ignore[arg-type]
        ("n", {"hand_over": HandOver(), "n": 5}),
        ("fetch_above", {"hand_over": HandOver(), "fetch_above": 0}),
        ("fetch_above", {"fetch_above": -1}),
        ("fetch_above", {"fetch_above": "all"}),
        ("sent", {"hand_over": HandOver(), "sent": (ChoiceSoFar([1]),)}),
        ("sent", {"sent": (ChoiceSoFar([1]), ChoiceSoFar([1]))}),
        ("sent", {"sent": (ChoiceSoFar([VOCAB]),)}),
        ("sent", {"sent": (ChoiceSoFar(["a"]),)}),  # type: ignore[list-item]
        ("sent", {"sent": (ChoiceSoFar([1], finished=True),)}),
        ("sent", {"sent": (ChoiceSoFar([1, 2, 3]),), "max_tokens": 3}),
    ],
)
def test_what_cannot_be_is_refused(field: str, wrong: dict[str, object]) -> None:
    bench = Bench()
    with pytest.raises(RequestError) as caught:
        bench.add("r", PROMPT, **wrong)  # type: ignore[arg-type]
    assert caught.value.field == field
    assert not bench.scheduler.has_work


def test_without_a_draw_neither_choices_nor_the_answers_length_count() -> None:
    bench = Bench(num_blocks=8, max_num_seqs=1)
    bench.add("r", PROMPT, hand_over=HandOver(draw=False), n=100, max_tokens=1000)
    drop(bench, news_of(bench))
