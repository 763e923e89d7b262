"""The command line: its flags are the engine's knobs, and its errors name what is wrong."""

import argparse
import os
import shlex
import shutil
import socket
import subprocess
import sys
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trustme

from cluster import api_keys, cli
from cluster.commands import engine_flags, generate, local, sampling_flags, serve
from cluster.commands.front_flags import given_front_flags
from cluster.commands.serve_file import ServeFile
from cluster.commands.serve_front import WishedFront
from cluster.commands.sizes import parse_bytes
from cluster.openai.plan import Plan
from cluster.openai.reading.formats import TOOL_FORMATS
from cluster.text_side import load_text_side
from engine.config import EngineConfig
from engine.errors import ConfigError, RequestError
from engine.model_source import BUNDLED_FOLDER
from engine.sampling import SamplingParams
from engine.text.chat_template import ChatOptions
from tests.cluster.fakes import FakeBackend, small_model, small_tokenizer
from tests.cluster.fakes import say as answering

DEPLOYED = Path(__file__).parents[2] / "deploy/serve.yaml"


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    local.add_arguments(parser)
    return parser.parse_args(words)


def test_a_chat_template_of_the_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.jinja").write_text("{{ bos_token }}{{ tools[0].function.name }}<arg_key>\n")
    path = given_front_flags(parse(["--chat-template", "mine.jinja"]))["chat_template"]
    assert path == str(tmp_path / "mine.jinja")
    text = load_text_side(EngineConfig(), (), path, weights=False)
    model = text.model(2048, 4096)
    tools = [{"type": "function", "function": {"name": "look"}}]
    messages = [{"role": "user", "content": "Hello"}]
    assert model.render(messages, ChatOptions(tools)) == "<|bos|>look<arg_key>"
    assert model.chat_format.tools is TOOL_FORMATS["glm45"]


def test_no_flag_is_the_config_s_default() -> None:
    assert engine_flags.engine_config(parse(["folder"])) == EngineConfig(model="folder")
    assert engine_flags.engine_config(parse([])) == EngineConfig()


def test_every_knob_has_a_flag() -> None:
    for knob in fields(EngineConfig):
        if knob.name == "model":
            continue
        flag = "--" + knob.name.replace("_", "-")
        value: object
        if isinstance(knob.default, bool):
            words, value = ["--no-" + flag.removeprefix("--")], not knob.default
        elif knob.metadata["choices"]:
            value = str(knob.metadata["choices"][-1])
            words = [flag, str(value)]
        elif "bool" in str(knob.type):  # by default it depends
            words, value = [flag], True
        elif knob.name == "block_size":
            words, value = [flag, "32"], 32
        elif "str" in str(knob.type):
            words, value = [flag, "x"], "x"
        elif "int" in str(knob.type):
            words, value = [flag, "3"], 3
        else:
            words, value = [flag, "0.25"], 0.25
        config = engine_flags.engine_config(parse(words))
        assert getattr(config, knob.name) == value
        assert type(getattr(config, knob.name)) is type(value)


def test_a_worker_has_no_flag_for_lines_that_it_does_not_write(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["worker", "--role", "decode", "--log-requests"])
    assert "unrecognized arguments: --log-requests" in capsys.readouterr().err


def test_what_is_announced_has_a_key_where_one_is_asked_for() -> None:
    for asks_key in (False, True):
        said = local.announcement("small", "127.0.0.1", 8000, asks_key=asks_key)
        assert ("-H 'Authorization: Bearer KEY'" in said) is asks_key


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GiB", 16 << 30),
        ("800MB", 800_000_000),
        ("1.5ki", 1536),
        ("4096", 4096),
        ("2g", 2 * 10**9),
        ("1.5TiB", 3 << 39),
        ("1TB", 10**12),
    ],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert parse_bytes("memory", text) == size
    config = engine_flags.engine_config(parse(["--kv-cache-memory-bytes", text]))
    assert config.kv_cache_memory_bytes == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1TiBs", "1e9"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="memory"):
        parse_bytes("memory", text)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["local", "--block-size", "12"], "--block-size: 12, must be a power of two"),
        (["serve", "--block-size", "12"], "--block-size: 12, must be a power of two"),
        (["local", "--dtype", "float64"], "--dtype: 'float64', must be one of auto"),
        (["serve", "--host", "0.0.0.0"], "--host: 0.0.0.0 is beyond this machine"),
        (["serve", "--host", "example.org"], "--host: example.org is beyond"),
        (["local", "--host", "0.0.0.0"], "--host: 0.0.0.0 is beyond this machine"),
        (["local", "--api-key-file", "/no/file"], "--api-key-file: /no/file cannot be read"),
        (["serve", "--api-key-file", "/no/file"], "--api-key-file: /no/file cannot be read"),
        (["local", "--max-n", "0"], "--max-n: must be at least 1"),
        (["serve", "--max-n", "0"], "--max-n: must be at least 1"),
        (
            ["local", "--allowed-origins", "*", "http://a/"],
            "--allowed-origins: 'http://a/', must be",
        ),
        (["serve", "--allowed-origins", "a.b"], "--allowed-origins: 'a.b', must be like"),
        (["serve", "--port", "70000"], "--port: 70000, must be in 0..65535"),
        (
            ["serve", "--host", "192.0.2.1", "--allow-unauthenticated"],
            "--host: 192.0.2.1 is no addr",
        ),
        (
            ["local", "--host", "\udcff", "--allow-unauthenticated"],
            r"--host: '\udcff' is no address here",
        ),
        (["plan", "--context", "0"], "--context: 0, must be in 2..2048"),
        (["local", "--served-model-name", "a", ""], "--served-model-name: must not be empty"),
        (["serve", "--served-model-name", "a", ""], "--served-model-name: must not be empty"),
        (["local", "--max-body-bytes", "1"], "--max-body-bytes: must be at least 1024"),
        (["local", "--request-timeout", "inf"], "--request-timeout: must be at most 86400"),
        (["local", "--request-timeout", "nan"], "--request-timeout: must be at most 86400"),
        (
            ["serve", "--max-body-bytes", "0"],
            "--max-body-bytes: must be at least 1024",
        ),
        (["serve", "--prefill-replicas", "3-1"], "--prefill-replicas: '3-1', must be at most"),
        (["serve", "--decode-replicas", "0"], "--decode-replicas: must be at least 1"),
        (["serve", "--prefill-replicas", "1", "--colocated"], "--prefill-replicas: not with"),
        (["serve", "--colocated", "--local-prefill", "never"], "--local-prefill: 'never' needs"),
        (["local", "/no/such/folder", "--port", "0"], "/no/such/folder: no such folder"),
        (["serve", "/no/such/folder", "--port", "0"], "/no/such/folder: no such folder"),
        (["generate", "bundled", "--prompt", "x", "--system", "y"], "--system: needs --chat"),
        (
            ["generate", "bundled", "--prompt", "x", "--max-tokens", "5000"],
            "--max-tokens: 5000, but",
        ),
        (
            ["generate", "bundled", "--prompt", "x", "--max-model-len", "8", "--max-tokens", "9"],
            "--max-tokens: 9, but this model's maximum context length is 8 tokens",
        ),
        (["generate", "bundled", "--prompt", "x", "--logprobs", "21"], "--logprobs: 21, must be"),
        (["generate", "bundled", "--prompt", "x", "--min-tokens", "300"], "--min-tokens: 300, "),
        (
            ["generate", "bundled", "--prompt", "x", "--logit-bias", "5=101"],
            "--logit-bias[5]: 101.0, must be",
        ),
        (
            ["generate", "bundled", "--prompt", "x", "--chat", "--logprobs", "-1"],
            "--logprobs: -1, must be",
        ),
        (["generate", "bundled", "--prompt", "x", "--sampling-seed", "9" * 30], "--sampling-seed:"),
        (["generate", "bundled", "--prompt", "x", "--seed", "9" * 30], "--seed: must be"),
        (["generate", "bundled", "--prompt", "x y " * 2000], "--prompt: "),
        (["generate", "bundled", "--prompt", "x y " * 2000, "--chat"], "--prompt: "),
        (["serve", "--check", "--port", "-1"], "--port: -1, must be in 0..65535"),
        (
            ["serve", "--check", "--port", "9", "--grpc-port", "9"],
            "--grpc-port: 9, which is the other",
        ),
        (
            ["serve", "--check", "--grpc-port", "8000"],
            "--grpc-port: 8000, which is the other one's",
        ),
        (["serve", "--port", "0", "--secret-file", "/no/file"], "--secret-file: /no/file cannot"),
        (["serve", "--check", "--tls-key", "/no/file"], "--tls-certificate: "),
        (["serve", "--port", "0", "--max-model-len", "9999"], "--max-model-len: 9999, the model"),
        (
            ["serve", "--check", "--gpu-memory-utilization", "0.5"],
            "--gpu-memory-utilization: 0.5, and",
        ),
        (
            ["serve", "--check", "--kv-cache-memory-bytes", "1MiB"],
            "--max-model-len: a sequence of 2048 tokens needs",
        ),
        (
            ["bench", "http://127.0.0.1:1", "--think-time", "nan"],
            "--think-time: must be at least 0, and",
        ),
        (["plan", "bundled", "--memory", "9" * 400], "--memory: is more than any machine has"),
        (
            ["local", "--chat-template", "/no/file", "--port", "0"],
            "--chat-template: /no/file: cannot",
        ),
        (
            ["serve", "--chat-template", "/no/file", "--port", "0"],
            "--chat-template: /no/file: cannot",
        ),
    ],
)
def test_wrong_values_are_told_in_one_line(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvrelay {words[0]}: {reason}")
    assert error.count("\n") == 1


def test_certificates_that_no_worker_could_start_with_are_told_before(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    for name in ("ours", "other"):
        issued = authority.issue_cert("127.0.0.1")
        issued.cert_chain_pems[0].write_to_path(str(tmp_path / f"{name}.pem"))
        issued.private_key_pem.write_to_path(str(tmp_path / f"{name}.key"))
    ca, certificate = ("--tls-authority", "ca.pem"), ("--tls-certificate", "ours.pem")

    def told(*words: str) -> str:
        paths = [str(tmp_path / word) if word[0] != "-" else word for word in words]
        assert cli.main(["serve", "--check", *paths]) == 2
        return capsys.readouterr().err

    assert told(*ca).startswith("kvrelay serve: --tls-certificate: a worker needs one, with")
    assert "other.key is not the key of" in told(*ca, *certificate, "--tls-key", "other.key")


@pytest.mark.parametrize(
    "words", [["local", "--port", "0"], ["serve", "--port", "0"], ["generate", "--prompt", "x"]]
)
def test_a_model_without_a_tokenizer_is_refused_before_its_weights_are_read(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.copy(BUNDLED_FOLDER / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"which would be told too")
    command, *flags = words
    assert cli.main([command, str(tmp_path), *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvrelay {command}: {tmp_path}/tokenizer.json: not there, and the")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["local", "--port", "0"],
        ["serve", "--port", "0"],
        ["serve", "--check"],
        ["generate", "--prompt", "x"],
        ["worker", "--role", "decode", "--listen", "127.0.0.1:0"],
    ],
)
def test_wrong_defaults_of_a_model_are_told_before_its_weights_are_read(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(BUNDLED_FOLDER / name, tmp_path)
    (tmp_path / "generation_config.json").write_text('{"top_p": 2}')
    (tmp_path / "model.safetensors").write_bytes(b"which would be told too")
    command, *flags = words
    assert cli.main([command, str(tmp_path), *flags]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"kvrelay {command}: {tmp_path}/generation_config.json: top_p: 2, must")


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("", "", None),
        ("replicas: 1", "replicas: none", "prefill.replicas: 'none', must be"),
        ("replicas: 1", "replcas: 1", "prefill.replcas: unknown option"),
        ("import_path: cluster.app:build", "", "applications.0.import_path: must be given"),
        ("port: 8000", "port: many", "http_options.port: must be a whole number"),
        ("port: 8000", "prot: 8000", "http_options.prot: unknown option"),
        ("port: 8000", "port: 99999", "http_options.port: 99999, must be in 0..65535"),
        ("port: 8000", 'port: "8001"', None),
        ("host: 127.0.0.1", "host: 0.0.0.0", "http_options.host: 0.0.0.0 is beyond this"),
        ("replicas: 1", "replicas: true", "prefill.replicas: True, must be a number, or"),
        ("num_cpus: 1", "replicas: 2", "--config: "),
        ("num_cpus: 1", "num_gpus: 1.5", "prefill.num_gpus: 1.5, must be a whole number above 1"),
        ("num_cpus: 1", "num_cpus: 0.00001", "prefill: The precision of the fractional quantity"),
        ("num_cpus: 1", "resources: {GPU: 1}", "prefill: Use the 'num_cpus' and 'num_gpus'"),
        ("num_cpus: 0", "label_selector: {role: in(x}", "ingress: Invalid label selector value"),
        ("    args:", "    arg:", "applications.0.arg: unknown option"),
        ("model: bundled", "model: /no/folder", "/no/folder: no such folder"),
        ("cluster.app:build", "cluster.app:built", "applications.0.import_path: cluster.app:built"),
        (
            "autoscaling:scale",
            "autoscaling:scal",
            "applications.0.autoscaling_policy: cluster.aut",
        ),
        (
            "autoscaling:scale",
            "autscaling:scale",
            "applications.0.autoscaling_policy: cluster.aut",
        ),
    ],
)
def test_a_serve_config_file_is_checked_and_nothing_started(
    before: str,
    after: str,
    reason: str | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.delattr(serve, "serve_cluster")
    file = tmp_path / "serve.yaml"
    file.write_text(DEPLOYED.read_text().replace(before, after, 1))
    status = cli.main(["serve", "--check", "--config", str(file)])
    said = capsys.readouterr().err
    assert status == (0 if reason is None else 2)
    assert said.startswith(f"kvrelay serve: {reason}" if reason else "bundled: nothing of it")
    assert said.count("\n") == 1


ROLE = "role: decode\n"


@pytest.mark.parametrize(
    ("command", "file", "flags", "name"),
    [
        ("serve", "engine: {max_model_len: 1}", [], "engine.max_model_len"),
        ("serve", "engine: {max_model_len: 9999}", [], "engine.max_model_len"),
        ("serve", "engine: {max_model_len: 9}", ["--max-model-len", "9999"], "--max-model-len"),
        ("serve", "decode: {engine: {max_model_len: 1}}", [], "decode.engine.max_model_len"),
        ("serve", "prefill: {engine: {max_model_len: 9999}}", [], "prefill.engine.max_model_len"),
        (
            "serve",
            "decode: {engine: {max_model_len: 9999}}\nengine: {max_model_len: 99999}",
            [],
            "engine.max_model_len",
        ),
        (
            "serve",
            "decode: {engine: {kv_cache_memory_bytes: 9}}",
            [],
            "decode.engine.max_model_len",
        ),
        ("serve", "engine: {kv_cache_memory_bytes: 9}", [], "engine.max_model_len"),
        ("serve", "front: {max_n: 0}", [], "front.max_n"),
        ("serve", "front: {max_n: 3}", ["--max-n", "0"], "--max-n"),
        ("serve", "drain_s: -1", [], "drain_s"),
        ("serve", "", ["--drain", "-1"], "--drain"),
        ("serve", "", ["--port", "70000"], "--port"),
        ("worker", ROLE + "engine: {max_model_len: 1}", [], "engine.max_model_len"),
        ("worker", ROLE + "engine: {max_model_len: 9999}", [], "engine.max_model_len"),
        ("worker", ROLE, ["--max-model-len", "9999"], "--max-model-len"),
        ("worker", ROLE + "rpc: {secret_file: /none}", [], "rpc.secret_file"),
        ("worker", ROLE, ["--secret-file", "/none"], "--secret-file"),
    ],
)
def test_what_is_wrong_is_named_as_it_was_said(
    command: str,
    file: str,
    flags: list[str],
    name: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.delenv("KVRELAY_SECRET", raising=False)
    path = tmp_path / "file.yaml"
    path.write_text(file)
    check = ["--check"] if command == "serve" else []
    assert cli.main([command, *check, "--config", str(path), *flags]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"kvrelay {command}: {name}: ")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "required: COMMAND"),
        (["dance"], "invalid choice"),
        (
            ["serve", "--blok-size", "16"],
            "unrecognized arguments: --blok-size; see `kvrelay serve -",
        ),
        (["serve", "--block-siz", "16"], "unrecognized arguments: --block-siz"),
        (["serve", "--max-num-seqs", "many"], "--max-num-seqs: 'many', must be a whole number"),
        (["serve", "--watermark", "x"], "--watermark: 'x', must be a number"),
        (["generate", "bundled", "--min-p", "x"], "--min-p: 'x', must be a number"),
        (["generate", "bundled", "--logit-bias", "x"], "--logit-bias: 'x', must be like 17=-2.5"),
        (["serve", "--swap-space-bytes", "1XB"], "--swap-space-bytes: '1XB', must be a size such"),
        (["generate", "bundled"], "required: --prompt"),
    ],
)
def test_wrong_words_are_told_in_one_line_that_names_the_help(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert reason in error
    assert "--help" in error
    assert error.count("\n") == 1


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"kvrelay {metadata.version('kvrelay')}\n"


def with_stdout(stdout: int, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cluster.cli", *words]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("words", [["plan"], ["--version"]])
def test_an_answer_that_there_is_no_room_for(words: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = with_stdout(full.fileno(), *words)
    assert (done.returncode, done.stderr) == (1, "kvrelay: stdout: No space left on device\n")


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-"])
@pytest.mark.parametrize(
    ("words", "status"), [("plan /no/folder", 2), ("dance", 2), ("--version >/dev/full", 1)]
)
def test_what_stderr_does_not_take_is_dropped(words: str, status: int, redirection: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m cluster.cli {words} {redirection}"
    done = subprocess.run(command, shell=True, stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (status, b"")


def test_an_answer_whose_reader_has_left() -> None:
    reader, stdout = os.pipe()
    os.close(reader)
    done = with_stdout(stdout, "plan", "--help")
    os.close(stdout)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_an_answer_of_which_a_terminal_has_no_letters(encoding: str) -> None:
    reader, stdout = os.pipe()
    words = "from cluster.commands.console import answer; answer('a \\u4e16 \\udcff')"
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(
        [sys.executable, "-c", words], stdout=stdout, stderr=subprocess.PIPE, env=environment
    )
    os.close(stdout)
    with open(reader, encoding=encoding) as told:
        assert told.read() == ("a 世 \\udcff\n" if encoding == "utf-8" else "a \\u4e16 \\udcff\n")
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_answer_without_a_stdout() -> None:
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "cluster.cli", "--version"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "kvrelay: stdout: is closed\n")


def test_ctrl_c_while_a_command_is_imported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_module", interrupted)
    assert cli.main(["plan"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("words", [["plan"], ["serve", "--check", "--api-key-file", "keys"]])
def test_a_working_directory_that_is_gone(
    tmp_path: Path,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert cli.main(words) == 2
    reason = "working directory: it has been removed; go to another"
    assert capsys.readouterr().err == f"kvrelay {words[0]}: {reason}\n"


def test_an_address_in_use_is_told_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", "/no/such/folder", "--port", str(port)]) == 2
    assert f"--port: {port} on 127.0.0.1: Address already in use" in capsys.readouterr().err


@pytest.mark.parametrize(("field", "value"), [("listen", "127.0.0.1:{}"), ("data_port", "{}")])
def test_a_workers_ports_are_tried_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], field: str, value: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flag = "--" + field.replace("_", "-")
        words = ["worker", "/no/such/folder", "--role", "decode", flag, value.format(port)]
        assert cli.main(words) == 2
    reason = (
        f"kvrelay worker: {flag}: 127.0.0.1:{port} cannot be listened on: Address already in use"
    )
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_help_comes_without_torch(command: str) -> None:
    code = (
        "import sys\nfrom cluster import cli\n"
        "try:\n    cli.main(sys.argv[1:])\n"
        "except SystemExit:\n    print('torch' in sys.modules, file=sys.stderr)"
    )
    words = [sys.executable, "-c", code, command, "--help"]
    result = subprocess.run(words, capture_output=True, text=True)
    assert result.stdout.startswith(f"usage: kvrelay {command}")
    assert result.stderr == "False\n"


def plan_of(words: list[str]) -> Plan:
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    return generate.make_plan(parser.parse_args(["bundled", *words]), small_model())


def test_generate_goes_by_the_rules_of_the_http_api() -> None:
    plan = plan_of(["--prompt", "Tell me", "--top-k", "3", "--stop", "a", "--stop", "b"])
    assert list(plan.prompts[0].token_ids) == small_tokenizer().encode("Tell me")
    assert (plan.params.top_k, plan.params.stop) == (3, ("a", "b"))
    assert plan.params.max_tokens == 256
    chat = plan_of(["--prompt", "Hi", "--chat", "--system", "Be brief.", "--max-tokens", "5"])
    text = small_tokenizer().decode(chat.prompts[0].token_ids)
    assert text == (
        "<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert chat.params.max_tokens == 5


SAID = {
    "max_tokens": ("--max-tokens 9", 9),
    "min_tokens": ("--min-tokens 3", 3),
    "temperature": ("--temperature 0.5", 0.5),
    "top_p": ("--top-p 0.5", 0.5),
    "top_k": ("--top-k 3", 3),
    "min_p": ("--min-p 0.1", 0.1),
    "repetition_penalty": ("--repetition-penalty 1.1", 1.1),
    "presence_penalty": ("--presence-penalty -1", -1.0),
    "frequency_penalty": ("--frequency-penalty -0.5", -0.5),
    "logit_bias": ("--logit-bias 5=-100 --logit-bias 6=1.5", {5: -100.0, 6: 1.5}),
    "allowed_token_ids": ("--allowed-token-ids 5 6", (5, 6)),
    "stop": ("--stop a --stop b", ("a", "b")),
    "stop_token_ids": ("--stop-token-ids 7", (7,)),
    "include_stop_str_in_output": ("--include-stop-str-in-output", True),
    "ignore_eos": ("--ignore-eos", True),
    "seed": ("--sampling-seed 4", 4),
    "logprobs": ("--logprobs 2", 2),
    "prompt_logprobs": ("--prompt-logprobs 0", 0),
}


@pytest.mark.parametrize("chat", [[], ["--chat"]])
def test_generate_has_a_flag_for_what_a_request_may_ask_of_one_answer(chat: list[str]) -> None:
    names = {field.name for field in fields(SamplingParams)}
    assert SAID.keys() == names - sampling_flags.NOT_HERE
    words = [word for flag, _ in SAID.values() for word in flag.split()]
    params = plan_of(["--prompt", "Hi", *chat, *words]).params
    assert {name: getattr(params, name) for name in SAID} == {
        name: value for name, (_, value) in SAID.items()
    }
    nothing = plan_of(["--prompt", "Hi", *chat]).params
    assert replace(nothing, seed=None, max_tokens=None) == SamplingParams()


async def test_generate_tells_logprobs(capsys: pytest.CaptureFixture[str]) -> None:
    model = small_model()
    plan = plan_of(["--prompt", "The fox", "--logprobs", "1", "--prompt-logprobs", "0"])
    engine: Any = SimpleNamespace(backend=FakeBackend(answering("fox")))
    await generate._answer(engine, model, plan, stream=False)
    said = capsys.readouterr()
    assert said.out == "fox\n"
    prompt, answer = said.err.split("the answer's tokens")
    told = [line.split("'")[1] for line in prompt.splitlines() if line.startswith("  ")]
    text = "".join(told)
    assert text
    assert "The fox".endswith(text), "all but the first token"
    (first, *_) = [line for line in answer.splitlines() if line.startswith("  ")]
    token = model.tokenizer.encode("fox")[0]
    own = f"{model.tokenizer.decode([token])!r} {-token / 1000:.3f}"
    assert first == f"  {own} #1  {own}"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--temperature", "nan"], "temperature: must be a finite number"),
        (["--top-k", "-5"], "top_k: -5, must be at least 0"),
        (["--chat", "--prompt", "x " * 3000], "prompt: "),
        (["--sampling-seed", "9" * 30], "sampling_seed: too large"),
    ],
)
def test_what_generate_refuses_names_the_field_once(words: list[str], reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        plan_of(["--prompt", "x", *words])
    field = reason.partition(":")[0]
    assert str(caught.value).startswith(reason)
    assert str(caught.value).count(f"{field}:") == 1


def test_a_plan_says_what_does_not_fit_and_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    on_cpu = ["plan", "bundled", "--device", "cpu", "--memory"]
    assert cli.main([*on_cpu, "20MB"]) == 0
    table = capsys.readouterr().out
    assert "fp32: a sequence of 2048 tokens needs 12.2 MiB of cache; the longest that" in table
    longest = table.rsplit("has ", 1)[1].split()[0]
    assert cli.main([*on_cpu, "20MB", "--context", longest]) == 0
    assert "fp32:" not in capsys.readouterr().out
    assert cli.main([*on_cpu, "5MB"]) == 1
    assert "of 4.8 MiB, nothing left for the cache" in capsys.readouterr().out
    assert cli.main([*on_cpu, "900000000TB"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert all(len(row.split()) == 6 for row in rows if row.startswith(("bf16 ", "int8 ")))


@pytest.mark.parametrize(
    "more", ["runtime_env: {env_vars: {A: b}}", "deployments: [{name: decode}]", "route_prefix: /v"]
)
def test_what_only_serve_keeps_to_is_not_dropped(
    more: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "serve.yaml"
    text = DEPLOYED.read_text().replace("    route_prefix: /\n", f"    {more}\n")
    file.write_text(text)
    assert cli.main(["serve", "--config", str(file)]) == 2
    assert f"{more.partition(':')[0]}: is for `serve run`" in capsys.readouterr().err
    assert cli.main(["serve", "--check", "--config", str(file)]) == 0


def test_the_serve_config_of_a_ray_service_is_checked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the model, which is where the pods have it."""
    monkeypatch.setenv(api_keys.VARIABLE, "a-key-of-some-letters")
    text = (DEPLOYED.parent / "rayservice.yaml").read_text()
    here = text.replace("model: /models/model", "model: bundled")
    file = tmp_path / "rayservice.yaml"

    def told(text: str) -> str:
        file.write_text(text)
        assert cli.main(["serve", "--check", "--config", str(file)]) == 2
        return capsys.readouterr().err

    file.write_text(here)
    assert cli.main(["serve", "--check", "--config", str(file)]) == 0
    assert "nothing of it is refused" in capsys.readouterr().err
    assert "/models/model: no such folder" in told(text)
    wrong = here.replace("label_selector: {kvrelay-role: decode}", "label_selectors: {a: b}")
    assert "decode.label_selectors: unknown option" in told(wrong)
    wrong = here.replace("proxy_location: EveryNode", "proxy_locations: EveryNode")
    assert "proxy_locations: " in told(wrong)
    wrong = here.replace("    applications:\n", "    application:\n")
    assert "applications: must be given" in told(wrong)
    wrong = here.replace("http_options: {host", "http_options: {{host")
    assert "spec.serveConfigV2 is no YAML: " in told(wrong)
    missing = "spec.serveConfigV2: must be given: the Serve config, as a text"
    assert missing in told("kind: RayService\n")
    assert missing in told(here.replace("serveConfigV2: |", "serveConfigV2:"))
    file.write_text(here)
    with pytest.raises(ConfigError, match="^kind: a RayService is for `kubectl apply`, and for --"):
        ServeFile.read(file).check_only_ours()


def test_a_ray_service_is_found_beside_what_else_is_applied(tmp_path: Path) -> None:
    text = (DEPLOYED.parent / "rayservice.yaml").read_text()
    secret = "apiVersion: v1\nkind: Secret\nstringData: {secret: some-letters}\n"
    file = tmp_path / "all.yaml"
    file.write_text(text)
    alone = ServeFile.read(file)
    assert alone.is_ray_service
    for documents in ([secret, text], [text, secret, ""], ["", text]):
        file.write_text("---\n".join(documents))
        assert ServeFile.read(file) == alone
    for documents in ([text, text], [secret, secret]):
        file.write_text("---\n".join(documents))
        with pytest.raises(ConfigError, match="^config: .*all.yaml has 2 documents, must have one"):
            ServeFile.read(file)


def test_the_front_of_a_serve_file_is_where_it_says() -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    file = ServeFile({}, "0.0.0.0", 18000, 9000)
    assert WishedFront.of(parser.parse_args([]), file) == ("0.0.0.0", 18000, 9000)
    flags = parser.parse_args(["--port", "0", "--host", "::1"])
    assert WishedFront.of(flags, file) == ("::1", 0, 9000)


def test_ray_takes_no_lines_of_replicas_for_one() -> None:
    """Also where it is imported to read a file."""
    script = (
        "from cluster import cli; cli.main(['serve', '--check', '--config', 'deploy/serve.yaml']);"
        "from ray._private import ray_logging; print(ray_logging.RAY_DEDUP_LOGS)"
    )
    environment = {name: value for name, value in os.environ.items() if "RAY" not in name}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=DEPLOYED.parents[1],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"
