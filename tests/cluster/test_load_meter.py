from __future__ import annotations

from pathlib import Path

import pytest

from cluster.app import SCALING_POLICY, build
from cluster.cluster_args import ClusterArgs
from cluster.deployment import serve_config
from cluster.replicas.load_meter import LoadMeter
from engine.errors import ConfigError
from engine.step_times import TYPICAL_TOKENS
from protos.events_pb2 import BlockCounts, LoadReport, StepTimes

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


def test_a_range_is_scaled_and_a_number_is_not() -> None:
    args = ClusterArgs.checked({"decode": {"replicas": "1-3"}})
    assert args.is_scaled
    assert not ClusterArgs().is_scaled
    ingress = build(args)._bound_deployment
    _, decode, prefill = list(ingress.init_args)
    scaling = decode._bound_deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 3)
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (0, 0)
    assert prefill._bound_deployment._deployment_config.autoscaling_config is None
    (application,) = serve_config(args)["applications"]
    assert ClusterArgs.checked(application["args"]) == args


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"ttft": 1}, "scaling.ttft: unknown option"),
        ({"max_kv_use": 1.5}, "scaling.max_kv_use: must be less than or equal to 1"),
        ({"inter_token_s": 0}, "scaling.inter_token_s: must be greater than 0"),
    ],
)
def test_wrong_words_about_scaling_are_named(scaling: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ClusterArgs.checked({"scaling": scaling})


@pytest.mark.parametrize("name", ["serve.yaml", "rayservice.yaml"])
def test_the_files_to_deploy_by_name_the_policy(name: str) -> None:
    text = (Path(__file__).parents[2] / "deploy" / name).read_text()
    assert text.count(f'policy_function: "{SCALING_POLICY}"') == 1
