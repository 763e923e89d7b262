from __future__ import annotations

from pathlib import Path

import pytest

from cluster.app import SCALING_POLICY, application_of
from cluster.autoscaling import DECODE, INGRESS, PREFILL, PoolSample, WorkerLoad, decide
from cluster.cluster_args import ClusterArgs
from cluster.deployment import serve_config
from cluster.replicas.load_meter import LoadMeter, ingress_load
from engine.errors import ConfigError
from engine.step_times import TYPICAL_TOKENS
from protos.events_pb2 import BlockCounts, LoadReport, StepTimes
from router.choosing import AIMED
from router.workers import Leg
from tests.router.world import World, busy

TIMES = StepTimes(base_s=0.01, prompt_token_s=0.001, context_token_s=1e-6, sequence_s=0.002)
PROMPT_TOKEN_S = 0.001 + 0.012 / TYPICAL_TOKENS


def test_a_report_in_the_policy_s_words() -> None:
    report = LoadReport(
        num_running=6,
        num_waiting=1,
        num_fetching=1,
        num_queued_tokens=300,
        num_context_tokens=5000,
        step_times=TIMES,
        blocks=[
            BlockCounts(total=100, free=50, held=20, cached=30),
            BlockCounts(total=10, free=2, held=5, cached=2, quarantined=1),
        ],
    )
    load = LoadMeter(16, 4.5).read(report, 0.0, 1.0)
    assert (load.num_sequences, load.num_running, load.startup_s) == (8, 6, 4.5)
    assert load.kv_use == pytest.approx(0.6)  # of the group that is fuller
    assert load.sequence_use == pytest.approx(0.5)
    assert load.queued_s == pytest.approx(300 * PROMPT_TOKEN_S)
    assert load.step_base_s == pytest.approx(0.01)
    assert load.step_load_s == pytest.approx(6 * 0.002 + 5000e-6)
    assert load.busy == 0


def test_the_share_of_its_time_in_steps() -> None:
    meter = LoadMeter(16, 4.5)

    def busy(now: float, steps_s: float) -> float:
        return meter.read(LoadReport(step_times=TIMES), steps_s, now).busy

    assert busy(10.0, 5.0) == 0
    assert busy(12.0, 6.5) == pytest.approx(0.75)
    assert busy(13.0, 6.5) == 0
    assert busy(14.0, 8.0) == 1  # a step that began sooner
    assert busy(15.0, 0.0) == 0  # counted anew
    assert set(LoadMeter(1, 1.0).read(LoadReport(), 0.0, 1.0)) == {0.0, 1.0}


AT_WORK = WorkerLoad(2, 2, 0.1, 0.1, 1.0, 1.0, 0.01, 0.0, 5.0)


def targets(world: World) -> tuple[int, int]:
    """Of both pools, for workers that have as much as a router gives them."""
    waiting = ingress_load(world.router, world.router.num_waiting, 2.0, world.now)
    pool = PoolSample(1, 1, 1, 40, [AT_WORK])
    ingress = PoolSample(1, 1, 1, 1, [waiting])
    found, _ = decide({PREFILL: pool, DECODE: pool, INGRESS: ingress}, {}, world.now)
    return found[PREFILL], found[DECODE]


def test_what_waits_at_a_router_makes_the_pool_grow_that_it_waits_for() -> None:
    """500 prompts of 512 tokens, of which a worker of each pool has two or so: 258 s of work."""
    for world, grown in ((busy(1, 1), (38, 1)), (World(0, 1), (1, 38))):
        assert targets(world) == (1, 1)
        for number in range(500):
            world.submit(f"r{number}", 512)
        assert len(world.dispatch()) < 5
        assert targets(world) == grown


def test_answers_without_a_place_make_the_decode_pool_grow() -> None:
    world = World(1, 1)
    world.report(Leg.DECODE, world.decode[0], max_sequences=32, num_running=32)
    for number in range(96):
        world.submit(f"r{number}", 32, num_new=100)
    assert not world.dispatch()
    assert targets(world) == (1, 4)


@pytest.mark.parametrize(
    ("router", "ttft_s", "inter_token_s"),
    [
        ({}, 3.0, 0.05),
        ({"ttft_objective_s": 10.0, "inter_token_objective_s": 1.0}, 3.0, 0.05),
        ({"ttft_objective_s": 1.0}, 0.5, 0.05),
        ({"inter_token_objective_s": 0.04}, 3.0, 0.04 * AIMED),
    ],
)
def test_pools_grow_before_the_router_refuses(
    router: dict[str, float], ttft_s: float, inter_token_s: float
) -> None:
    said = {"scaling": {"ttft_s": 3.0, "inter_token_s": 0.05}, "router": router}
    objectives = ClusterArgs.checked(said).objectives
    assert objectives.ttft_s == pytest.approx(ttft_s)
    assert objectives.inter_token_s == pytest.approx(inter_token_s)


def test_a_range_is_scaled_and_a_number_is_not() -> None:
    args = ClusterArgs.checked({"decode": {"replicas": "1-3"}})
    assert args.is_scaled
    assert not ClusterArgs().is_scaled
    ingress = application_of(args)._bound_deployment
    _, decode, prefill = list(ingress.init_args)
    scaling = decode._bound_deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 3)
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (0, 0)
    assert prefill._bound_deployment._deployment_config.autoscaling_config is None
    # The policy hears of what waits at ingresses from those that have bounds, be they equal.
    assert bounds(args) == (1, 1)
    assert bounds(
        ClusterArgs.checked({"prefill": {"replicas": "1-3"}, "ingress": {"replicas": 2}})
    ) == (2, 2)
    assert bounds(ClusterArgs.checked({"ingress": {"replicas": 2}})) is None
    (application,) = serve_config(args)["applications"]
    assert ClusterArgs.checked(application["args"]) == args


def bounds(args: ClusterArgs) -> tuple[int, int] | None:
    """Of the ingresses."""
    scaling = application_of(args)._bound_deployment._deployment_config.autoscaling_config
    return None if scaling is None else (scaling.min_replicas, scaling.max_replicas)


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"ttft": 1}, "scaling.ttft: unknown option"),
        ({"max_kv_use": 1.5}, "scaling.max_kv_use: must be at most 1"),
        ({"inter_token_s": 0}, "scaling.inter_token_s: must be above 0"),
    ],
)
def test_wrong_words_about_scaling_are_named(scaling: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ClusterArgs.checked({"scaling": scaling})


@pytest.mark.parametrize("name", ["serve.yaml", "rayservice.yaml"])
def test_the_files_to_deploy_by_name_the_policy(name: str) -> None:
    text = (Path(__file__).parents[2] / "deploy" / name).read_text()
    assert text.count(f'policy_function: "{SCALING_POLICY}"') == 1
