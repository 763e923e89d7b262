"""Who is asked, and who is tried again."""

import pytest

from prefill_worker.candidates import Candidates

NAMED = [("a:1", 0), ("b:1", 0), ("c:1", 7)]


def ask_until_given_up(candidates: Candidates, answers: dict[str, str], now: float = 0.0) -> str:
    """The addresses in the order in which they were asked; a round takes a second."""
    asked = ""
    while True:
        number = candidates.next()
        if number is None:
            if not candidates.begin_round(now):
                return asked
            now += 1.0
            continue
        name = candidates[number][0][0]
        asked += name
        if answers[name] == "refuses":
            candidates.note_failed(number, "no")
        elif answers[name] == "breaks off":
            candidates.note_broke_off(number, "lost", object())
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
    assert candidates.begin_round(0.0)
    candidates.note_broke_off(0, "lost", object())
    assert candidates.next() is None
    assert not candidates.begin_round(0.0)


def test_what_kept_them_is_said_once_each() -> None:
    candidates = Candidates(NAMED[:2], 5.0)
    assert candidates.note_unreached(0, "nobody")
    candidates.note_failed(1, "full")
    assert candidates.begin_round(0.0)
    assert not candidates.note_unreached(0, "still nobody")
    assert candidates.problems == "a:1: still nobody; b:1: full"
    assert Candidates([]).problems == "none was named"
