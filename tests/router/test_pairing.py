"""The choice of both workers, against sums done by hand."""

from itertools import product

import pytest

from protos.cores import Cores
from protos.judging import LONG_PAUSE_S
from router.ask import Placement, Source, Terms
from router.config import RouterConfig
from router.pairing import Reason
from router.workers import Leg, StepCosts, Worker
from tests.router.world import BLOCK, World, decode, keys, prefill, with_link

NO_WAITING = RouterConfig(max_backlog_steps=None)


def hold(world: World, worker: Worker, text: str, num_blocks: int) -> None:
    """As a prediction that does not lapse; what is to be fetched has to be held in truth."""
    world.router.index.of(worker).predict(keys(text, num_blocks), float("inf"))


def busy_decoders(world: World, num_running: int = 50) -> None:
    """So that no prompt is computed where others would be held up."""
    for worker in world.decode:
        world.report(Leg.DECODE, worker, num_running=num_running)


def test_the_terms_are_what_the_formulas_say() -> None:
    world = World(1, 1, NO_WAITING)
    p, d = world.prefill[0], world.decode[0]
    links = with_link(p, bytes_per_s=1e7, latency_s=0.5)
    world.report(Leg.DECODE, d, num_running=10, num_context_tokens=5000, links=links)
    world.report(Leg.PREFILL, p, num_queued_tokens=3000)
    hold(world, p, "a", 50)  # 800 tokens
    placement = world.place("a", 2400, keys=keys("a", 150), num_new=100)
    terms = placement.considered[0]
    assert (placement.decode, placement.prefill, placement.reason) == (d, (p,), Reason.REMOTE)
    # A queued token takes its millisecond and a thousandth of a step.
    assert terms.wait_s == pytest.approx(3000 * (0.001 + 0.01 / 1000))
    # 1600 tokens in two steps.
    assert terms.prefill_s == pytest.approx(0.02 + 1.6)
    # 2400 tokens of 1000 bytes take 0.24 s and the latency; half hides behind the first step.
    assert terms.hand_off_s == pytest.approx(0.74 / 2)
    # 11 sequences with 5000 + 2400 + 50 tokens.
    assert terms.decode_s == pytest.approx(100 * (0.01 + 7450e-6 + 11e-4))
    own = terms.wait_s + 3 * terms.prefill_s
    assert terms.cost_s == pytest.approx(own + terms.hand_off_s + terms.decode_s)
    assert terms.num_cached == 800
    assert terms.first_token_s == pytest.approx(3.03 + 1.62 + 0.37)


def test_what_the_decode_worker_holds_need_not_cross() -> None:
    world = World(1, 1, NO_WAITING)
    p, d = world.prefill[0], world.decode[0]
    links = with_link(p, bytes_per_s=1e6, latency_s=0.1)
    world.report(Leg.DECODE, d, num_running=50, links=links)
    hold(world, p, "a", 100)
    hold(world, d, "a", 50)  # 800 tokens
    placement = world.place("a", 2400, keys=keys("a", 150))
    assert placement.reason == Reason.REMOTE
    # 1600 tokens of 1000 bytes and the latency, of which the one step there hides nothing.
    assert placement.considered[0].hand_off_s == pytest.approx(1.7)


def test_what_the_decode_worker_holds_takes_no_more_room() -> None:
    """Of 1,616 tokens 1,600 lie there already: there is room for 1,900 more beside the rest."""
    world = World(0, 2, NO_WAITING)
    d, slow = world.decode
    world.report(Leg.DECODE, slow, num_running=1, num_context_tokens=500_000)
    world.report(Leg.DECODE, d, num_running=1, num_free_tokens=5000 + 2000)
    hold(world, d, "a", 100)
    assert world.place("a", 1616, keys=keys("a", 101), num_new=100).decode == d
    assert world.place("b", 1900, num_new=100).decode == d
    assert world.place("c", 200, num_new=100).decode == slow


def test_a_prefix_is_fetched_over_the_link_between_the_two() -> None:
    """And not over what is usual, which is for those that have not met."""
    world = World(3, 1, NO_WAITING)
    holder, near, far = world.prefill
    busy_decoders(world)
    world.hold(holder, "a", 100)
    world.report(Leg.PREFILL, holder, num_queued_tokens=20_000)
    world.report(Leg.PREFILL, near, links=with_link(holder, 1e7))
    world.report(Leg.PREFILL, far, links=with_link(holder, 1e6))
    fetch_s = {
        terms.prefill: terms.fetch_s
        for terms in world.place("a", 2000, keys=keys("a", 125)).considered
    }
    assert fetch_s[near] == pytest.approx(0.16)
    assert fetch_s[far] == pytest.approx(1.6)


@pytest.mark.parametrize("seed", range(10))
def test_a_prompt_stays_at_whichever_worker_it_would_be_soonest(seed: int) -> None:
    """Many decode workers, of which each holds another part of it and runs others."""
    world = World(1, 9, NO_WAITING, seed)
    draw = world.random
    world.report(Leg.PREFILL, world.prefill[0], num_queued_tokens=draw.randrange(2000, 9000))
    costs = []
    for d in world.decode:
        running, held = draw.randrange(4), draw.randrange(90)
        world.report(Leg.DECODE, d, num_running=running)
        hold(world, d, "a", held)
        new = 1500 - held * BLOCK
        steps, share_s = -(-new // 1000), 0.001 * new
        own_s = share_s + steps * (0.01 + 1e-4 * running)
        step_s = 0.01 + 1e-6 * (1500 + 5) + 1e-4 * (running + 1)
        costs.append(3 * own_s + running * share_s + 10 * step_s)
    placement = world.place("a", 1500, keys=keys("a", 93), num_new=10)
    assert placement.reason == Reason.LOCAL_SOONER
    assert placement.considered[0].cost_s <= 1.01 * min(costs)


def test_a_prompt_stays_where_nobody_is_held_up() -> None:
    world = World(1, 1)
    world.report(Leg.DECODE, world.decode[0], links=with_link(world.prefill[0], 1e6, 0.1))
    placement = world.place("a", 320)
    assert (placement.prefill, placement.reason) == ((), Reason.LOCAL_SOONER)


def test_a_local_prompt_pays_for_all_whom_it_holds_up() -> None:
    world = World(1, 1)
    d = world.decode[0]
    links = with_link(world.prefill[0], 1e6)  # 300 tokens: 0.3 s
    for num_running, is_local in ((0, True), (2, False)):
        world.report(Leg.DECODE, d, num_running=num_running, links=links)
        placement = world.place(f"a{num_running}", 300)
        assert (placement.reason == Reason.LOCAL_SOONER) is is_local
        world.router.ended(f"a{num_running}", world.now)
        world.now += 1
    local = next(terms for terms in placement.considered if terms.prefill is None)
    # A step with two more tokens to make, 0.3 s of it for the prompt: three times its own, twice
    # that of others.
    assert local.prefill_s == pytest.approx(0.3 + 0.01 + 2e-4)
    assert local.cost_s == pytest.approx(3 * 0.3102 + 2 * 0.3)


def test_a_neighbour_on_the_same_cores_spares_long_pauses_alone() -> None:
    world = World(1, 1)
    cores = Cores("machine", 0b11, 2)
    links = with_link(world.prefill[0], 1e9)
    long_s = round(1000 * LONG_PAUSE_S)  # tokens of a millisecond
    for num_tokens, is_local in ((long_s // 2, True), (4 * long_s, False)):
        world.report(Leg.PREFILL, world.prefill[0], cores=cores)
        world.report(Leg.DECODE, world.decode[0], cores=cores, num_running=20, links=links)
        placement = world.place(f"a{num_tokens}", num_tokens)
        assert (placement.reason == Reason.LOCAL_SOONER) is is_local
        world.router.ended(f"a{num_tokens}", world.now)


@pytest.mark.parametrize("share_cores", [True, False])
def test_a_long_prompt_overtakes_nobody_who_waits_for_the_same_cores(share_cores: bool) -> None:
    """It would hold up all who run here, and come out of the time of those who wait there."""
    world = World(1, 1, NO_WAITING)
    cores = Cores("machine", 0b11, 2) if share_cores else None
    links = with_link(world.prefill[0], 1e9)
    world.report(Leg.PREFILL, world.prefill[0], num_queued_tokens=12_000, cores=cores)
    world.report(Leg.DECODE, world.decode[0], num_running=8, cores=cores, links=links)
    placement = world.place("a", 1000)  # a second, for which 12 are waited there
    assert bool(placement.prefill) is share_cores


def test_what_the_decode_worker_holds_is_computed_there() -> None:
    """The next turn of a conversation: its last answer is there."""
    world = World(1, 2)
    busy_decoders(world, 4)
    hold(world, world.decode[1], "talk", 60)
    placement = world.place("next", 61 * BLOCK, keys=keys("talk", 61))
    assert placement.decode == world.decode[1]
    assert placement.reason == Reason.LOCAL_SOONER
    assert placement.considered[0].num_cached == 60 * BLOCK


def test_an_inter_token_objective_keeps_long_prompts_away() -> None:
    for objective_s, is_local in ((None, True), (0.1, False)):
        config = RouterConfig(inter_token_objective_s=objective_s, max_backlog_steps=None)
        world = World(1, 1, config)
        world.report(Leg.PREFILL, world.prefill[0], num_queued_tokens=1500)
        world.report(Leg.DECODE, world.decode[0], num_running=1)
        placement = world.place("a", 300)
        assert (placement.reason == Reason.LOCAL_SOONER) is is_local


def test_without_prefill_workers_the_decode_worker_computes() -> None:
    world = World(2, 1)
    busy_decoders(world)
    for worker in world.prefill:
        world.router.remove(Leg.PREFILL, worker)
    placement = world.place("a", 3000)
    assert (placement.prefill, placement.reason) == ((), Reason.NO_PREFILL_WORKER)


def test_no_prompt_goes_to_prefill_workers_that_take_only_shorter_ones() -> None:
    world = World(6, 1, RouterConfig(max_backlog_steps=None))
    busy_decoders(world, 1000)
    *short, long = world.prefill
    for worker in short:
        world.report(Leg.PREFILL, worker, max_model_len=100)
    world.report(Leg.PREFILL, long, num_queued_tokens=5000)
    assert world.place("longer", 100).prefill == (long,)
    assert world.place("fits", 99).prefill[0] in short
    world.router.remove(Leg.PREFILL, long)
    stays = world.place("nobody's", 100)
    assert (stays.prefill, stays.reason) == ((), Reason.NO_PREFILL_WORKER)
    told = world.place("may not stay", 100, may_stay=False)
    assert told.prefill, "they say why it cannot be computed"


def test_siblings_in_a_burst_land_together() -> None:
    world = World(4, 1, NO_WAITING)
    busy_decoders(world)
    prefix = keys("prefix", 100)
    placed = [
        world.place(f"a{i}", 1640, keys=[*prefix, *keys(f"a{i}", 2)]).prefill[0] for i in range(5)
    ]
    assert len(set(placed)) == 1


def test_affinity_loses_to_a_long_queue() -> None:
    world = World(2, 1, NO_WAITING)
    busy_decoders(world)
    warm, cold = world.prefill
    hold(world, warm, "a", 100)
    for num_queued, chosen in ((2000, warm), (6000, cold)):
        # Cold: 3 * 1.62 s; warm: 3 * 0.01 s and about a second for each thousand that is queued.
        world.report(Leg.PREFILL, warm, num_queued_tokens=num_queued)
        placement = world.place(f"a{num_queued}", 1600 + 15, keys=keys("a", 100))
        assert placement.prefill[0] == chosen
        world.router.ended(f"a{num_queued}", world.now)
    assert placement.prefill == (cold, warm)


def test_a_new_worker_is_found_once_others_queue() -> None:
    world = World(2, 1, NO_WAITING)
    busy_decoders(world)
    for worker in world.prefill:
        hold(world, worker, "a", 100)
        world.report(Leg.PREFILL, worker, num_queued_tokens=6000)
    new = world.come(Leg.PREFILL, prefill("new"))
    assert world.place("a", 1615, keys=keys("a", 100)).prefill[0] == new


def test_a_worker_that_has_measured_nothing_is_no_faster_than_the_others() -> None:
    world = World(2, 1, NO_WAITING)
    busy_decoders(world)
    new = prefill("new")
    world.router.add(Leg.PREFILL, new)
    world.report(Leg.PREFILL, new, costs=StepCosts())
    terms = {one.prefill: one.prefill_s for one in world.place("a", 500, num_new=10).considered}
    assert terms[new] == pytest.approx(0.51)


def test_equals_take_turns() -> None:
    first = {World(4, 3, seed=seed).place("a", 500).prefill[:1] for seed in range(40)}
    every = World(4, 3).prefill
    assert first >= {(worker,) for worker in every}
    decoders = {World(0, 3, seed=seed).place("a", 500).decode for seed in range(40)}
    assert len(decoders) == 3


def test_of_two_that_cost_about_the_same_the_one_with_less_before_it_is_taken() -> None:
    """Neither the work that is queued nor a cached prefix counts alone."""
    world = World(2, 1, NO_WAITING)
    busy_decoders(world)
    warm, idle = world.prefill
    hold(world, warm, "a", 20)  # 320 tokens: 3 * 0.32 s sooner
    world.report(Leg.PREFILL, warm, num_queued_tokens=948)  # 0.957 s
    assert world.place("a", 960, keys=keys("a", 60)).prefill[0] == idle


def test_a_decode_worker_without_room_is_not_chosen() -> None:
    world = World(1, 3)
    full, crowded, slow = world.decode
    world.report(Leg.DECODE, full, num_free_tokens=5500)  # 5000 of them are kept free
    world.report(Leg.DECODE, crowded, num_running=8, max_sequences=8)
    world.report(Leg.DECODE, slow, num_running=9, num_context_tokens=90_000)
    assert world.place("a", 600, num_new=100).decode == slow


def test_what_lies_there_already_needs_no_room() -> None:
    world = World(0, 1)
    world.report(Leg.DECODE, world.decode[0], num_running=1, num_free_tokens=5100)
    hold(world, world.decode[0], "a", 60)
    assert world.place("a", 1000, keys=keys("a", 60)).decode == world.decode[0]


def test_an_objective_that_everybody_breaks_is_broken_the_least() -> None:
    world = World(1, 2, RouterConfig(inter_token_objective_s=0.001))
    busy_decoders(world, 5)
    world.report(Leg.DECODE, world.decode[0], num_running=50)
    assert world.place("a", 600, num_new=100).decode == world.decode[1]


def test_a_link_that_is_fast_makes_a_pair() -> None:
    world = World(2, 1)
    near, far = world.prefill
    speeds = {**with_link(near, 1e8), **with_link(far, 1e5)}
    world.report(Leg.DECODE, world.decode[0], num_running=50, links=speeds)
    for i in range(5):
        placement = world.place(f"a{i}", 500)
        assert placement.prefill[0] == near
        world.router.ended(f"a{i}", world.now)


def test_only_equal_fingerprints_make_a_pair() -> None:
    world = World(2, 0, NO_WAITING)
    new = world.come(Leg.PREFILL, prefill("new", "g"))
    d = world.come(Leg.DECODE, decode("new", "g"))
    world.report(Leg.DECODE, d, num_running=50)
    placement = world.place("a", 500)
    assert (placement.decode, placement.prefill) == (d, (new,))


def test_where_it_died_before_it_does_not_go_again() -> None:
    world = World(2, 2, NO_WAITING)
    without = frozenset({world.prefill[0], world.decode[1]})
    for i in range(10):
        placement = world.place(f"a{i}", 500, without=without)
        assert placement.decode == world.decode[0]
        assert world.prefill[0] not in placement.prefill


def fetched(world: World, bytes_per_s: float) -> Placement:
    """The holder has a second's work before it; the other one has none, and a link to it."""
    holder, other = world.prefill
    busy_decoders(world)
    world.hold(holder, "a", 100)
    world.report(Leg.PREFILL, holder, num_queued_tokens=8000)
    world.report(Leg.PREFILL, other, links=with_link(holder, bytes_per_s))
    return world.place("a", 2000, keys=keys("a", 125))


def test_a_prefix_is_fetched_from_who_holds_it_if_that_is_sooner() -> None:
    world = World(2, 1, NO_WAITING)
    placement = fetched(world, bytes_per_s=1e7)
    holder, other = world.prefill
    assert placement.prefill[0] == other
    assert placement.sources == (Source(holder, 1600),)
    terms = placement.considered[0]
    assert terms.num_cached == 1600
    assert terms.fetch_s == pytest.approx(0.16)
    assert terms.prefill_s == pytest.approx(0.01 + 0.4)


def test_over_a_slow_link_it_is_computed_again() -> None:
    world = World(2, 1, NO_WAITING)
    placement = fetched(world, bytes_per_s=5e5)
    assert placement.prefill[0] == world.prefill[1]
    assert placement.sources == ()
    assert placement.considered[0].num_cached == 0


def test_what_is_only_predicted_cannot_be_fetched() -> None:
    world = World(2, 1, NO_WAITING)
    holder, other = world.prefill
    busy_decoders(world)
    hold(world, holder, "a", 100)
    world.report(Leg.PREFILL, holder, num_queued_tokens=8000)
    world.report(Leg.PREFILL, other, links=with_link(holder, 1e9))
    placement = world.place("a", 2000, keys=keys("a", 125))
    assert placement.prefill[0] == other
    assert placement.sources == ()


def obvious_best(world: World, num_tokens: int, num_new: int) -> float:
    """Over all pairs, of idle workers that hold nothing and are linked at once."""

    def pair_s(p: Worker, d: Worker) -> float:
        there, here = world.loads[Leg.PREFILL, p], world.loads[Leg.DECODE, d]
        wait_s = there.num_queued_tokens * (0.001 + 0.01 / 1000)
        steps = -(-num_tokens // 1000)
        context = here.num_context_tokens + num_tokens + num_new / 2
        step_s = 0.01 + 1e-6 * context + 1e-4 * (here.num_running + 1)
        return wait_s + 3 * (steps * 0.01 + 0.001 * num_tokens) + num_new * step_s

    return min(pair_s(p, d) for p, d in product(world.prefill, world.decode))


@pytest.mark.parametrize("seed", range(10))
def test_joining_the_best_few_finds_the_best_of_all(seed: int) -> None:
    world = World(9, 7, NO_WAITING, seed)
    draw = world.random
    for p in world.prefill:
        world.report(Leg.PREFILL, p, num_queued_tokens=draw.randrange(100, 9000))
    for d in world.decode:
        running = draw.randrange(10, 90)
        world.report(Leg.DECODE, d, num_running=running, num_context_tokens=1000 * running)
    terms: Terms = world.place("a", 1500, num_new=200).considered[0]
    assert terms.cost_s <= 1.01 * obvious_best(world, 1500, 200)
