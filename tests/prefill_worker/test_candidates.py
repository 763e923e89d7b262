"""Who is asked, and who is tried again."""

import pytest

from prefill_worker.candidates import LONGEST_PAUSE_S, PAUSE_S, Candidates

NAMED = [("a:1", 0), ("b:1", 0), ("c:1", 7)]


def ask_until_given_up(candidates: Candidates, answers: dict[str, str], now: float = 0.0) -> str:
    """The addresses in the order in which they were asked; a round takes a second."""
    asked = ""
    while True:
        number = candidates.next()
        if number is None:
            if candidates.begin_round(now) is None:
                return asked
            now += 1.0
            continue
        name = candidates[number][0][0]
        asked += name
        if answers[name] == "refuses":
            candidates.note_failed(number, "no")
        elif answers[name] == "breaks off":
            candidates.note_broke_off(number, "lost", object())
        elif answers[name] == "is busy":
            candidates.note_busy(number, "full")
        else:
            candidates.note_unreached(number, "nobody")


@pytest.mark.parametrize(
    ("patience_s", "answers", "asked"),
    [
        (0.0, {"a": "refuses", "b": "refuses", "c": "refuses"}, "abc"),
        (0.0, {"a": "is away", "b": "is away", "c": "is away"}, "abc"),
        (9.0, {"a": "refuses", "b": "refuses", "c": "refuses"}, "abc"),
        (2.0, {"a": "is away", "b": "is away", "c": "is away"}, "abc" * 3),
        (2.0, {"a": "is away", "b": "refuses", "c": "is away"}, "abc" + "ac" * 2),
        (1.5, {"a": "refuses", "b": "is away", "c": "refuses"}, "abcbb"),
        (0.0, {"a": "breaks off", "b": "breaks off", "c": "refuses"}, "abc"),
        (9.0, {"a": "breaks off", "b": "breaks off", "c": "refuses"}, "abcabab"),
        (4.0, {"a": "breaks off", "b": "is away", "c": "refuses"}, "abcababbb"),
        (9.0, {"a": "is busy", "b": "refuses", "c": "is busy"}, "abc"),
        (2.0, {"a": "is busy", "b": "refuses", "c": "is away"}, "abc" + "ac" * 2),
    ],
)
def test_who_is_asked(patience_s: float, answers: dict[str, str], asked: str) -> None:
    assert ask_until_given_up(Candidates(NAMED, patience_s), answers) == asked


def test_nobody_is_tried_again_when_the_time_is_nearly_up() -> None:
    away = dict.fromkeys("abc", "is away")
    assert ask_until_given_up(Candidates(NAMED, 9.0, latest=1.5), away) == "abc" * 3


def test_a_link_breaks_once_for_all_who_ask_over_it() -> None:
    candidates, first, second = Candidates(NAMED[:1], 9.0), object(), object()
    for link in (first, first, first, second):
        candidates.note_broke_off(0, "lost", link)
    assert candidates.begin_round(0.0) == PAUSE_S
    candidates.note_broke_off(0, "lost", object())
    assert candidates.next() is None
    assert candidates.begin_round(0.0) is None


def test_what_kept_them_is_said_once_each() -> None:
    candidates = Candidates(NAMED[:2], 5.0)
    assert candidates.note_unreached(0, "nobody")
    candidates.note_failed(1, "full")
    assert candidates.begin_round(0.0) == PAUSE_S
    assert not candidates.note_unreached(0, "still nobody")
    assert candidates.problems == "a:1: still nobody; b:1: full"
    assert Candidates([]).problems == "none was named"


def test_the_busy_are_asked_until_they_are_free_with_growing_pauses() -> None:
    candidates = Candidates(NAMED[:2], 0.0, latest=100.0, until_free=True)
    now, pauses = 0.0, []
    while True:
        assert candidates.next() == 0
        assert candidates.note_busy(0, "full") == (now == 0.0)
        assert candidates.next() == 1
        candidates.note_unreached(1, "nobody")
        pause_s = candidates.begin_round(now)
        if pause_s is None:
            break
        pauses.append(pause_s)
        now += pause_s
    assert candidates.some_are_busy
    assert pauses[:3] == [PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S]
    assert max(pauses) == LONGEST_PAUSE_S
    assert now == pytest.approx(100.0), "the last one is no longer than there is time"


def test_patience_begins_when_nobody_is_busy_any_more() -> None:
    candidates = Candidates(NAMED[:2], 2.0, until_free=True)
    candidates.note_unreached(0, "nobody")
    candidates.note_busy(1, "full")
    assert candidates.begin_round(50.0) == PAUSE_S
    for now, pause_s in ((51.0, PAUSE_S), (52.9, PAUSE_S), (53.0, None)):
        candidates.note_unreached(0, "nobody")
        candidates.note_unreached(1, "nobody")
        assert candidates.begin_round(now) == pause_s
    assert not candidates.some_are_busy
