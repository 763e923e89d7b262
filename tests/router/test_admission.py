"""What is refused, and what is predicted for it."""

from collections.abc import Callable
from typing import Any

import pytest

from router.admission import Refusal, Refused
from router.choosing import AIMED
from router.config import RouterConfig
from router.workers import Leg
from tests.router.world import World, busy


def test_what_was_admitted_before_is_not_refused() -> None:
    config = RouterConfig(ttft_objective_s=0.1, max_waiting=1)
    world = busy(1, 1, config)
    world.report(Leg.PREFILL, world.prefill[0], num_queued_tokens=100)
    with pytest.raises(Refused):
        world.submit("a", 500)
    world.submit("b", 500, moved=True)
    world.submit("c", 500, moved=True)
    assert world.router.num_waiting == 2


def test_no_more_than_so_many_wait() -> None:
    world = World(0, 0, RouterConfig(max_waiting=2))
    world.submit("a", 500)
    world.submit("b", 500)
    with pytest.raises(Refused) as refused:
        world.submit("c", 500)
    assert refused.value.reason is Refusal.FULL
    assert refused.value.retry_after_s >= 1
    assert world.router.num_waiting == 2
    assert world.router.stats.refused == {"full": 1}


def test_where_places_are_lacking_it_is_they_that_are_waited_for() -> None:
    """Prompts of a hundredth of a second, and answers of a second, two at once."""
    world = World(1, 1, RouterConfig(max_waiting=20))
    world.report(Leg.DECODE, world.decode[0], max_sequences=2)
    for i in range(2 + 20):
        world.submit(str(i), 16, num_new=100)
        world.dispatch()
    assert world.router.num_waiting == 20
    with pytest.raises(Refused) as refused:
        world.submit("late", 16, num_new=100)
    assert refused.value.retry_after_s == pytest.approx(11.0, rel=0.05)


def test_who_would_come_too_late_is_told_when_to_come_again() -> None:
    world = busy(1, 1, RouterConfig(ttft_objective_s=3.0))
    p = world.prefill[0]
    world.report(Leg.PREFILL, p, num_queued_tokens=2000)
    world.submit("a", 400)  # 2.02 and 0.41 s
    world.report(Leg.PREFILL, p, num_queued_tokens=5000)
    with pytest.raises(Refused) as refused:
        world.submit("b", 400)
    # 5.05 and 0.41 s, and `a` before it, which has a step to itself only in part.
    assert refused.value.reason is Refusal.LATE
    assert refused.value.predicted_s == pytest.approx(5.05 + 0.41 + 0.404)
    assert refused.value.objective_s == 3.0
    assert refused.value.retry_after_s == pytest.approx(2.864)
    assert list(world.router.stats.refused) == ["late"]


def test_who_has_nothing_before_it_is_taken_however_long_it_may_take() -> None:
    """Later it would be no sooner, and what a slow first step made of the costs would stay."""
    world = busy(1, 1, RouterConfig(ttft_objective_s=0.1))
    world.submit("a", 500)
    assert list(world.dispatch()) == ["a"]
    with pytest.raises(Refused):
        world.submit("b", 500)


def test_what_waits_at_the_router_counts_in_the_prediction() -> None:
    world = busy(1, 1, RouterConfig(ttft_objective_s=3.0, max_backlog_steps=0.0))
    world.report(Leg.PREFILL, world.prefill[0], num_queued_tokens=100)
    for i in range(7):  # a tenth of a second at the worker, and 0.41 s for each
        world.submit(f"a{i}", 400)
        assert world.dispatch() == {}
    with pytest.raises(Refused):
        world.submit("b", 400)


def full(inter_token_s: float | None = None, **facts: int) -> World:
    """Two answers of a hundred tokens, a second each, at the only decode worker."""
    config = RouterConfig(
        ttft_objective_s=0.6, inter_token_objective_s=inter_token_s, max_backlog_steps=0.0
    )
    world = World(1, 1, config)
    world.report(Leg.DECODE, world.decode[0], **facts)
    for name in "ab":
        world.place(name, 16, num_new=100)
        world.router.began(name, world.now)
    return world


@pytest.mark.parametrize(
    "world",
    [
        lambda: full(max_sequences=2),
        lambda: full(inter_token_s=0.0104 / AIMED),  # a step takes 10 ms, and 0.1 for each of them
    ],
    ids=["no place", "no place that is fast enough"],
)
def test_what_waits_for_a_place_to_decode_counts_in_the_prediction(
    world: Callable[[], World],
) -> None:
    here = world()
    with pytest.raises(Refused) as refused:
        here.submit("c", 16, num_new=100)
    assert refused.value.predicted_s == pytest.approx(1.0, abs=0.1)
    with pytest.raises(Refused):
        here.router.check_open("", 0, here.now)
    here.pass_time(0.8)
    here.submit("c", 16, num_new=100)
    assert here.dispatch() == {}
    here.router.ended("a", here.now)
    here.pass_time(0.3)
    assert list(here.dispatch()) == ["c"]


@pytest.mark.parametrize(
    "world",
    [lambda: full(max_sequences=3), lambda: full(inter_token_s=0.0106 / AIMED)],
    ids=["no place", "no place that is fast enough"],
)
def test_who_waits_for_its_prompt_will_take_a_place(world: Callable[[], World]) -> None:
    here = world()
    here.report(Leg.PREFILL, here.prefill[0], num_queued_tokens=10)
    here.submit("c", 16, num_new=100)
    assert here.dispatch() == {}
    with pytest.raises(Refused) as refused:
        here.submit("d", 16, num_new=100)
    assert refused.value.predicted_s == pytest.approx(1.0, abs=0.1)


def test_places_come_as_fast_as_steps_follow_each_other() -> None:
    """A step takes 10 ms, and something else of the machine 30 ms between two of them."""
    world = full(max_sequences=2)
    for _ in range(5):
        world.now += 0.4
        steps = world.loads[Leg.DECODE, world.decode[0]].num_steps + 10
        world.report(Leg.DECODE, world.decode[0], num_running=2, num_steps=steps)
        world.report(Leg.PREFILL, world.prefill[0])
    with pytest.raises(Refused) as refused:
        world.submit("c", 16, num_new=100)
    assert refused.value.predicted_s == pytest.approx(4.0 - 2.0, abs=0.3)


def test_a_place_is_only_where_steps_are_fast_enough_as_they_are_made() -> None:
    """Model and measure: 10 ms for itself, 30 ms with what else the machine does."""
    world = full(inter_token_s=0.025)
    world.submit("before", 16)
    assert list(world.dispatch()) == ["before"]
    for _ in range(20):
        world.now += 0.5
        steps = world.loads[Leg.DECODE, world.decode[0]].num_steps + 17
        world.report(Leg.DECODE, world.decode[0], num_running=3, num_steps=steps)
        world.report(Leg.PREFILL, world.prefill[0])
    world.submit("c", 16, moved=True)
    assert world.dispatch() == {}
    for name in ("a", "b", "before"):
        world.router.ended(name, world.now)
    world.report(Leg.DECODE, world.decode[0], num_running=0)
    assert list(world.dispatch()) == ["c"]


def test_whose_turn_would_be_after_many_others_is_told_so() -> None:
    world = full(max_sequences=2)
    world.pass_time(0.8)
    for name in "cd":  # with whom `a` and `b` are about to change places
        world.submit(name, 16, num_new=100)
    with pytest.raises(Refused) as refused:
        world.submit("e", 16, num_new=100)
    assert refused.value.predicted_s == pytest.approx(1.2, abs=0.1)


@pytest.mark.parametrize(
    ("many", "one"), [({"tenant": "s"}, {"tenant": "t"}), ({"priority": 1}, {"priority": 0})]
)
def test_those_whose_turn_is_later_get_nobody_refused(
    many: dict[str, Any], one: dict[str, Any]
) -> None:
    world = full(max_sequences=2)
    world.pass_time(0.8)
    for name in "cd":
        world.submit(name, 16, num_new=100, **many)
    with pytest.raises(Refused):
        world.submit("e", 16, num_new=100, **many)
    world.router.check_open(one.get("tenant", ""), one.get("priority", 0), world.now)
    world.submit("f", 16, num_new=100, **one)
    world.router.ended("a", world.now)
    assert list(world.dispatch()) == ["f" if "priority" in one else "c"]


def test_of_a_caller_with_many_that_wait_nothing_need_be_read() -> None:
    world = full(max_sequences=2)
    world.pass_time(0.8)
    for name in "cd":
        world.submit(name, 16, num_new=100, tenant="s")
    with pytest.raises(Refused):
        world.router.check_open("s", 0, world.now)


def test_it_is_known_without_a_request_that_all_would_be_refused() -> None:
    world = World(0, 0, RouterConfig(max_waiting=1))
    world.router.check_open("", 0, world.now)
    world.submit("a", 500)
    with pytest.raises(Refused) as refused:
        world.router.check_open("", 0, world.now)
    assert refused.value.reason is Refusal.FULL
    assert world.router.stats.refused == {"full": 1}
    world.router.withdraw("a", world.now)
    world.router.check_open("", 0, world.now)
    assert (world.router.num_waiting, world.router.stats.num_submitted) == (0, 2)


def test_predictions_that_prove_too_low_are_raised() -> None:
    world = busy(1, 1, RouterConfig(ttft_objective_s=1.0))
    for i in range(8):  # 0.81 s each
        world.place(str(i), 800)
        world.pass_time(1.62)
        world.router.began(str(i), world.now)
        world.router.ended(str(i), world.now)
    world.place("before", 8)
    with pytest.raises(Refused) as refused:
        world.submit("a", 800)
    assert refused.value.predicted_s == pytest.approx(1.62, rel=0.05)


def test_a_short_one_is_taken_where_a_long_one_is_not() -> None:
    world = busy(1, 1, RouterConfig(ttft_objective_s=3.0, max_backlog_steps=0.0))
    world.report(Leg.PREFILL, world.prefill[0], num_queued_tokens=100)
    for i in range(3):
        world.submit(f"a{i}", 800)
    with pytest.raises(Refused):
        world.submit("b", 800)
    world.submit("c", 100)
