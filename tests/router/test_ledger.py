"""What was given is counted until it is done, exactly once, whatever the reports say."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.judging import SILENT_AFTER_S
from router.ledger import FIRST_STALL_S, STALL_S, Account, Ledger
from router.prompt_queue import Prompt, PromptQueue
from router.seats import GRACE_S, Pace, Seat, Seats
from router.workers import Leg, Load, StepCosts, Worker

TOKEN_S = 0.001
COSTS = StepCosts(0.01, TOKEN_S, 0.0, 1e-6, 1e-4)


def prompt(num_tokens: int) -> Prompt:
    return Prompt(num_tokens, num_tokens * TOKEN_S)


def test_the_first_one_is_in_progress_and_the_others_are_not() -> None:
    queue = PromptQueue()
    queue.give("a", prompt(1000), 10.0)
    queue.give("b", prompt(500), 10.0)
    assert queue.left_s(10.4) == pytest.approx(1.1)
    # However long `a` takes, `b` has not begun before it is done.
    assert queue.left_s(99.0) == pytest.approx(0.5)
    queue.release("a", 99.0)
    assert queue.left_s(99.2) == pytest.approx(0.3)
    queue.release("b", 99.4)
    assert queue.left_s(99.4) == 0


def test_what_the_report_counts_beyond_ours_is_others() -> None:
    queue = PromptQueue()
    queue.give("a", prompt(1000), 10.0)
    queue.report(1000, TOKEN_S, 10.0)  # that is ours
    assert queue.left_s(10.0) == pytest.approx(1.0)
    queue.report(3000, TOKEN_S, 10.0)
    assert queue.left_s(10.0) == pytest.approx(3.0)
    assert queue.left_s(11.0) == pytest.approx(2.0)  # drained by the time


def test_a_report_that_does_not_count_ours_yet_takes_nothing_away() -> None:
    queue = PromptQueue()
    queue.give("a", prompt(1000), 10.0)
    queue.report(0, TOKEN_S, 10.01)
    assert queue.left_s(10.01) == pytest.approx(0.99)


def test_what_is_given_after_a_report_comes_on_top_of_it() -> None:
    queue = PromptQueue()
    queue.report(2000, TOKEN_S, 10.0)
    queue.give("a", prompt(1000), 10.5)
    assert queue.left_s(10.5) == pytest.approx(2.5)


def test_an_idle_time_earns_nothing() -> None:
    queue = PromptQueue()
    queue.report(100, TOKEN_S, 10.0)
    queue.give("a", prompt(1000), 50.0)
    assert queue.left_s(50.0) == pytest.approx(1.0)


def test_what_was_aborted_before_it_was_computed_is_no_work() -> None:
    queue = PromptQueue()
    queue.give("a", prompt(1000), 10.0)
    queue.give("b", prompt(5000), 10.0)
    queue.release("b", 10.0)
    assert queue.left_s(10.0) == pytest.approx(1.0)


def test_who_is_done_sooner_than_expected_leaves_nothing_behind() -> None:
    queue = PromptQueue()
    queue.give("a", prompt(6000), 10.0)
    queue.give("b", prompt(1000), 10.0)
    queue.report(9000, TOKEN_S, 10.0)  # 2000 of them are others'
    queue.release("a", 11.0)
    # Of 9 s the one that has passed is gone, and the five that `a` did not take.
    assert queue.left_s(11.0) == pytest.approx(3.0)


def seat(num_sequences: int, num_tokens: int, given: float) -> Seat:
    return Seat(num_sequences, float(num_tokens), num_tokens, given)


def load(at: float, **facts: float) -> Load:
    return Load(at, **{"num_free_tokens": 1000, "num_total_tokens": 1000, **facts})  # type: ignore[arg-type]


def test_sequences_of_others_show_in_the_report() -> None:
    seats = Seats()
    seats.take("a", seat(2, 300, 1.0))
    seats.report(load(5.0, num_running=5, num_context_tokens=1000, num_free_tokens=700))
    assert (seats.num_sequences, seats.num_context_tokens) == (5, 1000)
    seats.release("a", 5.0)
    assert (seats.num_sequences, seats.num_context_tokens) == (3, 700)


def test_who_has_just_left_is_nobody_else() -> None:
    seats = Seats()
    for name in "ab":
        seats.take(name, seat(1, 300, 1.0))
    seats.release("a", 5.0 - GRACE_S / 2)  # after the worker had counted, maybe
    seats.release("b", 4.0)
    seats.report(load(5.0, num_running=2, num_context_tokens=600))
    assert (seats.num_sequences, seats.num_context_tokens) == (1, 300)
    seats.report(load(5.25, num_running=2, num_context_tokens=600))
    assert (seats.num_sequences, seats.num_context_tokens) == (2, 600)


def test_room_is_taken_before_the_report_says_so() -> None:
    seats = Seats()
    seats.report(load(5.0))
    seats.take("a", seat(1, 300, 5.1))
    assert seats.num_free_tokens == 700
    seats.report(load(5.1 + GRACE_S / 2))  # too soon to count it
    assert seats.num_free_tokens == 700
    seats.report(load(6.0, num_free_tokens=700, num_running=1))
    assert seats.num_free_tokens == 700
    seats.release("a", 6.0)
    assert seats.num_free_tokens == 1000


def account(**facts: int) -> Account:
    one = Account(Leg.PREFILL, Worker("w", 1, "f"), COSTS)
    one.note(load(10.0, **facts), COSTS)
    return one


def test_silence() -> None:
    one = account()
    assert one.takes_new(10.0 + SILENT_AFTER_S)
    assert not one.takes_new(10.1 + SILENT_AFTER_S)
    assert not Account(Leg.PREFILL, Worker("w", 1, "f"), COSTS).takes_new(10.0)


def test_answers_without_steps_are_a_stall() -> None:
    one = account(num_steps=7)
    one.note(load(12.0, num_steps=7, still_s=STALL_S), COSTS)
    assert one.takes_new(12.0)
    one.note(load(12.1, num_steps=7, still_s=STALL_S + 0.1), COSTS)
    assert not one.takes_new(12.1)
    one.note(load(12.2, num_steps=8), COSTS)
    assert one.takes_new(12.2)


@pytest.mark.parametrize("work", [{"num_running": 1}, {"num_queued_tokens": 5}])
def test_work_that_waits_for_blocks_is_no_stall(work: dict[str, int]) -> None:
    """A long prefix that is pulled over a slow link: its worker says that it is not stuck."""
    one = account(num_steps=7, num_fetching=1, **work)
    one.note(load(30.0, num_steps=7, num_fetching=1, **work), COSTS)
    assert one.takes_new(30.0)


def test_a_step_that_takes_long_is_no_stall() -> None:
    """2,048 tokens of a prompt take 2.06 s there, and three times that is not too much."""
    facts = {"num_running": 1, "max_step_tokens": 2048}
    one = account(num_steps=7, **facts)
    longest_s = 0.01 + 2048 * TOKEN_S
    for still_s, takes in ((STALL_S + 0.1, True), (3 * longest_s, True), (4 * longest_s, False)):
        one.note(load(10.0 + still_s, num_steps=7, still_s=still_s, **facts), COSTS)
        assert one.takes_new(10.0 + still_s) is takes


@pytest.mark.parametrize("num_steps", [0, 7])
def test_a_step_that_its_worker_says_takes_long_is_no_stall(num_steps: int) -> None:
    """A first chunk, or one that attends to a very long prompt before it: 40 s."""
    facts = {"num_running": 1, "max_step_tokens": 2048, "num_steps": num_steps}
    one = account(**facts)
    for still_s, takes in ((40.0, True), (120.0, True), (122.0, False)):
        one.note(load(10.0 + still_s, step_s=40.0, still_s=still_s, **facts), COSTS)
        assert one.takes_new(10.0 + still_s) is takes
    one.note(load(10.0 + 122.5, step_s=1.0, num_running=1, num_steps=num_steps + 1), COSTS)
    facts = {"num_running": 1, "num_steps": num_steps + 1}
    one.note(load(140.0, still_s=2 * FIRST_STALL_S, **facts), COSTS)
    assert not one.takes_new(140.0), "what it was at before is over"


def test_nobody_knows_how_long_a_first_step_takes() -> None:
    one = account(num_steps=0, num_running=1)
    one.note(load(19.9, num_steps=0, num_running=1, still_s=FIRST_STALL_S - 0.1), COSTS)
    assert one.takes_new(19.9)
    one.note(load(20.1, num_steps=0, num_running=1, still_s=FIRST_STALL_S + 0.1), COSTS)
    assert not one.takes_new(20.1)


def test_who_has_nothing_to_do_makes_no_steps() -> None:
    one = account(num_steps=7)
    one.note(load(30.0, num_steps=7, num_fetching=3), COSTS)
    assert one.takes_new(30.0)


def test_a_worker_knows_best_that_it_is_stuck() -> None:
    """Its engine may hang with requests that no count has seen."""
    one = account(num_steps=7)
    one.note(load(10.5, num_steps=7, still_s=STALL_S + 0.1), COSTS)
    assert not one.takes_new(10.5)
    assert one.still_s == STALL_S + 0.1
    one.note(load(10.6, num_steps=8), COSTS)
    assert one.takes_new(10.6)


IDS = st.sampled_from("abcdef")
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["give", "began", "ended", "remove", "report", "wait"]),
        IDS,
        st.integers(0, 2),
        st.integers(0, 2),
        st.integers(1, 5000),
    ),
    max_size=60,
)


class Oracle:
    """What is where, kept in the most obvious way."""

    def __init__(self) -> None:
        self.seats: dict[str, tuple[int, int]] = {}  # request: decode worker and tokens
        self.prompts: dict[str, tuple[int, int]] = {}

    def at(self, where: dict[str, tuple[int, int]], worker: int) -> list[int]:
        return [num for at, num in where.values() if at == worker]


@given(EVENTS)
@settings(max_examples=150)
def test_nothing_is_lost_and_nothing_counts_twice(
    events: list[tuple[str, str, int, int, int]],
) -> None:
    ledger, oracle, now = Ledger(), Oracle(), 100.0
    workers = {leg: [Worker(f"{leg}{i}", i, "f") for i in range(3)] for leg in Leg}
    for leg in Leg:
        for worker in workers[leg]:
            ledger.add(leg, worker)

    def account_of(leg: Leg, i: int) -> Account:
        return ledger.accounts[leg][workers[leg][i]]

    for kind, request_id, i, j, num in events:
        now += 0.1
        if kind == "give" and request_id not in ledger:
            decode, computing = account_of(Leg.DECODE, j), account_of(Leg.PREFILL, i)
            ledger.give(request_id, decode, seat(1, num, now), computing, prompt(num))
            oracle.seats[request_id] = (j, num)
            oracle.prompts[request_id] = (i, num)
        elif kind == "began":
            ledger.began(request_id, now)
            oracle.prompts.pop(request_id, None)
        elif kind == "ended":
            ledger.ended(request_id, now)
            oracle.prompts.pop(request_id, None)
            oracle.seats.pop(request_id, None)
        elif kind == "remove":
            ledger.remove(Leg.PREFILL, workers[Leg.PREFILL][i])
            ledger.add(Leg.PREFILL, workers[Leg.PREFILL][i])
            oracle.prompts = {r: p for r, p in oracle.prompts.items() if p[0] != i}
        elif kind == "report":
            ledger.note(Leg.PREFILL, workers[Leg.PREFILL][i], load(now, num_queued_tokens=num))
        for one in range(3):
            prompts = account_of(Leg.PREFILL, one).prompts
            tokens = oracle.at(oracle.prompts, one)
            assert (len(prompts), prompts.num_tokens) == (len(tokens), sum(tokens))
            # All but the first in line has not been begun.
            assert prompts.left_s(now) >= (sum(tokens) - max(tokens, default=0)) * TOKEN_S - 1e-9
            seats = account_of(Leg.DECODE, one).seats
            held = oracle.at(oracle.seats, one)
            assert (seats.num_sequences, seats.num_context_tokens) == (len(held), sum(held))
    for request_id in "abcdef":
        ledger.ended(request_id, now)
    assert len(ledger) == 0
    for i in range(3):
        prompts, seats = account_of(Leg.PREFILL, i).prompts, account_of(Leg.DECODE, i).seats
        assert (len(prompts), prompts.num_tokens) == (0, 0)
        assert (len(seats), seats.num_sequences, seats.num_context_tokens) == (0, 0, 0)
        assert prompts.left_s(now + 100) == 0


def test_steps_are_as_slow_as_an_answer_sees_them() -> None:
    """Three steps of 10 ms and one of 90, which takes three quarters of the time: 30 ms each."""
    pace = Pace()
    num_steps, at = 0, 0.0
    for _ in range(200):
        for steps, seconds in ((3, 0.03), (1, 0.09)):
            num_steps, at = num_steps + steps, at + seconds
            pace.hear(load(at, num_running=4, num_steps=num_steps), 0.01)
    assert pace.step_s == pytest.approx(0.03, rel=0.05)
    assert pace.slowness == pytest.approx(3.0, rel=0.05)


def test_steps_are_not_slow_because_of_a_pause_without_work() -> None:
    pace = Pace()
    for at, num_running, num_steps in ((0.0, 2, 1), (0.1, 0, 11), (9.0, 2, 12), (9.1, 2, 22)):
        pace.hear(load(at, num_running=num_running, num_steps=num_steps), 0.01)
    assert pace.step_s == pytest.approx(0.01)
    assert pace.slowness == 1.0
