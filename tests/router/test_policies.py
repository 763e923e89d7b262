"""The policies that ours is compared with, each by its one idea."""

from collections import Counter

import pytest

from router.config import RouterConfig, RouterConfigError
from router.pairing import Reason
from router.policies import POLICIES
from router.workers import Leg, Worker
from tests.router.world import BLOCK, World, keys

OTHERS = sorted(POLICIES.keys() - {"cost"})


def world_of(policy: str, num_prefill: int = 3, num_decode: int = 3) -> World:
    return World(num_prefill, num_decode, RouterConfig(policy, max_backlog_steps=None))


def first_of(world: World, request_id: str, num_blocks: int = 30) -> tuple[Worker, Worker]:
    """The pair; the prompt is one token longer than its blocks."""
    placement = world.place(request_id, num_blocks * BLOCK + 1, keys=keys("a", num_blocks))
    return placement.prefill[0], placement.decode


@pytest.mark.parametrize("policy", OTHERS)
def test_prompts_are_computed_by_prefill_workers_while_there_are_any(policy: str) -> None:
    world = world_of(policy)
    placement = world.place("a", 100)
    assert sorted(placement.prefill) == sorted(world.prefill)
    assert placement.reason == Reason.POLICY
    for worker in world.prefill:
        world.router.remove(Leg.PREFILL, worker)
    placement = world.place("b", 100)
    assert (placement.prefill, placement.reason) == ((), Reason.NO_PREFILL_WORKER)


@pytest.mark.parametrize("policy", OTHERS)
def test_who_may_not_answer_gets_nothing(policy: str) -> None:
    world = world_of(policy, 2, 2)
    world.router.leave(Leg.PREFILL, world.prefill[0])
    world.report(Leg.DECODE, world.decode[1], draining=True)
    for i in range(6):
        assert first_of(world, str(i)) == (world.prefill[1], world.decode[0])


def test_round_robin_gives_everybody_the_same_number() -> None:
    world = world_of("round-robin")
    pairs = [first_of(world, str(i)) for i in range(9)]
    assert set(Counter(pair[0] for pair in pairs).values()) == {3}
    assert set(Counter(pair[1] for pair in pairs).values()) == {3}


def test_round_robin_does_so_where_choices_are_made_for_a_prediction_too() -> None:
    world = World(0, 3, RouterConfig(policy="round-robin", ttft_objective_s=60.0))
    decode: Counter[Worker] = Counter()
    for i in range(9):
        world.router.check_open("", 0, world.now)
        world.submit(str(i), 160)
        world.now += 1e-5
        (placement,) = world.dispatch().values()
        decode[placement.decode] += 1
    assert set(decode.values()) == {3}


def test_random_reaches_everybody() -> None:
    world = world_of("random")
    pairs = {first_of(world, str(i)) for i in range(100)}
    assert len(pairs) == 9


def test_least_loaded_goes_by_what_is_queued_and_by_sequences() -> None:
    world = world_of("least-loaded")
    for i, (num_queued, num_running) in enumerate([(5000, 1), (100, 7), (900, 3)]):
        world.report(Leg.PREFILL, world.prefill[i], num_queued_tokens=num_queued)
        world.report(Leg.DECODE, world.decode[i], num_running=num_running)
    assert first_of(world, "a") == (world.prefill[1], world.decode[0])


def test_max_hit_goes_where_the_prefix_is_whatever_is_queued() -> None:
    world = world_of("max-hit")
    world.hold(world.prefill[2], "a", 10)
    world.hold(world.decode[1], "a", 10)
    world.report(Leg.PREFILL, world.prefill[2], num_queued_tokens=10**6)
    assert first_of(world, "a") == (world.prefill[2], world.decode[1])


def test_sticky_stays_until_it_is_far_behind() -> None:
    for num_blocks, num_queued, stays in ((25, 2500, True), (25, 3500, False), (20, 2500, False)):
        world = world_of("sticky")
        world.hold(world.prefill[2], "a", num_blocks)
        world.report(Leg.PREFILL, world.prefill[2], num_queued_tokens=num_queued)
        assert (first_of(world, "a")[0] == world.prefill[2]) is stays


def test_an_unknown_policy_is_refused_with_the_ones_that_there_are() -> None:
    with pytest.raises(RouterConfigError, match="policy.*'best'.*round-robin"):
        RouterConfig("best")


@pytest.mark.parametrize(
    "wrong",
    [
        {"alpha": 0.0},
        {"alpha": float("nan")},
        {"max_backlog_steps": -1.0},
        {"ttft_objective_s": 0.0},
        {"inter_token_objective_s": -0.1},
        {"max_waiting": 0},
        {"max_wait_s": 0.0},
        {"overdue_s": -1.0},
    ],
)
def test_a_bad_figure_is_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(RouterConfigError, match=next(iter(wrong))):
        RouterConfig(**wrong)  # type: ignore[arg-type]
