"""Predicted keys against a list of them that is searched whole."""

import gc

from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.predictions import Predictions

# Of two digits, so that many begin alike. A key says what comes before it, too.
prompts = st.text("01", min_size=1, max_size=4)
EVERY = [format(number, "b")[1:] for number in range(16, 32)]


def keys_of(prompt: str) -> list[int]:
    return [int("1" + prompt[: end + 1], 2) for end in range(len(prompt))]


class Twin:
    """What a worker holds, and each key that was predicted, with its end."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.ends: list[tuple[int, float]] = []

    def num_held(self, keys: list[int]) -> int:
        return next((at for at, key in enumerate(keys) if key not in self.held), len(keys))

    def depth(self, keys: list[int], now: float) -> int:
        there = self.held | {key for key, end in self.ends if end > now}
        return next((at for at, key in enumerate(keys) if key not in there), len(keys))

    def store(self, keys: list[int]) -> None:
        self.held.update(keys)
        self.ends = [one for one in self.ends if one[0] not in keys]

    def evict(self, prompt: str) -> None:
        """With all that goes on from it."""
        behind = [keys_of(every) for every in EVERY if every.startswith(prompt)]
        self.held -= {key for keys in behind for key in keys[len(prompt) - 1 :]}


steps = st.lists(
    st.tuples(
        st.sampled_from(["predict", "predict", "store", "snapshot", "pass", "evict"]),
        prompts,
        st.integers(1, 9),
    ),
    max_size=30,
)


@given(steps)
@example(
    [
        ("predict", "00", 1),
        ("store", "0", 1),
        ("evict", "0", 1),
        ("predict", "00", 1),
        ("store", "00", 1),
        ("evict", "0", 1),
        ("store", "0", 1),
    ]
)
@settings(max_examples=300)
def test_it_holds_until_its_end_or_until_it_is_confirmed(steps: list[tuple[str, str, int]]) -> None:
    """Exactly, as long as nothing is evicted; after that there may be less, never more."""
    predictions, twin, now, is_exact = Predictions(), Twin(), 0.0, True
    for what, prompt, number in steps:
        keys = keys_of(prompt)
        match what:
            case "predict":
                news = keys[twin.num_held(keys) :]
                predictions.add(news, now + number, limit=1000)
                twin.ends += [(key, now + number) for key in news]
                assert predictions.depth(keys, twin.num_held(keys)) == len(keys)
            case "store":
                predictions.confirm(keys[twin.num_held(keys) :])
                twin.store(keys)
            case "snapshot":
                twin.store(keys)
                predictions.confirm_held(twin.held)
            case "evict":
                is_exact = is_exact and not twin.held & set(keys)
                twin.evict(prompt)
            case _:
                now += number / 2
        predictions.purge(now)
        for every in map(keys_of, EVERY):
            depth = predictions.depth(every, twin.num_held(every))
            assert twin.num_held(every) <= depth <= twin.depth(every, now)
            assert depth == twin.depth(every, now) or not is_exact
        if is_exact:
            assert len(predictions) == len({key for key, end in twin.ends if end > now})
    predictions.purge(now + 9)
    assert len(predictions) == 0
    assert not predictions.next


def chain(first: int, num: int) -> range:
    return range(first, first + num)


def test_what_ends_first_makes_room() -> None:
    predictions = Predictions()
    for first, until in ((10, 9.0), (20, 5.0), (30, 7.0)):
        predictions.add(chain(first, 3), until, limit=7)
    assert [predictions.depth(chain(first, 9), 0) for first in (10, 20, 30)] == [3, 0, 3]
    predictions.add(chain(40, 100), until=1.0, limit=7)
    assert [predictions.depth(chain(first, 9), 0) for first in (10, 30, 40)] == [0, 0, 7]
    assert len(predictions) == 7


def test_the_same_prompt_over_and_over_takes_no_more_room() -> None:
    predictions = Predictions()
    for number in range(1000):
        predictions.add(range(100), until=float(number), limit=500)
    assert len(predictions) == 100
    assert len(predictions._ends) == 5
    assert len(predictions.next) == 1


def test_prompts_that_each_go_on_from_another_may_be_many() -> None:
    """And each of them may end before the one that it goes on from."""
    predictions = Predictions()
    for num in range(1200, 0, -1):
        predictions.add(range(num), until=10_000.0 - num, limit=1_000_000)
    assert predictions.depth(range(5000), 0) == len(predictions) == 1200
    predictions.purge(9000.0)
    assert predictions.depth(range(5000), 0) == 999
    predictions.confirm(range(600))
    assert predictions.depth(range(5000), 600) == 999
    assert len(predictions) == 399


def test_a_conversation_that_grows_stays_one_run() -> None:
    predictions = Predictions()
    for num in range(1, 101):
        predictions.add(range(num), until=float(num), limit=10_000)
    (run,) = predictions.next.values()
    assert (len(run), run.until, len(run.branches)) == (100, 100.0, 0)


def test_the_garbage_collector_has_nothing_to_do_with_keys() -> None:
    predictions = Predictions()
    predictions.add(list(range(1000)), until=1.0, limit=1000)
    assert all(len(gc.get_referents(run.keys)) < 2 for run in predictions.next.values())
