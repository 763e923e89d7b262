"""The native decoder against transformers, for every covered family."""

import copy
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.kernels.registry import load_kernels
from engine.model_source import ModelSource
from engine.models.describe import describe
from engine.models.interface import CausalModel, ModelDescription
from engine.models.load import load_model
from tests.engine.models.cases import (
    NATIVE_CASES,
    NUM_TOKENS,
    PROMPT_LEN,
    SMALL,
    Case,
    dense_logits,
    make_model,
    prompt_tokens,
)
from tests.engine.models.conftest import Saved, SavedModels
from tests.engine.models.driver import Driver

CPU = torch.device("cpu")
CASES = [pytest.param(case, id=case.name) for case in NATIVE_CASES]
TOLERANCE = 1e-4


def described(saved: Saved) -> ModelDescription:
    description = describe(saved.source)
    if saved.case.max_model_len is not None:
        description = replace(description, max_model_len=saved.case.max_model_len)
    return description


def loaded(
    saved: Saved, kernels: str = "reference", dtype: torch.dtype = torch.float32
) -> tuple[CausalModel, ModelDescription]:
    description = described(saved)
    model = load_model(saved.source, description, load_kernels(kernels, CPU), dtype, CPU)
    return model, description


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_and_logits_are_those_of_transformers(
    saved_models: SavedModels, case: Case, kernels: str
) -> None:
    """Two sequences: one prefilled at once, the other in chunks, then decoded together."""
    saved = saved_models(case)
    driver = Driver(*loaded(saved, kernels))
    first, second = (driver.start(prompt) for prompt in saved.prompts)
    rows: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    (logits,) = driver.step([(first, PROMPT_LEN)])
    rows[0].append(logits)
    first.tokens.append(int(logits[-1].argmax()))
    for chunk in (11, 1, 16, PROMPT_LEN - 28):
        by_sequence = driver.step([(first, 1), (second, chunk)])
        rows[0].append(by_sequence[0])
        rows[1].append(by_sequence[1])
        first.tokens.append(int(by_sequence[0][-1].argmax()))
    second.tokens.append(int(rows[1][-1][-1].argmax()))
    while second.num_cached < PROMPT_LEN + NUM_TOKENS:
        running = [s for s in (first, second) if s.num_cached < PROMPT_LEN + NUM_TOKENS]
        for sequence, logits in zip(running, driver.step([(s, 1) for s in running]), strict=True):
            rows[0 if sequence is first else 1].append(logits)
            sequence.tokens.append(int(logits[-1].argmax()))

    for index, sequence in enumerate((first, second)):
        expected = saved.answers[index]
        assert sequence.tokens[: len(expected)] == expected
        ours = torch.cat(rows[index])
        torch.testing.assert_close(
            ours, saved.logits[index], rtol=0, atol=TOLERANCE, check_dtype=False
        )


def test_a_stored_head_is_the_embedding_that_it_is_tied_to(
    saved_models: SavedModels, tmp_path: Path
) -> None:
    saved = saved_models(next(case for case in NATIVE_CASES if "tied" in case.name))
    folder = shutil.copytree(saved.source.folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    source = ModelSource("tied", folder)
    kernels = load_kernels("reference", CPU)
    load_model(source, describe(source), kernels, torch.float32, CPU)
    tensors["lm_head.weight"][5, 0] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match="lm_head.weight differs from model.embed_tokens.weight"):
        load_model(source, describe(source), kernels, torch.float32, CPU)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_both_spellings_of_a_text_half_load(
    saved_models: SavedModels, tmp_path: Path, prefix: str
) -> None:
    saved = saved_models(next(c for c in NATIVE_CASES if c.name == "gemma3-with-vision"))
    folder = tmp_path / "model"
    shutil.copytree(saved.source.folder, folder)
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        re.sub(r"^(language_model\.model|model\.language_model)\.", prefix, name): tensor
        for name, tensor in tensors.items()
    }
    assert f"{prefix}norm.weight" in renamed
    save_file(renamed, folder / "model.safetensors")
    driver = Driver(*loaded(replace(saved, source=ModelSource("renamed", folder))))
    assert driver.greedy(saved.prompts[0], NUM_TOKENS, chunk=64).tokens == saved.answers[0]


def test_a_text_half_that_transformers_has_untied(tmp_path: Path) -> None:
    """Its own section ties it still: transformers asks the outer one."""
    case = next(c for c in NATIVE_CASES if c.name == "gemma3-with-vision")
    config = case.make_config()
    config.tie_word_embeddings = False
    model = make_model(config)
    model.save_pretrained(tmp_path)
    source = ModelSource("untied", tmp_path)
    section = source.config.section("text_config")
    assert section is not None
    assert section.flag("tie_word_embeddings", False)
    description = describe(source)
    assert not description.num_tied
    tokens = prompt_tokens(0)
    kernels = load_kernels("reference", CPU)
    driver = Driver(load_model(source, description, kernels, torch.float32, CPU), description)
    (rows,) = driver.step([(driver.start(tokens), len(tokens))])
    torch.testing.assert_close(rows, dense_logits(model, tokens), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("stored", [False, True])
def test_a_text_half_that_only_its_own_section_unties(
    saved_models: SavedModels, tmp_path: Path, stored: bool
) -> None:
    """transformers ties it, unless a head is stored that is another."""
    case = next(c for c in NATIVE_CASES if c.name == "gemma3-with-vision")
    folder = shutil.copytree(saved_models(case).source.folder, tmp_path / "model")
    values = json.loads((folder / "config.json").read_text())
    values["text_config"]["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(values))
    if stored:
        tensors = load_file(folder / "model.safetensors")
        embedding = tensors["language_model.model.embed_tokens.weight"]
        tensors["language_model.lm_head.weight"] = embedding.flip(0).contiguous()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    theirs = transformers.Gemma3ForConditionalGeneration.from_pretrained(folder).eval()
    source = ModelSource("untied inside", folder)
    description = describe(source)
    kernels = load_kernels("reference", CPU)
    driver = Driver(load_model(source, description, kernels, torch.float32, CPU), description)
    tokens = prompt_tokens(0)
    (rows,) = driver.step([(driver.start(tokens), len(tokens))])
    torch.testing.assert_close(rows, dense_logits(theirs, tokens), rtol=0, atol=TOLERANCE)


HEAD_SIZES = [16, 24, 32, 40, 64, 80, 96, 112, 128, 160, 192, 256]


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("head_dim", HEAD_SIZES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_head_sizes(saved_models: SavedModels, kernels: str, head_dim: int, kv_heads: int) -> None:
    changes = {"head_dim": head_dim, "num_key_value_heads": kv_heads, "num_hidden_layers": 1}
    case = Case(
        f"llama-head{head_dim}-kv{kv_heads}",
        lambda: transformers.LlamaConfig(**{**SMALL, **changes}),
    )
    saved = saved_models(case)
    driver = Driver(*loaded(saved, kernels))
    answer = driver.greedy(saved.prompts[0], NUM_TOKENS, chunk=20)
    assert answer.tokens == saved.answers[0]


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES)
def test_half_precision_is_as_near_to_fp32_as_transformers_own(
    saved_models: SavedModels, case: Case, dtype: torch.dtype, kernels: str
) -> None:
    """Both round at every operation, so neither is the truth; fp32 is."""
    saved = saved_models(case)
    model, description = loaded(saved, kernels, dtype)
    driver = Driver(model, description, dtype)
    tokens = saved.answers[0]
    sequence = driver.start(tokens)
    ours = torch.cat(
        [driver.step([(sequence, 30)])[0], driver.step([(sequence, len(tokens) - 30)])[0]]
    )
    theirs = dense_logits(copy.deepcopy(saved.model).to(dtype), tokens)
    truth = saved.logits[0]
    assert rms(ours - truth) < 1.5 * rms(theirs - truth) + 1e-3


def rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())
