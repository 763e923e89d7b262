"""What waits at the router, for what, and what goes before what."""

import pytest

from protos.judging import SILENT_AFTER_S
from router.choosing import AIMED
from router.config import RouterConfig
from router.pairing import Reason
from router.router import MOST_LOOKED_AT
from router.workers import Leg
from tests.router.world import COSTS, STEP_TOKENS, World, busy, keys


def test_a_request_waits_while_its_worker_has_more_than_a_full_step() -> None:
    world = busy(1, 1)
    world.report(Leg.PREFILL, world.prefill[0], num_queued_tokens=STEP_TOKENS - 100)
    assert world.place("a", 500)
    world.submit("b", 500)
    assert world.dispatch() == {}
    world.now += 0.5  # the worker has computed as much
    assert list(world.dispatch()) == ["b"]


def test_who_waits_for_one_worker_does_not_hold_up_who_goes_to_another() -> None:
    world = busy(2, 1)
    warm, cold = world.prefill
    world.hold(warm, "a", 200)
    world.report(Leg.PREFILL, warm, num_queued_tokens=2500)
    # 3.2 s each to compute anew, three times that in all; 2.5 s to wait.
    world.submit("a", 3205, keys=keys("a", 200))
    assert world.dispatch() == {}
    assert world.place("b", 800).prefill[0] == cold
    assert world.router.num_waiting == 1


def test_who_was_refused_by_an_idle_worker_does_not_hold_up_who_may_go_there() -> None:
    world = busy(1, 2)
    full, idle = world.decode
    world.report(Leg.DECODE, full, max_sequences=1000)
    world.report(Leg.DECODE, idle, num_running=0)
    for number in range(200):
        world.submit(f"moved{number}", 100, without=frozenset({idle}), moved=True)
    world.submit("new", 100)
    placed = world.dispatch()
    assert placed.keys() == {"new"}
    assert placed["new"].decode == idle


def test_those_who_wait_for_one_worker_count_as_queued_there() -> None:
    """Or else affinity would fill the waiting room while another worker is idle."""
    world = busy(2, 1)
    warm, cold = world.prefill
    world.hold(warm, "a", 200)
    world.report(Leg.PREFILL, warm, num_queued_tokens=2500)
    for i in range(20):
        world.submit(f"a{i}", 4200, keys=[*keys("a", 200), *keys(f"a{i}", 62)])
    placed = world.dispatch()
    assert {placement.prefill[0] for placement in placed.values()} == {cold}
    assert 1 <= len(placed) < 20


def test_who_came_first_goes_where_those_behind_it_would_pass_it() -> None:
    """Each prefers the prefill worker until too many wait for it. What is left to the last of them,
    to be computed where it is answered, is there for the first one now."""
    world = World(1, 1)
    world.report(Leg.PREFILL, world.prefill[0], num_queued_tokens=1500)
    world.report(Leg.DECODE, world.decode[0], num_running=5)
    for request_id in "abcd":
        world.submit(request_id, 400)
    placed = world.dispatch()
    assert list(placed) == ["a"]
    assert placed["a"].prefill == ()
    assert [one.ask.request_id for one in world.router._held] == ["b", "c", "d"]


def test_who_holds_much_of_its_prompt_lets_those_behind_it_pass() -> None:
    world = World(1, 1)
    (p,), (d,) = world.prefill, world.decode
    world.hold(p, "a", 24)
    world.report(Leg.PREFILL, p, num_queued_tokens=1500)
    world.report(Leg.DECODE, d, num_running=5)
    world.submit("a", 390, keys=keys("a", 24))
    for request_id in "bcd":
        world.submit(request_id, 400)
    assert list(world.dispatch()) == ["b"]


def test_the_shortest_rest_goes_first_when_there_is_room_again() -> None:
    world = busy(1, 1)
    world.report(Leg.PREFILL, world.prefill[0], num_queued_tokens=10_000)
    world.hold(world.prefill[0], "b", 60)
    world.submit("a", 500)
    world.submit("b", 1000, keys=keys("b", 62))  # 40 to compute
    world.submit("c", 300)
    assert world.dispatch() == {}
    world.now += 1.0
    world.report(Leg.PREFILL, world.prefill[0], num_queued_tokens=0)
    assert list(world.dispatch()) == ["b", "c", "a"]


def test_who_is_overdue_goes_before_the_shorter() -> None:
    world = busy(1, 1, RouterConfig(overdue_s=5.0))
    world.report(Leg.PREFILL, world.prefill[0], num_queued_tokens=20_000)
    world.submit("long", 900)
    world.dispatch()
    world.pass_time(6.0)
    world.submit("short", 100)
    world.dispatch()
    world.report(Leg.PREFILL, world.prefill[0], num_queued_tokens=0)
    assert list(world.dispatch()) == ["long", "short"]


def test_tenants_share() -> None:
    world = busy(1, 1, RouterConfig(max_backlog_steps=0.0))
    p = world.prefill[0]
    world.report(Leg.PREFILL, p, num_queued_tokens=100)
    for i in range(12):
        world.submit(f"many{i}", 400, tenant="many")
    for i in range(3):
        world.submit(f"few{i}", 400, tenant="few")
    assert world.dispatch() == {}
    order = []
    for _ in range(6):
        world.pass_time(1.0)
        world.report(Leg.PREFILL, p, num_queued_tokens=0)
        for request_id in world.dispatch():
            order.append(request_id.rstrip("0123456789"))
            world.router.began(request_id, world.now)
    assert len(order) == 6
    assert order.count("few") == 3


def test_a_full_decode_worker_is_waited_for() -> None:
    world = busy(1, 1)
    d = world.decode[0]
    world.report(Leg.DECODE, d, max_sequences=1001)
    assert world.place("a", 100)
    world.submit("b", 100)
    assert world.dispatch() == {}
    world.router.ended("a", world.now)
    assert list(world.dispatch()) == ["b"]


def test_a_long_prompt_that_has_waited_too_long_keeps_the_room_for_itself() -> None:
    world = busy(1, 1, RouterConfig(overdue_s=5.0))
    d = world.decode[0]
    world.report(Leg.DECODE, d, num_free_tokens=8000)  # 5000 of them are kept free
    world.submit("long", 4000)
    assert world.dispatch() == {}
    assert world.place("short0", 100)
    world.pass_time(6.0)
    world.submit("short1", 100)
    assert world.dispatch() == {}
    world.report(Leg.DECODE, d, num_free_tokens=20_000)
    assert list(world.dispatch()) == ["long"]  # with which its worker has enough to do


def test_who_waited_for_a_worker_that_falls_silent_goes_elsewhere() -> None:
    world = busy(1, 1)
    world.report(Leg.PREFILL, world.prefill[0], num_queued_tokens=90_000)
    world.submit("a", 500)
    assert world.dispatch() == {}
    world.now += SILENT_AFTER_S + 0.1
    world.report(Leg.DECODE, world.decode[0])
    assert world.dispatch()["a"].reason == Reason.NO_PREFILL_WORKER


def test_who_has_waited_too_long_does_not_go_to_who_is_gone() -> None:
    """Though there is room where nobody is any more."""
    world = World(1, 2, RouterConfig(overdue_s=1.0))
    for one in world.decode:
        world.report(Leg.DECODE, one, max_sequences=1)
    where = {world.place(name, 100).decode: name for name in "ab"}
    assert len(where) == 2
    world.submit("c", 100)
    for _ in range(3):
        assert world.dispatch() == {}
        world.pass_time(1.0)
    (held,) = world.router._held
    assert held.choice is not None
    gone = held.choice.way.decode.worker
    world.router.remove(Leg.DECODE, gone)
    world.router.ended(where[gone], world.now)
    assert world.dispatch() == {}


def test_a_look_goes_on_where_nobody_has_to_wait() -> None:
    """What came together would else go in parts, as often as there are looks."""
    world = World(0, 1, costs=COSTS._replace(sequence_s=0.0))
    for number in range(3 * MOST_LOOKED_AT):
        world.submit(f"r{number}", 10)
    assert len(world.dispatch()) == 3 * MOST_LOOKED_AT


def test_short_prompts_share_the_steps_of_those_who_run_there() -> None:
    """Ten tokens of a step of a thousand take a hundredth of what its other sequences do: or else
    a decode worker gets so few at a time that its steps are nearly empty."""
    world = World(0, 1, costs=COSTS._replace(sequence_s=0.01))
    for number in range(40):
        world.place(f"r{number}", 10)
        world.router.began(f"r{number}", world.now)
    for number in range(12):
        world.submit(f"s{number}", 10)
    assert len(world.dispatch()) == 12


def test_a_prompt_takes_what_it_was_taken_to_though_steps_become_slow_while_it_waits() -> None:
    """With less than nothing its worker would look free."""
    world = busy(1, 1)
    p = world.prefill[0]
    world.report(Leg.PREFILL, p, num_queued_tokens=5000)
    world.submit("a", 16)
    assert world.dispatch() == {}
    (held,) = world.router._held
    world.report(Leg.PREFILL, p, costs=COSTS._replace(step_s=100.0), num_steps=1000)
    assert held.choice is not None
    assert held.choice.way.prompt(held.ask).seconds == pytest.approx(0.016 * 1.01)


def test_a_deadline_ends_the_wait_and_is_told() -> None:
    world = World(0, 0, RouterConfig(max_wait_s=600.0))
    world.submit("a", 500, deadline=world.now + 5)
    world.submit("b", 500)
    world.now += 5.0
    assert world.dispatch() == {}
    assert [ask.request_id for ask in world.router.take_expired()] == ["a"]
    assert world.router.take_expired() == []
    world.now += 596.0
    world.dispatch()
    assert [ask.request_id for ask in world.router.take_expired()] == ["b"]
    assert world.router.num_waiting == 0
    assert world.router.stats.num_expired == 2


def test_who_withdraws_waits_no_more() -> None:
    world = World(0, 0)
    world.submit("a", 500)
    world.router.withdraw("a", world.now)
    world.router.withdraw("a", world.now)
    assert world.router.num_waiting == 0


def test_nobody_waits_for_steps_that_are_never_fast_enough() -> None:
    world = World(1, 1, RouterConfig(inter_token_objective_s=0.001))
    assert all(world.place(name, 16, num_new=100) for name in "abc")


def test_who_would_slow_all_others_down_waits_until_one_of_them_ends() -> None:
    world = World(1, 1, RouterConfig(inter_token_objective_s=0.0104 / AIMED))
    assert all(world.place(name, 16, num_new=100) for name in "ab")
    world.submit("c", 16, num_new=100)
    assert world.dispatch() == {}
    world.router.ended("a", world.now)
    assert list(world.dispatch()) == ["c"]


def test_who_would_be_too_slow_even_alone_waits_for_nobody() -> None:
    """A step takes 10 ms; what is aimed at is less than the objective."""
    world = World(1, 1, RouterConfig(inter_token_objective_s=0.0105))
    assert all(world.place(name, 16, num_new=100) for name in "abcde")


def test_with_a_policy_that_does_not_look_again_nothing_waits() -> None:
    world = busy(2, 2, RouterConfig("round-robin"))
    for worker in world.prefill:
        world.report(Leg.PREFILL, worker, num_queued_tokens=50_000)
    first = [world.place(f"a{i}", 500).prefill[0] for i in range(4)]
    assert first.count(world.prefill[0]) == first.count(world.prefill[1]) == 2


def test_with_many_that_wait_a_look_is_not_taken_for_every_event() -> None:
    world = busy(1, 1)
    world.report(Leg.PREFILL, world.prefill[0], num_queued_tokens=20_000)
    for i in range(100):
        world.submit(f"a{i}", 500)
    assert world.dispatch() == {}
    world.report(Leg.PREFILL, world.prefill[0], num_queued_tokens=0)
    assert world.dispatch() == {}
    world.now += 0.02
    assert len(world.dispatch()) == 3  # as much as a full step, and the one that goes beyond


def test_many_choices_that_have_waited_too_long_keep_the_room_for_themselves() -> None:
    world = busy(1, 1, RouterConfig(overdue_s=5.0))
    d = world.decode[0]
    world.report(Leg.DECODE, d, max_sequences=1008, num_running=1001)
    world.submit("many", 100, num_choices=8)
    assert world.dispatch() == {}
    assert world.place("one", 100)
    world.pass_time(6.0)
    world.submit("two", 100)
    assert world.dispatch() == {}
    world.router.ended("one", world.now)
    world.now += 1.0
    world.report(Leg.DECODE, d, num_running=1000)
    assert list(world.dispatch())[0] == "many"


def test_who_has_waited_too_long_stays_with_the_worker_that_is_kept_free_for_it() -> None:
    world = busy(1, 2, RouterConfig(overdue_s=5.0))
    for d in world.decode:
        world.report(Leg.DECODE, d, max_sequences=1008, num_running=1004)
    world.submit("many", 100, num_choices=8)
    for _ in range(7):
        assert world.dispatch() == {}
        world.pass_time(1.0)
    (held,) = world.router._held
    assert held.choice is not None
    kept = held.choice.way.decode.worker
    (other,) = [d for d in world.decode if d != kept]
    world.report(Leg.DECODE, other, num_running=1001, num_context_tokens=10)
    world.pass_time(1.0)
    placement = world.place("one", 100)
    assert placement.decode == other
    world.report(Leg.DECODE, kept, num_running=1000)
    world.now += 1.0
    assert world.dispatch()["many"].decode == kept


@pytest.mark.parametrize("seed", range(3))
def test_equal_prompts_do_not_pass_each_other_on_ways_that_cost_the_same(seed: int) -> None:
    """To one prefill worker and any of three others, or to these alone: there is often a way that
    is free, and one as cheap whose worker has enough to do."""
    world = World(1, 3, seed=seed)
    names = iter(map(str, range(100)))
    gone: list[str] = []
    ends: list[tuple[float, str]] = []
    while len(gone) < 100:
        while world.router.num_waiting < 30 and (name := next(names, None)) is not None:
            world.submit(name, 400, num_new=50)
        now = list(world.dispatch())
        gone += now
        ends += [(world.now + 1.5, name) for name in now]
        world.pass_time(0.05)
        while ends and ends[0][0] <= world.now:
            _, name = ends.pop(0)
            world.router.began(name, world.now)
            world.router.ended(name, world.now)
    assert gone == sorted(gone, key=int)
