"""Predictions against what came of them."""

from collections import deque
from random import Random

import pytest

from router.admission import Refused
from router.foresight import FADE_S, Foresight

OBJECTIVE_S = 1.0


def seen(foresight: Foresight, predicted_s: float, ratio: float, at: float, num: int) -> float:
    """So many that came after so many times what was predicted; when the last of them did."""
    for number in range(num):
        foresight.expect(str(number), predicted_s, at)
        foresight.came(str(number), at + ratio * predicted_s)
    return at + ratio * predicted_s


def is_admitted(foresight: Foresight, predicted_s: float, now: float) -> bool:
    try:
        foresight.check(predicted_s, now)
    except Refused:
        return False
    return True


def test_a_prediction_is_believed_until_something_else_is_seen() -> None:
    foresight = Foresight(OBJECTIVE_S)
    assert is_admitted(foresight, 1.0, 0.0)
    assert not is_admitted(foresight, 1.01, 0.0)


def test_after_late_ones_less_is_admitted() -> None:
    foresight = Foresight(OBJECTIVE_S)
    now = seen(foresight, 0.8, 2.0, 0.0, 8)
    assert not is_admitted(foresight, 0.8, now)
    assert is_admitted(foresight, 0.4, now)
    with pytest.raises(Refused) as refused:
        foresight.check(2.0, now)
    assert refused.value.predicted_s == pytest.approx(2.0 * foresight.factor(now))
    assert refused.value.retry_after_s == pytest.approx(2.0 * foresight.factor(now) - 1.0)


def test_what_comes_sooner_is_admitted_no_further() -> None:
    foresight = Foresight(OBJECTIVE_S)
    now = seen(foresight, 0.8, 0.5, 0.0, 100)
    assert foresight.factor(now) == 1.0


def test_what_could_hardly_be_late_says_nothing_by_being_in_time() -> None:
    foresight = Foresight(OBJECTIVE_S)
    seen(foresight, 0.8, 2.0, 0.0, 8)
    factor = foresight.factor(2.0)
    foresight.expect("near", 0.4, 2.0)
    for number in range(100):
        foresight.expect(str(number), 0.01, 2.0)
        foresight.came(str(number), 2.0)
    assert foresight.factor(2.0) == factor
    foresight.came("near", 2.0)
    assert foresight.factor(2.0) < factor


def test_what_was_known_to_be_late_says_nothing_by_being_late() -> None:
    foresight = Foresight(OBJECTIVE_S)
    now = seen(foresight, 3.0, 1.0, 0.0, 20)
    assert foresight.factor(now) == 1.0


def test_a_bad_time_is_forgotten() -> None:
    """Else nothing would be admitted from which it could be seen that it is over."""
    foresight = Foresight(OBJECTIVE_S)
    now = seen(foresight, 0.8, 5.0, 0.0, 100)
    assert not is_admitted(foresight, 0.2, now)
    assert not is_admitted(foresight, 0.9, now + FADE_S)
    assert is_admitted(foresight, 0.9, now + 5 * FADE_S)


def test_what_never_came_is_not_counted() -> None:
    foresight = Foresight(OBJECTIVE_S)
    for number in range(20):
        foresight.expect(str(number), 0.9, 0.0)
        foresight.forget(str(number))
        foresight.came(str(number), 9.0)
    assert foresight.factor(9.0) == 1.0


@pytest.mark.parametrize("bias", [0.0, 0.3, 0.7], ids=["right", "too low", "far too low"])
def test_most_of_what_is_admitted_keeps_the_objective_and_most_of_what_would_is(
    bias: float,
) -> None:
    """Each comes when it was predicted, times a number that nobody knows, and is heard of then."""
    random, foresight = Random(1), Foresight(OBJECTIVE_S)
    under_way: deque[tuple[float, str]] = deque()
    now, kept, asked = 0.0, [], 0.0
    for number in range(12_000):
        now += 0.05
        for came_at, name in sorted(under_way):
            if came_at <= now:
                foresight.came(name, came_at)
                under_way.remove((came_at, name))
        predicted_s = random.uniform(0.1, 2.0)
        actual_s = predicted_s * random.lognormvariate(bias, 0.25)
        asked += actual_s <= OBJECTIVE_S
        if is_admitted(foresight, predicted_s, now):
            foresight.expect(str(number), predicted_s, now)
            under_way.append((now + actual_s, str(number)))
            kept.append(actual_s <= OBJECTIVE_S)
    later = kept[len(kept) // 2 :]
    assert sum(later) > 0.9 * len(later)
    assert sum(kept) > 0.7 * asked
