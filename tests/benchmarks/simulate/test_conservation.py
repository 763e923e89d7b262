"""Nothing is lost and nothing is made up, whoever dies."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.simulate.arrivals import Arrivals
from benchmarks.simulate.bench import Bench, under
from benchmarks.simulate.cluster import ClusterPlan
from benchmarks.simulate.device import load_device
from benchmarks.simulate.figures import Objective, figures_of
from benchmarks.simulate.flight import Flight
from benchmarks.simulate.plain import PLAIN_POLICIES
from benchmarks.simulate.roster import Death
from benchmarks.simulate.simulation import Run, simulate
from benchmarks.simulate.synthetic import BestOf, Sessions
from benchmarks.simulate.traffic import Request
from cluster.bench.lengths import LogNormal
from engine.errors import ConfigError
from router.ask import Ask
from router.config import RouterConfig
from router.policies import POLICIES
from router.router import Router
from router.workers import Leg
from tests.benchmarks.simulate.made_up import request

DEVICE = load_device()
SMALL = replace(DEVICE, num_blocks=300)  # a cache that evicts and preempts
PLAN = ClusterPlan(num_prefill=2, num_decode=2, seed=5)


@pytest.fixture(scope="module")
def sessions() -> list[Request]:
    return Sessions(most_tokens=30_000).requests(Arrivals(rate=4.0, seconds=40.0), seed=1)


def check(run: Run, requests: Sequence[Request]) -> None:
    """`simulate` has checked that no worker has anything left, and every block pool."""
    assert [flight.request.number for flight in run.flights] == [one.number for one in requests]
    for flight in run.flights:
        assert not flight.refused
        assert flight.first_at is not None
        assert flight.end_at is not None
        assert flight.request.at_s <= flight.first_at <= flight.end_at
        if flight.num_begun == 1:
            assert accounted(flight) == flight.request.num_tokens
        else:
            assert accounted(flight) > flight.request.num_tokens
            assert flight.num_preemptions or not all(worker.alive for worker in run.workers)


def accounted(flight: Flight) -> int:
    return flight.num_computed + flight.num_own_cached + flight.num_fetched


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_once_under_every_policy(policy: str, sessions: list[Request]) -> None:
    check(simulate(under(PLAN, policy), DEVICE, sessions), sessions)


def test_a_cache_that_is_too_small_evicts_and_preempts_and_loses_nothing() -> None:
    """Answers so long that those which run together outgrow the cache."""
    requests = BestOf(
        4, prompt=LogNormal(4_000, 0.5, 10_000), output=LogNormal(3_000, 0.4, 9_000)
    ).requests(Arrivals(rate=8.0, seconds=10.0), seed=2)
    run = simulate(PLAN, SMALL, requests)
    check(run, requests)
    assert any(flight.num_preemptions for flight in run.flights)
    evicted = [one.cache.stats().groups[0].evicted for one in run.workers]
    assert sum(evicted) > 100


def test_a_run_is_the_same_for_the_same_seed_and_another_for_another(
    sessions: list[Request],
) -> None:
    def ends(seed: int) -> list[float | None]:
        plan = replace(PLAN, num_routers=2, seed=seed)
        return [flight.end_at for flight in simulate(plan, DEVICE, sessions).flights]

    assert ends(1) == ends(1)
    assert ends(1) != ends(2)


@pytest.mark.parametrize(
    "deaths",
    [
        (Death(10.0, Leg.PREFILL, 0),),
        (Death(10.0, Leg.PREFILL, 0), Death(12.0, Leg.PREFILL, 1)),
        (Death(10.0, Leg.DECODE, 0),),
        (Death(10.0, Leg.DECODE, 0, 5.0), Death(20.0, Leg.DECODE, 1, 5.0)),
        (Death(10.0, Leg.PREFILL, 1, 4.0), Death(10.01, Leg.DECODE, 1, 4.0)),
    ],
    ids=["prefill", "all prefill", "decode", "decode in turns", "both"],
)
def test_deaths_lose_nothing(deaths: tuple[Death, ...], sessions: list[Request]) -> None:
    run = simulate(replace(PLAN, deaths=deaths), DEVICE, sessions)
    check(run, sessions)
    dead = [worker for worker in run.workers if not worker.alive]
    assert len(dead) == len(deaths)
    hit = [flight for flight in run.flights if flight.num_attempts > 1]
    assert bool(hit) == any(death.leg is Leg.DECODE for death in deaths)


def test_an_answer_goes_on_where_it_was_when_its_worker_died() -> None:
    """Of 400 tokens some came from the first worker, the others from the second: no more, no
    less. The prompt of the second attempt has those that came in it."""
    one = request(0, 0.0, 1000, 400)
    one = replace(one, names=())
    plan = replace(PLAN, num_prefill=0, deaths=(Death(1.0, Leg.DECODE, 0),))
    whole = simulate(replace(plan, deaths=()), DEVICE, [one]).flights[0]
    runs = [
        simulate(replace(plan, deaths=(Death(1.0, Leg.DECODE, number),)), DEVICE, [one])
        for number in range(2)
    ]
    (moved,) = [run.flights[0] for run in runs if run.flights[0].num_attempts == 2]
    assert 0 < moved.num_sent < 400
    assert moved.num_computed == 1000 + 1000 + moved.num_sent
    assert moved.first_at == whole.first_at
    assert moved.end_at is not None
    assert whole.end_at is not None
    assert moved.end_at > whole.end_at


def test_without_a_decode_worker_requests_wait_until_they_are_refused() -> None:
    plan = replace(PLAN, num_decode=1, deaths=(Death(1.0, Leg.DECODE, 0),))
    run = simulate(plan, DEVICE, [request(0, 2.0, 1000, 10)])
    (flight,) = run.flights
    assert flight.refused
    assert flight.end_at is None
    figures = figures_of(run, Objective())
    assert (figures.num_refused, figures.good_share, figures.local_share) == (1, 0, 0)


def test_who_lost_its_worker_late_is_refused_as_late_after_that() -> None:
    """Its first ten minutes are over when its worker dies, and no other one comes."""
    one = replace(request(0, 0.0, 1000, 200_000), names=())
    plan = replace(PLAN, num_prefill=0, num_decode=1, deaths=(Death(700.0, Leg.DECODE, 0),))
    (flight,) = simulate(plan, DEVICE, [one]).flights
    assert flight.refused
    assert 0 < flight.num_sent < 200_000


def test_what_cannot_keep_the_objective_is_refused_where_the_operator_wants_it(
    sessions: list[Request],
) -> None:
    plan = replace(PLAN, num_prefill=1, router=RouterConfig(ttft_objective_s=0.5))
    run = simulate(plan, DEVICE, sessions)
    assert 0 < sum(flight.refused for flight in run.flights) < len(sessions)
    assert all(flight.end_at is not None for flight in run.flights if not flight.refused)


def test_what_a_worker_had_is_never_refused_keeps_its_arrival_and_may_go_anywhere(
    sessions: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    asks: list[Ask] = []
    submit = Router.submit

    def noted(router: Router, ask: Ask, now: float) -> None:
        asks.append(ask)
        submit(router, ask, now)

    monkeypatch.setattr(Router, "submit", noted)
    router = RouterConfig(ttft_objective_s=0.5)
    deaths = (Death(10.0, Leg.DECODE, 0, 5.0), Death(20.0, Leg.DECODE, 1, 5.0))
    run = simulate(replace(PLAN, num_prefill=1, router=router, deaths=deaths), DEVICE, sessions)
    moved = {ask.request_id for ask in asks if ask.moved}
    assert moved
    assert moved == {one.request_id for one in run.flights if one.num_attempts > 1}
    assert not any(ask.without for ask in asks)
    assert len({ask.request_id for ask in asks if not ask.moved}) == len(sessions)
    assert len(asks) == len(sessions) + sum(ask.moved for ask in asks)
    assert all(sessions[int(ask.request_id)].at_s == ask.arrived for ask in asks)
    for flight in run.flights:
        assert flight.num_attempts == 0 if flight.refused else flight.end_at is not None


@pytest.mark.parametrize("policy", PLAIN_POLICIES)
def test_plain_policies_lose_nothing_either(policy: str, sessions: list[Request]) -> None:
    deaths = (Death(10.0, Leg.DECODE, 0), Death(12.0, Leg.PREFILL, 1, 4.0))
    run, _ = Bench(DEVICE, Objective()).run(replace(PLAN, deaths=deaths), sessions, policy)
    check(run, sessions)
    alone = replace(PLAN, num_decode=1, deaths=(Death(1.0, Leg.DECODE, 0),))
    run, _ = Bench(DEVICE, Objective()).run(alone, [request(0, 2.0, 1000, 10)], policy)
    assert run.flights[0].refused


def test_a_prompt_that_no_worker_could_hold_is_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match="request 0 has 200000 tokens"):
        simulate(PLAN, SMALL, [request(0, 0.0, 200_000, 10)])


def test_requests_are_spread_over_cells_and_come_back_to_theirs(sessions: list[Request]) -> None:
    run = simulate(replace(PLAN, num_cells=3), DEVICE, sessions)
    check(run, sessions)
    assert len(run.workers) == 12
    assert all(worker.busy_s for worker in run.workers)
    one_cell = simulate(PLAN, DEVICE, sessions)

    def hits(one: Run) -> int:
        return sum(flight.num_own_cached + flight.num_fetched for flight in one.flights)

    assert hits(run) > 0.7 * hits(one_cell)
