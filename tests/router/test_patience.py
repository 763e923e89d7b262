"""When a worker is asked for a snapshot again."""

from router.patience import CALM_S, LONGEST_PAUSE_S, Patience


def pauses(patience: Patience, start: float, count: int) -> list[float]:
    """How long each of them is, if trouble comes as soon as it is over."""
    found, now = [], start
    for _ in range(count):
        patience.note_trouble(now)
        began = now
        while not patience.is_over(now):
            now += 0.25
        found.append(now - began)
    return found


def test_each_is_twice_as_long_up_to_a_limit() -> None:
    patience = Patience()
    assert patience.is_over(0.0)
    assert pauses(patience, 5.0, 8) == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, LONGEST_PAUSE_S, 8.0]


def test_after_a_calm_time_the_next_trouble_is_a_new_one() -> None:
    patience = Patience()
    pauses(patience, 0.0, 5)
    assert pauses(patience, 8.0 + CALM_S, 2) == [0.0, 0.5]
