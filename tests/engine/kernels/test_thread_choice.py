"""More threads repeat a step only where they take enough off it, as it is now."""

from collections.abc import Callable

import pytest

from engine.kernels.cpu.thread_choice import LATEST, SOONEST, TRIAL, WARMING, WORTH, ThreadChoice

A_TRIAL = WARMING + TRIAL
Took = Callable[[int], int]


def _run(choice: ThreadChoice, took: Took, runs: int) -> list[int]:
    """The numbers of threads that were asked for."""
    numbers = []
    for _ in range(runs):
        numbers.append(choice.number)
        choice.note(took(choice.number))
    return numbers


def _shared(threads: int) -> int:
    return 10_000 // threads


def _alone(threads: int) -> int:
    return 10_000


def test_threads_that_share_the_work_stay() -> None:
    numbers = _run(ThreadChoice(2), _shared, 1000)
    assert numbers[:SOONEST] == [2] * SOONEST
    assert numbers[SOONEST : SOONEST + A_TRIAL] == [1] * A_TRIAL
    assert numbers[SOONEST + A_TRIAL] == 2
    assert numbers.count(1) == 4 * A_TRIAL  # after 32 runs, 64, 128 and 256 more


def test_threads_that_only_wait_for_each_other_go() -> None:
    numbers = _run(ThreadChoice(2), _alone, 1000)
    assert numbers[SOONEST : 2 * SOONEST] == [1] * SOONEST


@pytest.mark.parametrize(("share", "left"), [(WORTH + 0.01, 1), (WORTH - 0.01, 2)])
def test_twice_as_many_must_take_a_fifth_off(share: float, left: int) -> None:
    choice = ThreadChoice(2)
    _run(choice, lambda threads: round(10_000 * (share if threads == 2 else 1)), 200)
    assert choice.number == left


def test_the_best_of_many_is_found_and_found_again_when_it_changes() -> None:
    choice = ThreadChoice(12)
    _run(choice, lambda threads: 10_000 // min(threads, 4), 400)
    assert choice.number == 4
    _run(choice, _shared, 3 * LATEST)
    assert _run(choice, _shared, 2 * A_TRIAL).count(12) >= A_TRIAL
    _run(choice, _alone, 6 * LATEST)
    assert choice.number == 1


def test_trials_become_seldom_where_nothing_changes() -> None:
    choice = ThreadChoice(2)
    _run(choice, _shared, 3 * LATEST)
    assert _run(choice, _shared, 2 * LATEST).count(1) <= 2 * A_TRIAL


def test_a_few_slow_runs_change_nothing() -> None:
    """Of a trial, of the runs that it is compared with, and where the caches have to move."""
    choice, turns = ThreadChoice(2), iter(range(10_000))

    def took(threads: int) -> int:
        return _shared(threads) * (20 if next(turns) % 4 == 0 else 1)

    _run(choice, took, 3000)
    assert choice.number == 2


def test_one_thread_is_never_tried_against_another() -> None:
    assert set(_run(ThreadChoice(1), _alone, 500)) == {1}
