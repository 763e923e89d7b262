"""Models by name: downloads through HF_ENDPOINT, and what goes wrong with them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from engine.errors import ModelError
from engine.fingerprint import fingerprint
from engine.generation_defaults import read_generation_defaults
from engine.model_source import BUNDLED_FOLDER, ModelSource, resolve_model
from engine.models.describe import describe
from tests.engine.models.hub_server import Hub, Repository

FIRST, SECOND, OTHER = "1" * 40, "2" * 40, "3" * 40
WEIGHTS = save({"w": torch.ones(3)})
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"x",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"not wanted",
    "consolidated.safetensors": b"not wanted",
    "original/model.safetensors": b"not wanted",
    "adapters/adapter_config.json": b"not wanted",
    "additional_chat_templates/tool_use.jinja": b"y",
    "README.md": b"not wanted",
}
WANTED = {
    "config.json",
    "tokenizer.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "model.safetensors",
}

# Resolves every call of the list on stdin, in one process that has the environment to be tested.
PROGRAM = """if True:
    import json, sys
    from engine.errors import ModelError
    from engine.model_source import resolve_model
    answers = []
    for call in json.load(sys.stdin):
        try:
            source = resolve_model(**call)
            answers.append({"folder": str(source.folder), "commit": source.commit})
        except ModelError as error:
            answers.append({"error": str(error)})
    print(json.dumps(answers))
"""


# Plans a model of the hub, and loads its text and its engine, with one name, revision and place.
SERVING = """if True:
    import json, sys
    from cluster import cli
    from cluster.text_side import load_text_side
    from engine.config import EngineConfig
    from engine.engine import Engine
    words = ["some/served", "--revision", "v2", "--download-dir", sys.argv[1]]
    status = cli.main(["plan", *words])
    config = EngineConfig(
        model="some/served", revision="v2", download_dir=sys.argv[1], kernels="reference",
        kv_cache_memory_bytes=4 << 20, max_model_len=64,
    )
    text = load_text_side(config, (), None, weights=True)
    engine = Engine.create(config)
    engine.close()
    folders = [str(source.folder) for source in (text.source, engine.info.source)]
    print(json.dumps([status, folders, engine.info.fingerprint, engine.limits.fingerprint]))
"""


def files_in(folder: str) -> set[str]:
    root = Path(folder)
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}


@dataclass
class Client:
    hub: Hub
    home: Path
    stderr: str = ""

    def resolve(self, *calls: dict[str, Any], **environment: str) -> list[dict[str, str]]:
        out = self.run(PROGRAM, text=json.dumps(calls), **environment)
        answers: list[dict[str, str]] = json.loads(out.splitlines()[-1])
        return answers

    def run(self, program: str, *words: str, text: str = "", **environment: str) -> str:
        """What it prints, in a process that has the environment."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        env = {**kept, "HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.home), **environment}
        done = subprocess.run(
            [sys.executable, "-c", program, *words],
            input=text,
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        self.stderr = done.stderr
        return done.stdout


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    revisions = {"main": FIRST, FIRST: FIRST, "v2": SECOND, SECOND: SECOND}
    unsupported = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    hub = Hub(
        {
            "some/model": Repository(FILES, revisions),
            "some/gated": Repository(FILES, revisions, token="hf_secret"),
            "some/torch": Repository(unsupported, {"main": OTHER, OTHER: OTHER}),
        }
    )
    with hub.running():
        yield Client(hub, tmp_path / "home")


def test_a_repository_is_downloaded_once_and_without_what_is_not_needed(client: Client) -> None:
    call = {"model": "some/model"}
    first, again = client.resolve(call, call)
    assert first == again
    assert first["commit"] == FIRST
    assert files_in(first["folder"]) == WANTED
    assert sorted(client.hub.downloads) == sorted(f"some/model/{name}" for name in WANTED)
    assert (Path(first["folder"]) / "model.safetensors").read_bytes() == WEIGHTS
    source = ModelSource("some/model", Path(first["folder"]), first["commit"])
    assert fingerprint(source, "auto", 0) == f"hub:{FIRST}"
    assert "Fetching" in client.stderr or "Downloading" in client.stderr


def test_revision_download_dir_and_offline_mode(client: Client, tmp_path: Path) -> None:
    call = {"model": "some/model", "revision": "v2", "download_dir": str(tmp_path / "elsewhere")}
    (online,) = client.resolve(call)
    assert online["commit"] == SECOND
    assert online["folder"].startswith(str(tmp_path / "elsewhere"))
    client.hub.downloads.clear()
    offline, absent = client.resolve(call, {"model": "some/model"}, HF_HUB_OFFLINE="1")
    assert offline == online
    assert client.hub.downloads == []
    assert absent["error"].startswith("some/model: not, or not wholly, in the download folder")


def test_only_the_config_is_fetched_where_weights_are_not_wanted(client: Client) -> None:
    (plan,) = client.resolve({"model": "some/model", "weights": False})
    assert files_in(plan["folder"]) == WANTED - {"model.safetensors"}
    (partial,) = client.resolve({"model": "some/model"}, HF_HUB_OFFLINE="1")
    assert "not, or not wholly, in the download folder" in partial["error"]
    (served,) = client.resolve({"model": "some/model"})
    assert (Path(served["folder"]) / "model.safetensors").exists()


def test_a_model_by_its_name_is_planned_and_loaded(client: Client, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in BUNDLED_FOLDER.iterdir() if path.is_file()}
    revisions = {"main": FIRST, "v2": SECOND, SECOND: SECOND}
    client.hub.repositories["some/served"] = Repository(files, revisions)
    out = client.run(SERVING, str(tmp_path / "elsewhere"))
    status, folders, model, blocks = json.loads(out.splitlines()[-1])
    assert status == 0
    assert out.startswith("LlamaForCausalLM (our decoder), ")
    assert folders == [str(tmp_path / f"elsewhere/models--some--served/snapshots/{SECOND}")] * 2
    assert model == f"hub:{SECOND}"
    assert blocks.startswith(f"hub:{SECOND}/"), "they are named by it"
    downloads = client.hub.downloads
    assert len(downloads) == len(set(downloads)), "each file came once"
    assert downloads[-1] == "some/served/model.safetensors", "a plan needs no weights"


def test_a_token_opens_a_gated_repository(client: Client) -> None:
    (closed,) = client.resolve({"model": "some/gated"})
    assert "is gated" in closed["error"]
    assert "HF_TOKEN" in closed["error"]
    (opened,) = client.resolve({"model": "some/gated"}, HF_TOKEN="hf_secret")
    assert opened["commit"] == FIRST


def test_what_goes_wrong_is_said(client: Client) -> None:
    unknown, revision, torch_only, name = client.resolve(
        {"model": "some/unknown"},
        {"model": "some/model", "revision": "v9"},
        {"model": "some/torch"},
        {"model": "some/mo del"},
    )
    assert "no such repository on the hub" in unknown["error"]
    assert unknown["error"].startswith("some/unknown: ")
    assert revision["error"] == "some/model: revision: the repository has no 'v9'"
    assert "not supported: pytorch_model.bin" in torch_only["error"]
    assert "neither a folder nor a Hugging Face id" in name["error"]


def test_a_hub_that_does_not_answer_is_said(client: Client) -> None:
    nobody = "http://127.0.0.1:9"
    (answer,) = client.resolve({"model": "some/model"}, HF_ENDPOINT=nobody)
    assert "the hub cannot be reached" in answer["error"]


def test_the_bundled_model_is_there() -> None:
    source = resolve_model("bundled")
    assert describe(source).native
    assert read_generation_defaults(source.folder).eos_token_ids


def test_folders(tmp_path: Path) -> None:
    for name, message in (
        (str(tmp_path / "nothing"), "no such folder"),
        ("./nothing", "no such folder"),
        ("~nobody-of-this-name/nothing", "no such folder"),
        ("a/b/c", "no such folder"),
        (str(tmp_path), "config.json: missing"),
    ):
        with pytest.raises(ModelError, match=message):
            resolve_model(name)
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match="is a file"):
        resolve_model(str(tmp_path / "model.gguf"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="revision: 'main' means nothing for the folder"):
        resolve_model(str(tmp_path), revision="main")
    with pytest.raises(ModelError, match="no weights: model.safetensors"):
        resolve_model(str(tmp_path))
    assert resolve_model(str(tmp_path), weights=False).commit is None


def test_a_folder_that_cannot_be_looked_into(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    folder.chmod(0)
    with as_nobody(), pytest.raises(ModelError, match=f"^{folder}: "):
        resolve_model(str(folder), weights=False)
    folder.chmod(0o700)
    with pytest.raises(ModelError, match="^x{300}: "):
        resolve_model("x" * 300)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may look into every folder."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
