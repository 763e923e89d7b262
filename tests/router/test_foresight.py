"""Predictions against what came of them."""

from random import Random

import pytest

from router.admission import Refused
from router.foresight import KEPT_S, NUM_KEPT, Foresight

OBJECTIVE_S = 1.0


def seen(foresight: Foresight, predicted_s: float, ratio: float, at: float, num: int = 20) -> float:
    """So many that came after so many times what was predicted; when the last of them did."""
    for number in range(num):
        foresight.expect(str(number), predicted_s, at)
        foresight.came(str(number), at + ratio * predicted_s)
    return at + ratio * predicted_s


def most_admitted_s(foresight: Foresight, now: float) -> float:
    admitted = 0.0
    for hundredths in range(1, 301):
        try:
            foresight.check(hundredths / 100, now)
        except Refused:
            break
        admitted = hundredths / 100
    return admitted


def test_a_prediction_is_believed_until_something_else_is_seen() -> None:
    assert most_admitted_s(Foresight(OBJECTIVE_S), 0.0) == 1.0


def test_what_comes_twice_as_late_is_admitted_half_as_far() -> None:
    foresight = Foresight(OBJECTIVE_S)
    now = seen(foresight, 0.8, 2.0, 0.0)
    assert most_admitted_s(foresight, now) == 0.5
    with pytest.raises(Refused) as refused:
        foresight.check(2.0, now)
    assert refused.value.predicted_s == 4.0
    assert refused.value.retry_after_s == 3.0


def test_what_comes_sooner_is_admitted_no_further() -> None:
    foresight = Foresight(OBJECTIVE_S)
    now = seen(foresight, 0.8, 0.8, 0.0)
    assert most_admitted_s(foresight, now) == 1.0


@pytest.mark.parametrize(
    ("predicted_s", "num"), [(0.1, NUM_KEPT), (0.8, 3)], ids=["far from it", "too few"]
)
def test_what_says_nothing_changes_nothing(predicted_s: float, num: int) -> None:
    foresight = Foresight(OBJECTIVE_S)
    now = seen(foresight, predicted_s, 3.0, 0.0, num)
    assert most_admitted_s(foresight, now) == 1.0


def test_a_bad_time_is_forgotten() -> None:
    """Else nothing would be admitted from which it could be seen that it is over."""
    foresight = Foresight(OBJECTIVE_S)
    now = seen(foresight, 0.8, 5.0, 0.0)
    assert most_admitted_s(foresight, now + KEPT_S - 0.1) == 0.2
    assert most_admitted_s(foresight, now + KEPT_S + 0.1) == 1.0


def test_what_never_came_is_not_counted() -> None:
    foresight = Foresight(OBJECTIVE_S)
    for number in range(20):
        foresight.expect(str(number), 0.9, 0.0)
        foresight.forget(str(number))
        foresight.came(str(number), 9.0)
    assert most_admitted_s(foresight, 9.0) == 1.0


def test_most_of_what_is_admitted_keeps_the_objective() -> None:
    """Each comes when it was predicted, times a number that nobody knows."""
    random, foresight = Random(1), Foresight(OBJECTIVE_S)
    now, kept = 0.0, []
    for number in range(2000):
        now += 0.05
        predicted_s = random.uniform(0.1, 2.0)
        try:
            foresight.check(predicted_s, now)
        except Refused:
            continue
        actual_s = predicted_s * random.lognormvariate(0.3, 0.25)
        foresight.expect(str(number), predicted_s, now)
        foresight.came(str(number), now + actual_s)
        kept.append(actual_s <= OBJECTIVE_S)
    assert sum(kept[100:]) > 0.95 * len(kept[100:])
    assert len(kept) > 400
