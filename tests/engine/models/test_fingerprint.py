"""Two models have one fingerprint if and only if they have one config and one set of weights."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.engine import Engine
from engine.fingerprint import SAMPLE_BYTES, SAMPLES_PER_TENSOR, fingerprint
from engine.model_source import ModelSource
from engine.models.describe import describe
from tests.engine.models_on_disk import make_tiny

LARGE = SAMPLES_PER_TENSOR * SAMPLE_BYTES  # bytes; above this only samples are hashed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "hidden_size": 8}')
    tensors = {"large": torch.randn(LARGE), "small": torch.randn(7)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def of(folder: Path, commit: str | None = None) -> str:
    return fingerprint(ModelSource("m", folder, commit), "auto", 0)


def changed(folder: Path, name: str, index: int) -> Path:
    copy = folder.parent / f"{name}-{index}"
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    tensors[name][index] += 1.0
    save_file(tensors, copy / "model.safetensors")
    return copy


def test_the_path_and_the_spelling_of_the_config_do_not_matter(folder: Path) -> None:
    copy = folder.parent / "elsewhere"
    shutil.copytree(folder, copy)
    values = json.loads((folder / "config.json").read_text())
    reordered = dict(reversed(values.items()))
    (copy / "config.json").write_text(json.dumps(reordered, indent=4))
    assert of(copy) == of(folder)


@pytest.mark.parametrize("index", [0, 3, 6])
def test_any_element_of_a_small_tensor_matters(folder: Path, index: int) -> None:
    assert of(changed(folder, "small", index)) != of(folder)


@pytest.mark.parametrize("index", [0, LARGE // 2 + 300, LARGE - 1])
def test_a_large_tensor_is_sampled_from_its_first_to_its_last_element(
    folder: Path, index: int
) -> None:
    if index == LARGE // 2 + 300:
        last, gaps = 4 * LARGE - SAMPLE_BYTES, SAMPLES_PER_TENSOR - 1
        index = last * 8 // gaps // 4 + 1
    assert of(changed(folder, "large", index)) != of(folder)


def test_all_of_a_tensor_changed_is_seen_wherever_it_lies(folder: Path) -> None:
    copy = folder.parent / "trained-on"
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    tensors["large"] *= 1.0001
    save_file(tensors, copy / "model.safetensors")
    assert of(copy) != of(folder)


def test_config_names_and_shapes_matter(folder: Path) -> None:
    before = of(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["tiny"] = tensors.pop("small")
    save_file(tensors, folder / "model.safetensors")
    renamed = of(folder)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "hidden_size": 9}')
    assert len({before, renamed, of(folder)}) == 3


def test_every_shard_counts(folder: Path) -> None:
    save_file({"b": torch.zeros(4)}, folder / "model-2.safetensors")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    weight_map = {"large": "model-1.safetensors", "b": "model-2.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    before = of(folder)
    save_file({"b": torch.ones(4)}, folder / "model-2.safetensors")
    assert of(folder) != before


def test_a_file_that_is_read_instead_of_shards_counts(folder: Path) -> None:
    save_file({"b": torch.zeros(4)}, folder / "model-1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"b": "model-1.safetensors"}}))
    before = of(folder)
    save_file({"b": torch.ones(4)}, folder / "model.safetensors")
    assert of(folder) != before


def test_a_hub_model_is_its_commit(folder: Path) -> None:
    assert of(folder, commit="abc") == "hub:abc"


def test_random_weights_are_config_and_seed(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    source = ModelSource("m", folder)
    seeds = {fingerprint(source, "dummy", seed) for seed in (0, 1)}
    assert len(seeds) == 2
    assert fingerprint(ModelSource("other", folder, "abc"), "dummy", 0) in seeds


def test_a_hundred_gigabytes_cost_little(tmp_path: Path) -> None:
    """A sparse file with a header like a 70 B model's: what is read is bounded by its samples."""
    rows, columns = 8192, 28672
    size = rows * columns * 2
    entries = {
        f"layers.{i}.w": {
            "dtype": "BF16",
            "shape": [rows, columns],
            "data_offsets": [i * size, (i + 1) * size],
        }
        for i in range(220)
    }
    header = json.dumps(entries).encode()
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 220 * size)
    (tmp_path / "config.json").write_text("{}")
    assert path.stat().st_size > 100e9
    assert of(tmp_path).startswith("folder:")


def test_a_cache_with_other_rotations_has_another_fingerprint(folder: Path) -> None:
    """longrope: the server's longest sequence decides which factors its keys were turned with."""
    phi3 = {
        "architectures": ["Phi3ForCausalLM"],
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "longrope", "short_factor": [1] * 8, "long_factor": [2] * 8},
    }
    (folder / "config.json").write_text(json.dumps(phi3))
    source = ModelSource("phi3", folder)
    description = describe(source)
    names = [
        fingerprint(
            source, "auto", 0, replace(description, max_model_len=length).variant("float32")
        )
        for length in (32, 64, 65, 256)
    ]
    assert names[0] == names[1] != names[2] == names[3]


def test_a_quantised_cache_of_another_type_has_other_names(tmp_path: Path) -> None:
    """bf16 and fp32 give other keys, and so other bytes of the same format."""
    folder = str(make_tiny("llama", tmp_path).folder)

    def identity(dtype: str) -> str:
        config = EngineConfig(
            model=folder,
            dtype=dtype,
            kv_cache_dtype="int8",
            kv_cache_memory_bytes=1 << 20,
            kernels="reference",
        )
        engine = Engine.create(config)
        engine.close()
        return engine.limits.fingerprint

    own, fp32, bf16 = identity("auto"), identity("float32"), identity("bfloat16")
    assert own == fp32 != bf16
