"""Whose turn it is; nothing is lost, nothing comes twice."""

import time
import weakref
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_cache.names import BlockName
from router.ask import Ask, keys_of
from router.waiting import OVERDUE_SHARE, Waiting, WaitingRoom

OVERDUE_S = 10.0
TOKENS_OF_SECOND = 100


def add(
    room: WaitingRoom,
    request_id: str,
    size_s: float,
    now: float = 0.0,
    deadline: float = 1e9,
    tenant: str = "",
    priority: int = 0,
    num_choices: int = 1,
) -> Waiting:
    tokens = round(size_s * TOKENS_OF_SECOND)
    ask = Ask(request_id, tokens, tenant=tenant, priority=priority, num_choices=num_choices)
    return room.add(ask, deadline, size_s, now)


def resize(room: WaitingRoom, waiting: Waiting, size_s: float) -> None:
    room.resize(waiting, size_s, round(size_s * TOKENS_OF_SECOND))


def order(room: WaitingRoom, now: float = 0.0) -> str:
    return "".join(waiting.ask.request_id for waiting in room.in_order(now))


def test_the_shortest_goes_first() -> None:
    room = WaitingRoom(OVERDUE_S)
    for request_id, size_s in zip("abc", (3.0, 1.0, 2.0), strict=True):
        add(room, request_id, size_s)
    assert order(room) == "bca"


def test_those_of_one_length_go_as_they_came_whatever_a_worker_makes_of_it() -> None:
    """Seconds are of a moment: a machine that is slow for a while must not put back whoever was
    looked at then, nor may a guess overtake what is known."""
    room = WaitingRoom(OVERDUE_S)
    ask = {name: Ask(name, 512) for name in "abcd"}
    waiting = {name: room.add(ask[name], 1e9, 1.0, 0.0) for name in "abc"}
    for name, size_s in zip("abc", (9.0, 1.1, 4.0), strict=True):
        room.resize(waiting[name], size_s, 512)
    room.add(ask["d"], 1e9, 0.1, 1.0)
    assert order(room) == "abcd"
    room.resize(waiting["c"], 4.0, 32)  # the rest is cached
    assert order(room) == "cabd"


def test_who_is_hardly_shorter_does_not_overtake() -> None:
    room = WaitingRoom(OVERDUE_S)
    for name, num_tokens in zip("abcd", (530, 520, 515, 300), strict=True):
        room.add(Ask(name, num_tokens), 1e9, 1.0, 0.0)
    assert order(room) == "dabc"


def test_what_serves_many_answers_counts_as_shorter() -> None:
    room = WaitingRoom(OVERDUE_S)
    add(room, "a", 3.0, num_choices=4)
    add(room, "b", 1.0)
    assert order(room) == "ab"


def test_priority_comes_before_everything() -> None:
    room = WaitingRoom(OVERDUE_S)
    add(room, "a", 1.0, now=1.0, priority=1)
    add(room, "b", 9.0, now=50.0, priority=0)
    add(room, "c", 9.0, now=50.0, priority=-1)
    assert order(room, 50.0) == "cba"


def test_one_who_is_overdue_overtakes_and_then_it_is_the_turn_of_the_shorter() -> None:
    room = WaitingRoom(OVERDUE_S)
    add(room, "a", 9.0, now=1.0)
    add(room, "b", 5.0, now=2.0)
    add(room, "c", 1.0, now=8.0)
    assert order(room, 10.0) == "cba"
    assert order(room, 11.5) == "acb"
    assert order(room, 12.5) == "acb"


@pytest.mark.parametrize("size_s", [0.5, 8.0])
def test_the_overdue_have_a_share_and_the_oldest_goes_first(size_s: float) -> None:
    """While shorter ones come without an end, as many as can be computed."""
    room = WaitingRoom(OVERDUE_S)
    for number in range(20):
        add(room, f"old{number}", size_s, now=float(number))
    gone, spent_s, now = [], 0.0, 50.0
    for number in range(2000):
        add(room, f"new{number}", 0.1, now=now)
        first = next(room.in_order(now))
        room.give(first.ask.request_id)
        spent_s += first.size_s
        now += first.size_s
        if first.ask.request_id.startswith("old"):
            gone.append(first.ask.request_id)
            assert len(gone) * size_s <= OVERDUE_SHARE * spent_s + size_s + 0.1
    assert gone == [f"old{number}" for number in range(len(gone))]
    assert len(gone) == 20 or len(gone) * size_s >= OVERDUE_SHARE * spent_s - 0.1


def test_who_was_moved_here_keeps_its_arrival() -> None:
    room = WaitingRoom(OVERDUE_S)
    add(room, "a", 1.0, now=20.0)
    room.add(Ask("b", 100, arrived=5.0), 1e9, 5.0, 20.0)
    assert order(room, 20.0) == "ba"


def test_who_was_moved_here_goes_before_the_shorter() -> None:
    room = WaitingRoom(OVERDUE_S)
    add(room, "a", 1.0)
    room.add(Ask("b", 100, moved=True), 1e9, 5.0, 0.0)
    assert order(room) == "ba"


def test_a_tenant_with_many_does_not_keep_out_one_with_few() -> None:
    room = WaitingRoom(OVERDUE_S)
    for request_id in "abcd":
        add(room, request_id, 1.0, tenant="many")
    add(room, "x", 9.0, tenant="few")
    assert order(room) == "xabcd" or order(room) == "axbcd"
    # Not even when all of them are overdue.
    assert order(room, 100.0).index("x") <= 1


def test_a_size_that_becomes_known_counts() -> None:
    room = WaitingRoom(OVERDUE_S)
    long = add(room, "a", 3.0)
    add(room, "b", 2.0)
    resize(room, long, 1.0)
    assert order(room) == "ab"
    assert room.work_s == pytest.approx(3.0)


def test_past_its_deadline_it_is_told_once() -> None:
    room = WaitingRoom(OVERDUE_S)
    add(room, "a", 1.0, deadline=5.0)
    add(room, "b", 1.0, deadline=6.0)
    add(room, "c", 1.0, deadline=5.0)
    room.remove("c")
    assert [ask.request_id for ask in room.expired(5.0)] == ["a"]
    assert room.expired(5.5) == []
    assert order(room, 5.5) == "b"


def test_who_is_gone_leaves_no_keys_behind() -> None:
    """Those of a long prompt are large, and many deadlines are far away."""
    room = WaitingRoom(OVERDUE_S)
    keys = keys_of([BlockName(bytes(16))])
    left = weakref.ref(keys)
    room.add(Ask("a", 100, keys), 1e9, 1.0, 0.0)
    room.give("a")
    del keys
    assert left() is None


def test_the_work_before_a_request() -> None:
    room = WaitingRoom(overdue_s=100.0)
    add(room, "a", 0.5)
    add(room, "b", 2.0)
    add(room, "c", 64.0)
    add(room, "d", 3.0, priority=-1)
    add(room, "e", 3.0, priority=5)
    ask = Ask("x", 100)
    assert room.seconds_before(ask, 800, 1) == pytest.approx(5.5)
    assert room.seconds_before(ask, 800, 2) == pytest.approx(2.75)


def test_who_waits_so_long_that_it_is_overdue_has_all_before_it() -> None:
    room = WaitingRoom(overdue_s=1.0)
    add(room, "a", 2.0)
    add(room, "b", 64.0)
    assert room.seconds_before(Ask("x", 800), 800, 1) == pytest.approx(66.0)


def test_the_work_before_a_tenant_that_has_little_is_its_own_and_as_much_of_others() -> None:
    room = WaitingRoom(overdue_s=1000.0)
    for i in range(50):
        add(room, str(i), 2.0, tenant="many")
    add(room, "x", 2.0, tenant="few")
    assert room.seconds_before(Ask("y", 100, tenant="few"), 300, 1) == pytest.approx(4.0)
    assert room.seconds_before(Ask("y", 100, tenant="many"), 300, 1) == pytest.approx(102.0)


def test_of_other_tenants_no_more_than_a_turn_each_is_before_each_of_ones_own() -> None:
    room = WaitingRoom(overdue_s=1000.0)
    for i in range(50):
        add(room, str(i), 2.0, tenant="many")
    add(room, "x", 2.0, tenant="few")
    add(room, "z", 2.0, tenant="many", priority=-1)
    for tenant, num_before in (("many", 52), ("few", 3), ("new", 1)):
        assert room.num_before(Ask("y", 100, tenant=tenant)) == num_before


def test_the_first_few_of_ten_thousand_are_found_quickly() -> None:
    """Against a room of a hundred, on the same machine: the bound is wide, since both are short."""

    def seconds(num: int) -> float:
        room = WaitingRoom(OVERDUE_S)
        for i in range(num):
            add(room, str(i), float(i * 7919 % num), tenant=str(i % 50))
        best = float("inf")
        for i in range(20):
            began = time.perf_counter()
            first = list(islice(room.in_order(0.0), 64))
            resize(room, first[40], 0.5)
            room.give(first[0].ask.request_id)
            add(room, f"new{i}", float(i))
            best = min(best, time.perf_counter() - began)
        return best

    assert seconds(10_000) < 10 * seconds(100)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "give", "resize", "expire"]),
        st.integers(0, 11),
        st.floats(0.0, 50.0),
        st.sampled_from(["", "s", "t"]),
        st.integers(-1, 1),
    ),
    max_size=60,
)


def obvious_order(left: dict[str, Waiting]) -> list[str]:
    """Of one tenant and one priority, who is not overdue."""
    return [one.ask.request_id for one in sorted(left.values(), key=lambda w: (w.rank, w.number))]


def obvious_seconds_before(left: dict[str, Waiting], ask: Ask, most_rank: int) -> float:
    """Of one priority: all of its own tenant's that are as short, and of the others' as much."""
    peers = [one for one in left.values() if one.ask.priority == ask.priority]
    own = [one for one in peers if one.ask.tenant == ask.tenant and one.rank <= most_rank]
    others_s = sum(one.size_s for one in peers if one.ask.tenant != ask.tenant)
    own_s = sum(one.size_s for one in own)
    num_others = len({one.ask.tenant for one in peers} - {ask.tenant})
    return own_s + min(others_s, own_s * num_others)


@given(STEPS)
@settings(max_examples=150)
def test_nothing_is_lost_and_nothing_comes_twice(
    steps: list[tuple[str, int, float, str, int]],
) -> None:
    room = WaitingRoom(OVERDUE_S)
    left: dict[str, Waiting] = {}
    now = 1.0
    for kind, number, value, tenant, priority in steps:
        now += 0.7
        request_id = str(number)
        if kind == "add" and request_id not in left:
            left[request_id] = add(room, request_id, value, now, now + value, tenant, priority)
        elif kind == "expire":
            gone = {ask.request_id for ask in room.expired(now)}
            assert gone == {key for key, one in left.items() if one.deadline <= now}
            left = {key: one for key, one in left.items() if key not in gone}
        elif kind == "remove":
            assert room.remove(request_id) is left.pop(request_id, None)
        elif kind == "give" and request_id in left:
            room.give(request_id)
            del left[request_id]
        elif kind == "resize" and request_id in left:
            resize(room, left[request_id], value)
        every = [one.ask for one in room.in_order(now)]
        assert sorted(ask.request_id for ask in every) == sorted(left)
        assert [ask.priority for ask in every] == sorted(ask.priority for ask in every)
        for level in (-1, 0, 1):
            for of in ("", "s", "t"):
                lane = [a.request_id for a in every if (a.priority, a.tenant) == (level, of)]
                lane = [key for key in lane if left[key].arrived >= now - OVERDUE_S]
                assert lane == obvious_order({key: left[key] for key in lane})
        assert len(room) == len(left)
        assert room.work_s == pytest.approx(sum(one.size_s for one in left.values()))
        assert room.num_before(Ask("x", 100, priority=2)) == len(left)
        for one in left.values():
            before_s = room.seconds_before(one.ask, one.num_uncached, 1)
            sooner_s = sum(o.size_s for o in left.values() if o.ask.priority < one.ask.priority)
            due_s, all_s = (
                sooner_s + obvious_seconds_before(left, one.ask, rank) for rank in (one.rank, 96)
            )
            if due_s != pytest.approx(OVERDUE_S):
                expected_s = all_s if due_s > OVERDUE_S else due_s
                assert before_s == pytest.approx(expected_s, abs=1e-9)
    for request_id in list(left):
        room.remove(request_id)
    assert len(room) == 0
    assert room.work_s == 0
