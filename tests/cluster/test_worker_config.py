import argparse
import math
from pathlib import Path
from typing import Any

import pytest

from cluster import cli
from cluster.commands import worker
from cluster.worker_config import ConnectorChoice, WorkerConfig, WorkerRole, read_options
from engine.config import EngineConfig
from engine.errors import ConfigError
from kv_transfer.config import ExchangeConfig
from protos.rpc import RpcConfig

WHOLE = """
role: decode
listen: 10.0.0.7:9000
connector: socket
data_port: 9001
advertise: gpu-7
drain_s: 5
rpc:
  secret_file: /etc/kvrelay/secret
  tls_server_name: workers
exchange:
  checksums: true
  max_quarantined_share: 0.5
engine:
  model: some/model
  block_size: 32
"""


def config_of(words: list[str]) -> WorkerConfig:
    parser = argparse.ArgumentParser()
    worker.add_arguments(parser)
    return worker.worker_config(parser.parse_args(words))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "worker.yaml"
    path.write_text(WHOLE)
    return path


def test_a_file_says_everything(file: Path) -> None:
    assert config_of(["--config", str(file)]) == WorkerConfig(
        WorkerRole.DECODE,
        "10.0.0.7:9000",
        ConnectorChoice.SOCKET,
        9001,
        "gpu-7",
        5,
        RpcConfig(secret_file="/etc/kvrelay/secret", tls_server_name="workers"),
        ExchangeConfig(checksums=True, max_quarantined_share=0.5),
        EngineConfig(model="some/model", block_size=32),
    )


def test_flags_win_key_by_key(file: Path) -> None:
    words = ["--role", "prefill", "--block-size", "64", "--secret-file", "mine", "other/model"]
    config = config_of(["--config", str(file), *words])
    assert config.role is WorkerRole.PREFILL
    assert config.engine == EngineConfig(
        model="other/model", block_size=64, scheduling_policy="shortest"
    )
    assert config.rpc == RpcConfig(
        secret_file=str(Path("mine").absolute()), tls_server_name="workers"
    )
    assert config.data_port == 9001


def test_prompts_go_by_length_on_a_prefill_worker_unless_it_is_told_otherwise() -> None:
    assert config_of(["--role", "prefill"]).engine.scheduling_policy == "shortest"
    assert config_of(["--role", "decode"]).engine.scheduling_policy == "fcfs"
    words = ["--role", "prefill", "--scheduling-policy", "fcfs"]
    assert config_of(words).engine.scheduling_policy == "fcfs"


def test_flags_alone_are_enough() -> None:
    assert config_of(["--role", "decode"]) == WorkerConfig(WorkerRole.DECODE)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("role", {}),
        ("role", {"role": "both"}),
        ("role", {"role": None}),
        ("lisen", {"lisen": "x"}),
        ("listen", {"listen": 8000}),
        ("listen", {"listen": "8000"}),
        ("listen", {"listen": "host:70000"}),
        ("connector", {"connector": "carrier pigeon"}),
        ("data_port", {"data_port": 70000}),
        ("data_port", {"data_port": "9001"}),
        ("data_port", {"data_port": True}),
        ("data_port", {"data_port": 9000, "listen": "10.0.0.7:9000"}),
        ("drain_s", {"drain_s": -1}),
        ("drain_s", {"drain_s": float("nan")}),
        ("advertise", {"listen": "0.0.0.0:9000"}),
        ("advertise", {"advertise": 7}),
        ("rpc", {"rpc": "secret"}),
        ("rpc.secret", {"rpc": {"secret": "in the open"}}),
        ("rpc.secret_file", {"rpc": {"secret_file": 7}}),
        ("exchange", {"exchange": 7}),
        ("exchange.leases", {"exchange": {"leases": 7}}),
        ("exchange.checksums", {"exchange": {"checksums": 1}}),
        ("exchange.max_leases", {"exchange": {"max_leases": 1.5}}),
        ("exchange.max_leases", {"exchange": {"max_leases": 0}}),
        ("exchange.max_quarantined_share", {"exchange": {"max_quarantined_share": 2}}),
        ("exchange.stuck_after_s", {"exchange": {"stuck_after_s": float("nan")}}),
        ("exchange.slow_bytes_per_s", {"exchange": {"slow_bytes_per_s": -1}}),
        ("exchange.slow_bytes_per_s", {"exchange": {"slow_bytes_per_s": math.inf}}),
        ("exchange.unreachable_patience_s", {"exchange": {"unreachable_patience_s": math.nan}}),
        ("exchange.unreachable_patience_s", {"exchange": {"unreachable_patience_s": -1}}),
        ("engine", {"engine": ["model"]}),
        ("engine.blok_size", {"engine": {"blok_size": 16}}),
        ("engine.block_size", {"engine": {"block_size": 12}}),
    ],
)
def test_what_is_wrong_is_named(field: str, options: dict[str, Any]) -> None:
    if field != "role":
        options = {"role": "decode", **options}
    with pytest.raises(ConfigError) as caught:
        WorkerConfig.from_mapping(options)
    assert caught.value.field == field


@pytest.mark.parametrize("text", ["role: [", "- role", "[7]: x", "\x00", "!!python/object:os.x {}"])
def test_a_file_that_is_no_mapping(tmp_path: Path, text: str) -> None:
    path = tmp_path / "worker.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_options(path)
    assert caught.value.field == "config"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "place", "name"),
    [
        ("role: decode\n7: x", "7", "7"),
        ("true: x", "true", "true"),
        ("null: x", "null", "null"),
        ("? \n: x", "null", "null"),
        ("2026-01-01: x", "2026-01-01", "2026-01-01"),
        ("exchange: {on: 3}", "exchange.on", "on"),
        ("a: {b: &b {c: 1}, d: *b}\ne: {f: [1, {g: {1.5: x}}]}", "e.f.1.g.1.5", "1.5"),
    ],
)
def test_a_name_that_is_no_text_is_told_as_it_is_written(
    tmp_path: Path, text: str, place: str, name: str
) -> None:
    path = tmp_path / "worker.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_options(path)
    assert str(caught.value) == f'{place}: a name must be a text: "{name}", in quotes'
    path.write_text('{"7": x, "null": x, "on": x}')
    assert read_options(path).keys() == {"7", "null", "on"}


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "worker.yaml"
    for text in ("", "---\n", "# nothing\n---\n---\n"):
        path.write_text(text)
        assert read_options(path) == {}
    with pytest.raises(ConfigError, match="config: .*cannot be read"):
        read_options(tmp_path / "absent")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["worker"], "--role: must be given: prefill or decode"),
        (["worker", "--role", "decode", "--listen", "0.0.0.0:1"], "--advertise: must say"),
        (
            ["worker", "--role", "decode", "--listen", "192.0.2.1:1"],
            "--listen: 192.0.2.1:1 is",
        ),
        (["worker", "--role", "decode", "--secret-file", "/none"], "--secret-file: /none cannot"),
        (["worker", "--role", "decode", "--tls-key", "x"], "--tls-certificate: certificate and"),
        (["worker", "--config", "/no/such"], "--config: /no/such cannot be read"),
        (
            ["generate", "bundled", "--prompt", "x", "--prefill", "h:1"],
            "--prefill: needs --session",
        ),
        (["local", "--port", "0", "--secret-file", "x"], "--secret-file: needs --session"),
        (["local", "--local-prefill", "auto"], "--local-prefill: needs --session"),
        (
            ["local", "--session", "h:1", "--local-prefill", "never"],
            "--local-prefill: 'never' needs --prefill",
        ),
        (["local", "--port", "0", "--session", "h"], "--session: 'h', must be HOST:PORT"),
        (
            ["local", "--port", "0", "--session", "h:1", "--block-size", "16"],
            "--block-size: is the worker's own",
        ),
        (
            ["generate", "bundled", "--prompt", "x", "--session", "127.0.0.1:1"],
            "127.0.0.1:1: UNAVAILABLE: ",
        ),
    ],
)
def test_wrong_values_are_told_in_one_line(
    words: list[str],
    reason: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KVRELAY_SECRET", raising=False)
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvrelay {words[0]}: {reason}")
    assert error.count("\n") == 1


def test_a_bound_is_told_to_its_last_digit() -> None:
    with pytest.raises(ConfigError, match="max_leases: 0, must be above 0, at most 1048576$"):
        WorkerConfig.from_mapping({"role": "decode", "exchange": {"max_leases": 0}})


def test_a_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "worker.yaml"
    path.write_text("---\nrole: decode\n---\n")
    assert read_options(path) == {"role": "decode"}
    path.write_text("role: decode\n---\nrole: prefill\n")
    with pytest.raises(ConfigError, match="^config: .*worker.yaml has 2 documents, must have one"):
        read_options(path)


def test_a_name_that_stands_twice_is_refused(tmp_path: Path) -> None:
    """Or the first would be lost; a merged mapping's names may be said anew."""
    path = tmp_path / "twice.yaml"
    path.write_text("engine: {block_size: 32}\nrole: decode\nengine: {max_num_seqs: 8}\n")
    with pytest.raises(ConfigError, match="'engine' stands there twice"):
        read_options(path)
    path.write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\n")
    assert read_options(path)["b"] == {"x": 3, "y": 2}
    path.write_text("a: &a {x: 1}\nb: {c: &c {<<: *a, x: 3}}\nd: {<<: *c, y: 2}\n")
    assert read_options(path)["b"] == {"c": {"x": 3}}
    tagged = [f"a: !!{tag}" for tag in ("map [1]", "map foo", "bool foo", "int", "timestamp foo")]
    for text in (*tagged, "engine: {revision: 2024-31-12}"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="config: .*no YAML"):
            read_options(path)
    path.write_text("[" * 5000)
    with pytest.raises(ConfigError, match="nested too deep"):
        read_options(path)
