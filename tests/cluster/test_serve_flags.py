"""What becomes of the words of `kvrelay serve`, beside a file's."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from cluster.api_keys import VARIABLE
from cluster.cluster_args import ClusterArgs
from cluster.commands import serve

HERE = {"worker_host": "127.0.0.1"}  # where a cluster is started
HOME = str(Path.cwd())
# Words, what they say, and a file that says otherwise.
Row = tuple[str, dict[str, Any], dict[str, Any]]


def of_front(name: str, word: str, said: object, other: object) -> Row:
    return f"--{name.replace('_', '-')} {word}", {"front": {name: said}}, {"front": {name: other}}


def of_plane(name: str) -> Row:
    words = f"--{name.replace('_', '-')} x/y"
    said = "x/y" if name == "tls_server_name" else f"{HOME}/x/y"
    return words, {"rpc": {name: said}}, {"rpc": {name: "/other"}}


FLAGS: list[Row] = [
    ("a/folder", {"model": "a/folder"}, {"model": "another"}),
    ("--served-model-name a b", {"served_model_name": ["a", "b"]}, {"served_model_name": ["c"]}),
    ("--prefill-replicas 2", {"prefill": {"replicas": "2"}}, {"prefill": {"replicas": 3}}),
    ("--decode-replicas 1-4", {"decode": {"replicas": "1-4"}}, {"decode": {"replicas": 3}}),
    ("--ingress-replicas 2", {"ingress": {"replicas": "2"}}, {"ingress": {"replicas": "1-4"}}),
    ("--colocated", {"prefill": {"replicas": 0}}, {"prefill": {"replicas": 3}}),
    ("--local-prefill never", {"local_prefill": "never"}, {"local_prefill": "always"}),
    ("--connector socket", {"connector": "socket"}, {"connector": "nixl"}),
    ("--drain 5.5", {"drain_s": 5.5}, {"drain_s": 7}),
    ("--request-timeout 9.5", {"request_timeout_s": 9.5}, {"request_timeout_s": 7}),
    ("--max-body-bytes 4096", {"max_body_bytes": 4096}, {"max_body_bytes": 2048}),
    of_front("api_key_file", "x/y", f"{HOME}/x/y", "/other"),
    of_front("chat_template", "x/y", f"{HOME}/x/y", "/other"),
    of_front("allow_unauthenticated", "", True, False),
    of_front("allowed_origins", "http://a http://b", ["http://a", "http://b"], ["*"]),
    of_front("requests_per_minute", "3", 3, 4),
    of_front("tokens_per_minute", "3", 3, 4),
    of_front("max_prompt_tokens", "3", 3, 4),
    of_front("max_n", "3", 3, 4),
    of_front("max_prompts", "3", 3, 4),
    of_front("least_priority", "-3", -3, 4),
    of_front("tool_call_parser", "hermes", "hermes", "none"),
    of_front("reasoning_parser", "none", "none", "auto"),
    *[of_plane(f"tls_{name}") for name in ("certificate", "key", "authority", "server_name")],
    of_plane("secret_file"),
    ("--log-format json", {"log": {"format": "json"}}, {"log": {"format": "text"}}),
    ("--log-requests", {"log": {"requests": True}}, {"log": {"requests": False}}),
    (
        "--metrics-targets-file x/y",
        {"metrics_targets_file": f"{HOME}/x/y"},
        {"metrics_targets_file": "/other"},
    ),
    ("--max-num-seqs 3", {"engine": {"max_num_seqs": 3}}, {"engine": {"max_num_seqs": 4}}),
]
NOT_OF_ARGS = {"help", "config", "check", "host", "port", "grpc_port"}


@pytest.fixture(autouse=True)
def of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", VARIABLE):
        monkeypatch.delenv(name, raising=False)


def parse(words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(words.split())


def args(**said: Any) -> ClusterArgs:
    return ClusterArgs.checked({**HERE, **said})


@pytest.mark.parametrize(("words", "said", "other"), FLAGS, ids=[words for words, *_ in FLAGS])
def test_a_flag_is_its_argument_and_wins_over_the_file(
    words: str, said: dict[str, Any], other: dict[str, Any]
) -> None:
    assert args(**said) not in (args(), args(**other))
    assert serve.cluster_args(parse(words), {}) == args(**said)
    assert serve.cluster_args(parse(words), other) == args(**said)
    assert serve.cluster_args(parse(""), other) == args(**other)


def test_every_flag_is_there() -> None:
    """The engine's are made of its knobs, and so is their own test."""
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    first = {words.split()[0] for words, *_ in FLAGS}
    for action in parser._actions:
        is_knob = action.dest.startswith("knob_")
        if action.option_strings and action.dest not in NOT_OF_ARGS and not is_knob:
            assert first & {*action.option_strings}, action.dest


def test_what_a_flag_does_not_speak_of_stays_the_file_s() -> None:
    file = {
        "prefill": {"replicas": 3, "num_gpus": 1, "engine": {"block_size": 32}},
        "engine": {"block_size": 32, "max_num_seqs": 4},
        "front": {"max_n": 3},
    }
    both = serve.cluster_args(parse("--prefill-replicas 2 --max-num-seqs 5 --max-prompts 2"), file)
    assert both == args(
        prefill={"replicas": "2", "num_gpus": 1, "engine": {"block_size": 32}},
        engine={"block_size": 32, "max_num_seqs": 5},
        front={"max_n": 3, "max_prompts": 2},
    )


def test_workers_listen_for_this_machine_alone_where_ray_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = {"worker_host": "192.0.2.1"}
    assert serve.cluster_args(parse(""), file).worker_host == "127.0.0.1"
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.2:6379")
    assert serve.cluster_args(parse(""), file).worker_host == "192.0.2.1"
    assert serve.cluster_args(parse(""), {}).worker_host == "node"


def test_keys_in_the_environment_are_asked_for_wherever_an_ingress_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "a-key")
    front = {"max_n": 3}
    asked = serve.cluster_args(parse(""), {"front": {**front, "require_api_key": False}})
    assert asked == args(front={**front, "require_api_key": True})
