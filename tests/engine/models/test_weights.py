"""Reading checkpoints: their forms, and every way in which they can be broken."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file, save_model

from engine import weights
from engine.errors import ModelError
from engine.kernels.reference import ReferenceKernels
from engine.memory import format_bytes
from engine.model_source import ModelSource, resolve_model
from engine.models.describe import describe
from engine.models.interface import LoadFormat
from engine.models.load import load_model
from engine.weights import CheckpointTensors
from tests.engine.models.cases import (
    NATIVE_CASES,
    SMALL,
    VOCAB,
    dense_logits,
    make_model,
    prompt_tokens,
)
from tests.engine.models.conftest import SavedModels
from tests.engine.models.driver import Driver
from tests.engine.models.transformers_cases import case

CPU = torch.device("cpu")
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_model(transformers.LlamaConfig(**SMALL)).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(llama, copy)
    return copy


def logits(
    folder: Path, tokens: list[int], load_format: LoadFormat = "auto", seed: int = 0
) -> torch.Tensor:
    source = ModelSource("test", folder)
    description = describe(source)
    model = load_model(
        source, description, ReferenceKernels(), torch.float32, CPU, load_format, seed
    )
    driver = Driver(model, description)
    (rows,) = driver.step([(driver.start(tokens), len(tokens))])
    return rows


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)


def shard(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    weight_map = {name: files[i % 2] for i, name in enumerate(names)}
    for file in files:
        save_file({n: tensors[n] for n in names if weight_map[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


def test_a_sharded_checkpoint_is_the_same_model(folder: Path) -> None:
    tokens = prompt_tokens(3)
    whole = logits(folder, tokens)
    shard(folder)
    assert torch.equal(logits(folder, tokens), whole)


def test_transformers_own_shards_load(tmp_path: Path) -> None:
    model = make_model(transformers.LlamaConfig(**SMALL))
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    tokens = prompt_tokens(4)
    torch.testing.assert_close(logits(tmp_path, tokens), dense_logits(model, tokens), rtol=0,
                               atol=1e-4)  # fmt: skip


def test_stored_types_are_converted(folder: Path) -> None:
    tokens = prompt_tokens(3)
    rewrite(folder, lambda t: t.update({n: v.bfloat16().float() for n, v in t.items()}))
    rounded = logits(folder, tokens)
    rewrite(folder, lambda t: t.update({n: v.bfloat16() for n, v in t.items()}))
    assert torch.equal(logits(folder, tokens), rounded)


def test_harmless_extra_tensors_are_passed_over(folder: Path) -> None:
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.layers.0.attn.bias": torch.ones(1, 1, 128, 128, dtype=torch.bool),
        "model.layers.0.attn.masked_bias": torch.tensor(-1e4),
    }
    rewrite(folder, lambda t: t.update(extra))
    assert logits(folder, [5, 6]).shape == (2, VOCAB)


@pytest.mark.parametrize("name", ["gemma2-head96", "gemma3-with-vision"])
def test_a_tied_weight_under_the_name_of_the_head_alone(
    saved_models: SavedModels, tmp_path: Path, name: str
) -> None:
    saved = saved_models(next(case for case in NATIVE_CASES if case.name == name))
    shutil.copy(saved.source.folder / "config.json", tmp_path)
    save_model(saved.model, str(tmp_path / "model.safetensors"))
    assert not any("embed_tokens" in name for name in load_file(tmp_path / "model.safetensors"))
    tokens = saved.answers[0]
    assert torch.equal(logits(tmp_path, tokens), logits(saved.source.folder, tokens))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q_PROJ), f"{Q_PROJ}: missing"),
        (lambda t: t.update({Q_PROJ: torch.ones(64, 63)}), f"{Q_PROJ}: has shape \\[64, 63\\]"),
        (lambda t: t.update({Q_PROJ: t[Q_PROJ].int()}), f"{Q_PROJ}: element type I32"),
        (lambda t: t.update({"model.layers.0.extra": torch.ones(1)}), "model.layers.0.extra"),
        (lambda t: t.update({"model.layers.0.attn.bias": torch.ones(64)}), "layers.0.attn.bias"),
        (lambda t: t.update({"model.layers.7.mlp.up_proj.weight": torch.ones(1)}), "layers.7"),
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight: missing"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], Any], message: str
) -> None:
    rewrite(folder, change)
    with pytest.raises(ModelError, match=message):
        logits(folder, [5])


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def with_header(path: Path, header: bytes) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 64)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.unlink(), "no weights"),
        (lambda p: cut(p, 5), "truncated"),
        (lambda p: cut(p, 200), "truncated"),
        (lambda p: cut(p, p.stat().st_size - 1), "lies beyond the end"),
        (lambda p: p.write_bytes(b"\xff" * 64), "not a safetensors file"),
        (lambda p: with_header(p, b"{"), "not valid JSON"),
        (lambda p: with_header(p, b"[" * 100_000), "not valid JSON"),
        (lambda p: with_header(p, b'{"a": ' + b"1" * 5000 + b"}"), "not valid JSON"),
        (lambda p: with_header(p, b"[]"), "not an object"),
        (lambda p: with_header(p, b'{"a": 1}'), "a: its entry in the header is malformed"),
        (lambda p: with_header(p, b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}'),
         "a: 4 bytes do not hold F32"),
        (lambda p: with_header(p, b'{"a": {"dtype": "Q4", "shape": [1], "data_offsets": [0, 4]}}'),
         "a: unknown element type 'Q4'"),
    ],
)  # fmt: skip
def test_a_broken_file_is_named(folder: Path, damage: Callable[[Path], Any], message: str) -> None:
    damage(folder / "model.safetensors")
    with pytest.raises(ModelError, match=message) as error:
        logits(folder, [5])
    assert str(folder) in str(error.value)


def test_a_missing_shard_is_named(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="model-00002-of-00002.safetensors: missing"):
        logits(folder, [5])


def test_an_index_that_is_wrong_about_its_shards_is_named(folder: Path) -> None:
    shard(folder)
    index = folder / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"][Q_PROJ] = "model-00001-of-00002.safetensors"
    values["weight_map"]["lm_head.weight"] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(values))
    with pytest.raises(ModelError, match="missing, model.safetensors.index.json says"):
        logits(folder, [5])
    values["weight_map"][Q_PROJ] = "../elsewhere.safetensors"
    index.write_text(json.dumps(values))
    with pytest.raises(ModelError, match="not a file of this folder"):
        logits(folder, [5])


@pytest.mark.parametrize("model_type", ["llama", "arcee"])  # ours, and one of transformers'
@pytest.mark.parametrize("saved_last", ["whole", "sharded"])
def test_what_is_read_of_two_saved_models_is_what_transformers_reads(
    tmp_path: Path, model_type: str, saved_last: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Into one folder: of the first either the file stays there, or the index."""
    config = case(model_type).make_config()
    sizes = {"whole": "1GB", "sharded": "60KB"}
    for seed, how in enumerate(sorted(sizes, key=lambda how: how == saved_last)):
        make_model(config, seed).save_pretrained(tmp_path, max_shard_size=sizes[how])
    assert (tmp_path / "model.safetensors").exists()
    assert (tmp_path / "model.safetensors.index.json").exists()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = prompt_tokens(4)
    expected = dense_logits(theirs, tokens)
    torch.testing.assert_close(logits(tmp_path, tokens), expected, rtol=0, atol=1e-4)
    assert "model.safetensors.index.json is not" in caplog.text


def test_unsupported_formats_are_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="not supported: pytorch_model.bin"):
        resolve_model(str(folder))


def test_a_file_that_shrinks_while_it_is_read_is_an_error(folder: Path) -> None:
    checkpoint = CheckpointTensors(folder)
    cut(folder / "model.safetensors", 4096)
    stored = checkpoint.stored["model.norm.weight"]
    with pytest.raises(ModelError, match="model.norm.weight: the file ends inside it"):
        checkpoint.read("model.norm.weight", torch.empty(stored.shape))


def test_how_much_has_been_read_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weights, "_TELL_S", 0.0)
    with caplog.at_level("INFO", "engine.weights"):
        logits(folder, [5])
    told = [record.getMessage() for record in caplog.records]
    tensors = load_file(folder / "model.safetensors").values()
    whole = format_bytes(sum(tensor.nbytes for tensor in tensors))
    assert len(told) == len(tensors)
    assert told[-1] == f"{whole} of {whole} of weights are read"
    assert told[0] != told[-1]


def test_random_weights_are_a_function_of_config_and_seed(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    tokens = prompt_tokens(5)
    first = logits(folder, tokens, "dummy", seed=1)
    assert torch.equal(logits(folder, tokens, "dummy", seed=1), first)
    assert not torch.allclose(logits(folder, tokens, "dummy", seed=2), first)
    assert first.std() > 0.01


def test_wanted_rows_are_those_of_the_whole_step(folder: Path) -> None:
    source = ModelSource("test", folder)
    description = describe(source)
    model = load_model(source, description, ReferenceKernels(), torch.float32, CPU)
    runs = []
    for wanted_only in (False, True):
        driver = Driver(model, description)
        sequences = [driver.start(prompt_tokens(i)) for i in range(3)]
        work = list(zip(sequences, (1, 9, 20), strict=True))
        runs.append(driver.step(work, wanted_only=wanted_only))
    for rows, last in zip(*runs, strict=True):
        torch.testing.assert_close(last, rows[-1:], rtol=0, atol=1e-5)


def test_fewer_positions_make_smaller_tables(folder: Path) -> None:
    source = ModelSource("test", folder)
    short = replace(describe(source), max_model_len=16)
    model = load_model(source, short, ReferenceKernels(), torch.float32, CPU)
    driver = Driver(model, short)
    (rows,) = driver.step([(driver.start(prompt_tokens(0)), 16)])
    assert torch.equal(rows, logits(folder, prompt_tokens(0)[:16]))
