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
    assert dog.still_s(1000.0) == 0.0, "nobody has said anything yet"
    dog.note(0.0, 1, True)
    dog.note(4.0, 2, True)
    assert dog.stalled_s(8.0) is None
    dog.note(8.0, 2, False)
    assert dog.stalled_s(1000.0) is None
    assert dog.still_s(1000.0) == 0.0
    dog.note(1000.0, 2, True)
    assert dog.stalled_s(1004.0) is None, "work that has just come is not late"


def test_a_step_that_takes_long_is_no_stall() -> None:
    dog = Watchdog(timeout_s=60)
    dog.note(0.0, 7, True)
    assert dog.stalled_s(70.0) == 70.0, "nobody said that it would"
    assert dog.stalled_s(70.0, expected_s=25.0) is None
    assert dog.stalled_s(75.9, expected_s=25.0) is None
    assert dog.stalled_s(76.1, expected_s=25.0) == 76.1
    assert dog.stalled_s(61.0, expected_s=0.001) == 61.0


def test_nobody_has_measured_the_first_step() -> None:
    dog = Watchdog(timeout_s=60)
    dog.note(0.0, 0, True)
    assert dog.stalled_s(299.0) is None
    assert dog.stalled_s(301.0) == 301.0
    dog.note(400.0, 1, True)
    assert dog.stalled_s(461.0) == 61.0
