"""The facade: who is given what, and what is told."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.judging import SILENT_AFTER_S
from router.admission import Refused
from router.config import RouterConfig
from router.pairing import Reason
from router.worker_index import NOTHING, Match
from router.workers import Leg, LinkSpeed
from tests.router.world import World, busy, keys

REMOTE = RouterConfig(max_backlog_steps=None)


def test_what_is_submitted_goes_at_once() -> None:
    world = busy(1, 1)
    world.submit("a", 500)
    assert world.router.num_waiting == 1
    assert list(world.dispatch()) == ["a"]
    assert (world.router.num_waiting, world.router.num_under_way) == (0, 1)
    assert world.dispatch() == {}
    world.router.began("a", world.now)
    world.router.ended("a", world.now)
    assert world.router.num_under_way == 0


def test_without_workers_it_waits_for_some() -> None:
    world = World(0, 0)
    world.submit("a", 500)
    assert world.dispatch() == {}
    world.come(Leg.DECODE, world_worker := busy(0, 1).decode[0])
    assert world.dispatch()["a"].decode == world_worker


def test_before_the_caches_are_described_nothing_is_known_to_be_cached() -> None:
    world = World(1, 1, shape=None)
    assert world.place("a", 500).considered[0].num_cached == 0
    world.router.began("a", world.now)


def test_prompts_may_be_kept_from_decode_workers() -> None:
    for may_stay, is_local in ((True, True), (False, False)):
        world = World(1, 1, RouterConfig(may_stay=may_stay))
        links = {world.prefill[0].incarnation: LinkSpeed(1e6)}
        world.report(Leg.DECODE, world.decode[0], links=links)
        assert (world.place("a", 500).reason == Reason.LOCAL_SOONER) is is_local
        world.router.remove(Leg.PREFILL, world.prefill[0])
        if may_stay:
            assert world.place("b", 500).reason == Reason.NO_PREFILL_WORKER
        else:  # until one comes
            world.submit("b", 500)
            assert not world.dispatch()


def test_one_prompt_may_be_kept_from_decode_workers() -> None:
    world = World(1, 1)
    links = {world.prefill[0].incarnation: LinkSpeed(1e6)}
    world.report(Leg.DECODE, world.decode[0], links=links)
    assert world.place("a", 500, may_stay=False).reason == Reason.REMOTE
    assert world.place("b", 500).reason == Reason.LOCAL_SOONER
    world.router.remove(Leg.PREFILL, world.prefill[0])
    world.submit("c", 500, may_stay=False)
    world.submit("d", 500)
    assert world.dispatch().keys() == {"d"}


def test_what_never_fits_goes_to_be_told_so() -> None:
    world = busy(1, 1)
    world.report(Leg.DECODE, world.decode[0], num_free_tokens=90, num_total_tokens=100)
    assert world.place("a", 500)


@pytest.mark.parametrize(
    "facts", [{"draining": True}, {"unhealthy": "quarantine"}, {"num_steps": 3, "still_s": 5.0}]
)
def test_a_worker_that_should_get_nothing_gets_nothing(facts: dict[str, object]) -> None:
    world = busy(2, 1)
    bad, good = world.prefill
    world.report(Leg.PREFILL, bad, num_queued_tokens=1, **facts)
    for _ in range(20):  # longer than its steps can take
        world.now += 0.25
        world.report(Leg.PREFILL, bad, **facts)
        world.report(Leg.PREFILL, good, num_queued_tokens=900)
        world.report(Leg.DECODE, world.decode[0])
    assert world.place("a", 500).prefill == (good,)


def test_a_silent_worker_gets_nothing() -> None:
    world = busy(2, 2)
    world.now += SILENT_AFTER_S + 0.1
    world.report(Leg.PREFILL, world.prefill[1])
    world.report(Leg.DECODE, world.decode[0])
    placement = world.place("a", 500)
    assert placement.prefill == (world.prefill[1],)
    assert placement.decode == world.decode[0]


def test_who_leaves_takes_nothing_new() -> None:
    world = busy(2, 1, REMOTE)
    for i in range(2):
        world.place(f"a{i}", 500)
    world.router.leave(Leg.PREFILL, world.prefill[0])
    for i in range(5):
        assert world.place(f"b{i}", 500).prefill == (world.prefill[1],)


def test_a_standing_counts_at_once() -> None:
    world = busy(2, 2, REMOTE)
    standing = world.router.add(Leg.DECODE, world.decode[0])
    world.place("a", 500)
    standing.leaving = True
    for i in range(8):
        assert world.place(f"b{i}", 500).decode == world.decode[1]


def test_who_comes_back_has_a_clean_account() -> None:
    world = busy(2, 1, REMOTE)
    first = world.place("a", 5000).prefill[0]
    world.router.remove(Leg.PREFILL, first)
    world.loads.pop((Leg.PREFILL, first))
    world.come(Leg.PREFILL, first)
    world.router.began("a", world.now)
    world.router.ended("a", world.now)
    assert world.place("b", 500).considered[0].wait_s == 0


def test_it_may_come_again_after_its_worker_died() -> None:
    world = busy(2, 2, REMOTE)
    died = world.place("a", 500).decode
    world.router.remove(Leg.DECODE, died)
    world.router.ended("a", world.now)
    again = world.place("a", 500, without=frozenset({died}))
    assert again.decode != died
    assert world.router.num_under_way == 1


def test_what_was_placed_is_predicted_where_it_goes() -> None:
    world = busy(1, 1, REMOTE)
    text = keys("a", 30)
    world.place("a", 500, keys=text)
    p, d = world.prefill[0], world.decode[0]
    assert world.router.index.matches([p, d], text, world.now) == [Match(30), NOTHING]
    world.router.began("a", world.now)
    assert world.router.index.matches([p, d], text, world.now) == [Match(30)] * 2
    world.pass_time(10.0)  # nothing confirmed it
    assert world.router.index.matches([p, d], text, world.now) == [NOTHING] * 2


def test_of_who_is_gone_nothing_is_remembered() -> None:
    world = busy(1, 1, REMOTE)
    world.place("a", 500)
    for leg, worker in list(world.loads):
        world.router.remove(leg, worker)
    world.router.began("a", world.now)
    workers = [*world.prefill, *world.decode]
    assert world.router.index.matches(workers, keys("a", 31), world.now) == [NOTHING] * 2


def test_a_sibling_does_not_count_on_what_is_on_its_way() -> None:
    """A decode worker that waits for a prefix cannot continue it."""
    world = World(1, 1, REMOTE)
    world.report(Leg.DECODE, world.decode[0], num_running=5)
    prefix = keys("a", 100)
    assert world.place("a", 1600, keys=prefix).reason == Reason.REMOTE
    sibling = world.place("b", 1650, keys=[*prefix, *keys("b", 3)])
    assert sibling.reason == Reason.REMOTE
    world.router.began("a", world.now)
    world.report(Leg.PREFILL, world.prefill[0], num_queued_tokens=1000)
    later = world.place("c", 1650, keys=[*prefix, *keys("c", 3)])
    assert later.reason == Reason.LOCAL_SOONER


def test_decisions_can_be_read_afterwards() -> None:
    world = busy(1, 1)
    world.submit("a", 500, tenant="t", priority=3)
    world.now += 0.5
    placement = world.dispatch()["a"]
    decision = world.router.decisions[-1]
    assert decision.request_id == "a"
    assert (decision.num_tokens, decision.tenant, decision.priority) == (500, "t", 3)
    assert decision.waited_s == pytest.approx(0.5)
    assert decision.placement is placement
    assert world.router.stats.placed == {Reason.REMOTE: 1}


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["submit", "submit", "dispatch", "began", "ended", "withdraw", "wait", "leg", "report"]
        ),
        st.integers(0, 9),
        st.integers(1, 4000),
    ),
    max_size=60,
)


@given(OPERATIONS, st.sampled_from(["cost", "round-robin", "sticky"]), st.integers(0, 3))
@settings(max_examples=150)
def test_every_request_goes_once_or_is_told(
    operations: list[tuple[str, int, int]], policy: str, seed: int
) -> None:
    world = World(2, 2, RouterConfig(policy, max_wait_s=20.0, max_waiting=6), seed)
    waiting: set[str] = set()
    placed: set[str] = set()

    def dispatch() -> None:
        for request_id in world.dispatch():
            waiting.remove(request_id)
            placed.add(request_id)
        for ask in world.router.take_expired():
            waiting.remove(ask.request_id)

    for kind, number, num_tokens in operations:
        request_id = f"r{number}"
        if kind == "submit" and request_id not in waiting | placed:
            try:
                world.submit(request_id, num_tokens, keys=keys("a", num_tokens // 16))
                waiting.add(request_id)
            except Refused:
                assert len(waiting) == 6
        elif kind == "dispatch":
            dispatch()
        elif kind == "began" and request_id in placed:
            world.router.began(request_id, world.now)
        elif kind == "ended":
            world.router.ended(request_id, world.now)
            placed.discard(request_id)
        elif kind == "withdraw":
            world.router.withdraw(request_id, world.now)
            waiting.discard(request_id)
        elif kind == "wait":
            world.pass_time(num_tokens / 200)
        elif kind == "leg":
            leg = Leg.PREFILL if number % 2 else Leg.DECODE
            worker = (world.prefill if number % 2 else world.decode)[number % 4 // 2]
            if (leg, worker) in world.loads:
                world.router.remove(leg, worker)
                del world.loads[leg, worker]
            else:
                world.come(leg, worker)
        elif kind == "report":
            for leg, worker in list(world.loads):
                world.report(leg, worker, num_queued_tokens=num_tokens)
        assert world.router.num_waiting == len(waiting)
        assert world.router.num_under_way == len(placed)
    world.now += 1.0
    for leg, workers in ((Leg.PREFILL, world.prefill), (Leg.DECODE, world.decode)):
        for worker in workers:
            world.loads.pop((leg, worker), None)
            world.router.remove(leg, worker)
            world.come(leg, worker)
    for request_id in list(placed):
        world.router.ended(request_id, world.now)
    placed.clear()
    for _ in range(20):
        dispatch()
        world.pass_time(1.0)
        for request_id in list(placed):
            world.router.began(request_id, world.now)
            world.router.ended(request_id, world.now)
        placed.clear()
    assert (world.router.num_waiting, world.router.num_under_way) == (0, 0)
    assert not waiting
