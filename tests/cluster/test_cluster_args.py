"""Which clusters are one model's, as far as their user says."""

import math
from typing import Any

import pytest
from pydantic import BaseModel

from cluster.cluster_args import ClusterArgs
from cluster.openai.request_limits import LEAST_PRIORITY, RequestLimits
from cluster.validation import checked
from engine.errors import ConfigError, RequestError
from router.policies import POLICIES


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"decode": {"num_cpus": "many"}}, "decode.num_cpus: must be a number"),
        ({"decode": {"num_cpus": math.inf}}, "decode.num_cpus: must be a finite number"),
        ({"ingress": {"num_gpus": math.inf}}, "ingress.num_gpus: must be a finite number"),
        ({"decode": {"resources": {"x": math.inf}}}, "decode.resources.x: must be a finite number"),
        ({"decode": {"resources": {"x": math.nan}}}, "decode.resources.x: must be a finite number"),
        ({"decode": {"resources": {"x": -1}}}, "decode.resources.x: must be at least 0"),
        ({"max_body_bytes": "big"}, "max_body_bytes: must be a whole number"),
        ({"max_body_bytes": 2048.5}, "max_body_bytes: must be a whole number"),
        ({"log": {"requests": "perhaps"}}, "log.requests: must be true or false"),
        ({"served_model_name": "a"}, "served_model_name: must be a list"),
        ({"model": 7}, "model: must be a text, in quotes where it looks like something else"),
        ({"decode": 2}, "decode: must be a mapping from names to values"),
        ({"engine": 2}, "engine: must be a mapping from names to values"),
        (
            {"decode": {"label_selector": {5: "x"}}},
            "decode.label_selector.5: must be a text, in quotes where it looks like something else",
        ),
        ({"metrics_targets_file": "x"}, "metrics_targets_file: 'x', must be an absolute path"),
        ({"front": {"api_key_file": "x"}}, "front.api_key_file: 'x', must be an absolute path"),
        ({"front": {"chat_template": "x"}}, "front.chat_template: 'x', must be an absolute path"),
        ({"local_prefill": "x"}, "local_prefill: 'x', must be one of auto, always, never"),
        ({"router": {"policy": "x"}}, f"router.policy: 'x', must be one of {', '.join(POLICIES)}"),
        ({5: "x"}, "5: must be a text, in quotes where it looks like something else"),
        ({"engine": {"watermark": "x"}}, "engine.watermark: 'x', must be a number"),
        (
            {"decode": {"engine": {"max_num_seqs": "3"}}},
            "decode.engine.max_num_seqs: '3', must be a whole number",
        ),
        (
            {"exchange": {"max_leases": "3"}},
            "exchange.max_leases: '3', must be a whole number",
        ),
        ({"rpc": {"tls_authority": "x"}}, "rpc.tls_authority: 'x', must be an absolute path"),
        ({"rpc": {"secret_file": ""}}, "rpc.secret_file: '', must be an absolute path"),
        ({"rpc": {"tls_key": 3}}, "rpc.tls_key: 3, must be a text or null"),
    ],
)
def test_what_is_wrong_is_named_where_it_stands(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ClusterArgs.checked(options)
    assert str(caught.value) == told


def test_of_a_value_of_several_types_the_key_is_named() -> None:
    class Args(BaseModel):
        pools: list[dict[str, int | bool]]

    with pytest.raises(ConfigError, match=r"^pools\.0\.replicas: must be a whole number$"):
        checked(Args, {"pools": [{"replicas": "x"}]})
    with pytest.raises(ConfigError, match=r"^pools: must be given$"):
        checked(Args, {})


def release(**engine: Any) -> str:
    return ClusterArgs.checked({"engine": engine}).release


@pytest.mark.parametrize(
    "engine",
    [
        {"kv_cache_dtype": "fp8_e5m2"},
        {"kv_cache_dtype": "int8"},
        {"dtype": "float32"},
        {"seed": 1},
        {"load_format": "dummy"},
        {"block_size": 32},
        {"max_model_len": 1024},
    ],
)
def test_another_model_or_cache_is_another_release(engine: dict[str, Any]) -> None:
    assert release(**engine) != release()
    assert release(**engine) == release(**engine, max_num_seqs=5)


def test_another_length_of_decode_workers_is_another_release() -> None:
    """Ingresses that know the old one would refuse by it, and a model's cache may depend on it."""
    pools = {leg: {"engine": {"max_model_len": 1024}} for leg in ("prefill", "decode")}
    longer = {**pools, "prefill": {"engine": {"max_model_len": 2048}}}
    assert ClusterArgs.checked(pools).release == release(max_model_len=1024)
    assert ClusterArgs.checked(longer).release == release(max_model_len=1024)


@pytest.mark.parametrize(
    "rpc", [{"secret_file": "/etc/kvrelay/secret-2"}, {"tls_authority": "/etc/kvrelay/ca-2.pem"}]
)
def test_what_workers_of_old_certificates_or_secrets_may_refuse_is_another_release(
    rpc: dict[str, str],
) -> None:
    """Serve stops the old workers before the old ingresses, which the new workers do not let in."""
    old = {"secret_file": "/etc/kvrelay/secret", "tls_authority": "/etc/kvrelay/ca.pem"}
    assert ClusterArgs.checked({"rpc": {**old, **rpc}}).release != (
        ClusterArgs.checked({"rpc": old}).release
    )
    assert ClusterArgs.checked({"rpc": {**old, "tls_key": None}}).release == (
        ClusterArgs.checked({"rpc": dict(reversed(old.items()))}).release
    )


def test_two_names_of_one_cache_format_are_one_release() -> None:
    assert release(kv_cache_dtype="fp8") == release(kv_cache_dtype="fp8_e4m3")
    assert release(kv_cache_dtype="fp8") != release(kv_cache_dtype="fp8_e5m2")


def test_pools_agree_on_a_format_by_either_name() -> None:
    pools = {"prefill": "fp8", "decode": "fp8_e4m3"}
    args = {name: {"engine": {"kv_cache_dtype": value}} for name, value in pools.items()}
    ClusterArgs.checked({"engine": {"kv_cache_dtype": "fp8"}, **args})
    args["decode"]["engine"]["kv_cache_dtype"] = "int8"
    with pytest.raises(ConfigError, match=r"decode.engine: the pools must agree on .*kv_cache_dt"):
        ClusterArgs.checked({"engine": {"kv_cache_dtype": "fp8"}, **args})


@pytest.mark.parametrize(("prefill", "decode"), [(100, 200), (100, None)])
def test_a_prefill_worker_takes_what_a_decode_worker_does(prefill: int, decode: int | None) -> None:
    """Or else a prompt that was let in would fail at a worker."""
    args: dict[str, Any] = {
        "prefill": {"engine": {"max_model_len": prefill}},
        "decode": {"engine": {"max_model_len": decode}},
    }
    wanted = rf"prefill\.engine\.max_model_len: {prefill}, .* decode\.engine\.max_model_len"
    with pytest.raises(ConfigError, match=wanted):
        ClusterArgs.checked(args)
    ClusterArgs.checked({**args, "prefill": {**args["prefill"], "replicas": 0}})
    ClusterArgs.checked({"prefill": args["decode"], "decode": args["prefill"]})


def test_nobody_goes_before_others_by_a_priority_that_workers_refuse() -> None:
    def limits(least: int, decode: str, prefill: str = "fcfs") -> RequestLimits:
        pools = {"decode": decode, "prefill": prefill}
        args = {leg: {"engine": {"scheduling_policy": policy}} for leg, policy in pools.items()}
        front = {"front": {"least_priority": least}}
        return ClusterArgs.checked({**args, **front}).request_limits(None)

    for least in (LEAST_PRIORITY, 0, 3):
        by_priority = limits(least, "priority")
        assert by_priority.soonest_priority == least
        by_priority.check_priority(5)
    by_arrival = limits(LEAST_PRIORITY, "fcfs", "priority")
    assert by_arrival.soonest_priority == 0
    by_arrival.check_priority(0)
    for priority in (-1, 1):
        with pytest.raises(RequestError, match="priority: needs the scheduling_policy 'priority'"):
            by_arrival.check_priority(priority)
