from engine.watchdog import Watchdog


def test_work_without_steps_is_a_stall() -> None:
    dog = Watchdog(timeout_s=5)
    dog.note(100.0, num_steps=1, has_work=True)
    assert dog.stalled_s(104.0) is None
    assert dog.still_s(104.0) == 4.0
    dog.note(104.0, num_steps=1, has_work=True)
    stalled_s = dog.stalled_s(106.0)
    assert stalled_s == 6.0, "the same step again does not start the count anew"


def test_steps_and_idleness_are_none() -> None:
    dog = Watchdog(timeout_s=5)
    dog.note(0.0, 1, True)
    dog.note(4.0, 2, True)
    assert dog.stalled_s(8.0) is None
    dog.note(8.0, 2, False)
    assert dog.stalled_s(1000.0) is None
    assert dog.still_s(1000.0) == 0.0
    dog.note(1000.0, 2, True)
    assert dog.stalled_s(1004.0) is None, "work that has just come is not late"
