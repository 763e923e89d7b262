"""Models of other classes, with our paged attention inside, against the same models without."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.errors import ConfigError, ModelError
from engine.kernels.registry import load_kernels
from engine.model_source import ModelSource
from engine.models.describe import describe
from engine.models.load import load_model
from tests.engine.models.cases import (
    NUM_TOKENS,
    PROMPT_LEN,
    SMALL,
    Case,
    dense_logits,
    make_model,
    prompt_tokens,
)
from tests.engine.models.conftest import SavedModels
from tests.engine.models.driver import Driver
from tests.engine.models.transformers_cases import REFUSED, SERVED_CASES, case

CPU = torch.device("cpu")


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in SERVED_CASES])
def test_greedy_tokens_and_logits_are_those_of_dense_attention(
    saved_models: SavedModels, case: Case, kernels: str
) -> None:
    saved = saved_models(case)
    description = describe(saved.source)
    assert not description.native
    twin = load_kernels(kernels, CPU)
    model = load_model(saved.source, description, twin, torch.float32, CPU)
    driver = Driver(model, description)
    first, second = (driver.start(prompt) for prompt in saved.prompts)
    rows: list[list[torch.Tensor]] = [[], []]
    rows[0] += driver.step([(first, 19)])
    chunked, whole = driver.step([(first, PROMPT_LEN - 19), (second, PROMPT_LEN)])
    rows[0].append(chunked)
    rows[1].append(whole)
    for _ in range(NUM_TOKENS):
        for sequence, logits in zip((first, second), rows, strict=True):
            sequence.tokens.append(int(logits[-1][-1].argmax()))
        for logits, row in zip(rows, driver.step([(first, 1), (second, 1)]), strict=True):
            logits.append(row)
    for index, sequence in enumerate((first, second)):
        assert sequence.tokens == saved.answers[index]
        ours = torch.cat(rows[index])
        torch.testing.assert_close(ours, saved.logits[index], rtol=0, atol=1e-4, check_dtype=False)


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("internlm3", "InternLM3ForCausalLM"),
        ("exaone", "ExaoneForCausalLM"),
        ("exaone", "LlamaForCausalLM"),  # as transformers saves it
    ],
)
def test_a_config_for_the_class_of_another_model(
    tmp_path: Path, model_type: str, architecture: str
) -> None:
    """Their checkpoints name a class that came with them, and the tensors are as it called them."""
    model = make_model(case(model_type).make_config())
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "architectures": [architecture]}))
    source = ModelSource(model_type, tmp_path)
    description = describe(source)
    assert description.architecture == architecture
    assert not description.native
    kernels = load_kernels("reference", CPU)
    driver = Driver(load_model(source, description, kernels, torch.float32, CPU), description)
    prompt = prompt_tokens(0)
    (rows,) = driver.step([(driver.start(prompt), len(prompt))])
    torch.testing.assert_close(rows, dense_logits(model, prompt), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [("internlm3", "InternLM3MedusaForCausalLM"), ("exaone", "ExaoneMedusaForCausalLM")],
)
def test_a_class_of_its_own_is_not_taken_for_the_one_it_resembles(
    tmp_path: Path, model_type: str, architecture: str
) -> None:
    """Its tensors may be named alike, and computed with otherwise."""
    config = case(model_type).make_config()
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="transformers has no such class"):
        describe(ModelSource("refused", tmp_path))


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"), [pytest.param(*case, id=case[0]) for case in REFUSED]
)
def test_models_that_paged_attention_would_get_wrong_are_refused(
    tmp_path: Path, model_type: str, changes: dict[str, Any], reason: str
) -> None:
    config = transformers.AutoConfig.for_model(model_type, **{**SMALL, **changes})
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match=rf"^{architecture} cannot be served: .*{re.escape(reason)}"
    ):
        describe(ModelSource("refused", tmp_path))


def test_a_class_that_takes_no_attention_implementation_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which these are changes from release to release of transformers, so here one is made so."""
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path)
    source = ModelSource("refused", tmp_path)
    describe(source)
    monkeypatch.setattr(transformers.GPT2LMHeadModel, "_can_set_attn_implementation", lambda: False)
    with pytest.raises(ModelError, match=r"^GPT2LMHeadModel .*takes no attention implementation"):
        describe(source)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"architectures": ["T5ForConditionalGeneration"]}, "not a causal language model"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "not a causal language model"),
        ({"architectures": ["NewModel"]}, "no such class"),
        ({"architectures": ["NewModel"], "auto_map": {"AutoModel": "m.M"}}, "code of its own"),
        ({"architectures": ["GPT2LMHeadModel"], "quantization_config": {}}, "quantization_config"),
        (
            {"architectures": ["GPT2LMHeadModel"], "quantization_config": {"quant_method": "awq"}},
            "quantization_config: quantised checkpoints are not supported, but for .* mxfp4",
        ),
        ({"architectures": ["GPT2LMHeadModel"], "n_layer": 10_001}, "n_layer: 10001, must be at"),
        (
            {
                "architectures": ["Gemma4ForConditionalGeneration"],
                "text_config": {"num_hidden_layers": 10_001},
            },
            "text_config: num_hidden_layers: 10001, must be at most",
        ),
        (
            {"architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_head": 2, "n_positions": 1},
            "max_position_embeddings: 1, must be an integer of at least 2",
        ),
        ({"architectures": []}, "architectures"),
        ({}, "architectures: missing"),
    ],
)
def test_folders_that_are_no_causal_model_are_refused(
    tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=reason):
        describe(ModelSource("refused", tmp_path))


def test_random_weights_are_a_function_of_config_and_seed(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, vocab_size=96)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path)
    source = ModelSource("random", tmp_path)
    description = describe(source)
    twin = load_kernels("reference", CPU)
    rows = []
    for seed in (1, 1, 2):
        model = load_model(source, description, twin, torch.float32, CPU, "dummy", seed)
        driver = Driver(model, description)
        rows += driver.step([(driver.start([5, 6, 7]), 3)])
    assert torch.equal(rows[0], rows[1])
    assert not torch.allclose(rows[0], rows[2])


def test_longrope_through_transformers_ends_where_its_factors_change(
    saved_models: SavedModels,
) -> None:
    case = next(case for case in SERVED_CASES if case.name == "phimoe")
    description = describe(saved_models(case).source)
    assert description.length_for(None) == description.length_for(64) == 64
    with pytest.raises(ConfigError, match=r"65, .* at most 64 .original_max_position_embeddings"):
        description.length_for(65)


@pytest.mark.parametrize(
    ("model_type", "masks"),
    [
        ("gpt2", ("transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias")),
        # whose tensors are renamed as they are loaded
        ("exaone", ("transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias")),
        ("exaone", ("transformer.h.1.attn.attention.bias", "transformer.h.0.attn.masked_bias")),
    ],
)
def test_masks_in_a_checkpoint_are_passed_over(
    tmp_path: Path, model_type: str, masks: tuple[str, str]
) -> None:
    model = make_model(case(model_type).make_config())
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors[masks[0]] = torch.ones(1, 1, 128, 128, dtype=torch.uint8).tril()
    tensors[masks[1]] = torch.tensor(-1e4)
    save_file(tensors, file, metadata={"format": "pt"})
    source = ModelSource("with masks", tmp_path)
    description = describe(source)
    loaded = load_model(source, description, load_kernels("reference", CPU), torch.float32, CPU)
    tokens = prompt_tokens(0)
    driver = Driver(loaded, description)
    (rows,) = driver.step([(driver.start(tokens), len(tokens))])
    torch.testing.assert_close(rows, dense_logits(model, tokens), rtol=0, atol=1e-4)


def test_mxfp4_weights_are_widened(tmp_path: Path) -> None:
    """To what a checkpoint says that has the same numbers as bf16."""
    quantised, plain = tmp_path / "quantised", tmp_path / "plain"
    model = make_model(case("gpt_oss", num_local_experts=4).make_config())
    model.save_pretrained(plain)
    stored: dict[str, torch.Tensor] = {}
    tensors = load_file(plain / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, width, rows = tensor.shape
            blocks = torch.randint(256, (experts, rows, width // 32, 16), dtype=torch.uint8)
            scales = torch.randint(118, 124, blocks.shape[:3], dtype=torch.uint8)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            tensors[name] = mxfp4(blocks, scales).mT.contiguous().bfloat16()
        else:
            stored[name] = tensor
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    quantised.mkdir()
    save_file(stored, quantised / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    del config["dtype"]  # as gpt-oss's
    (quantised / "config.json").write_text(json.dumps(config))
    tokens, rows_of, dtypes = prompt_tokens(0), [], []
    for folder in (plain, quantised):
        source = ModelSource("gpt-oss", folder)
        description = describe(source)
        dtypes.append(description.dtype)
        loaded = load_model(source, description, load_kernels("reference", CPU), torch.float32, CPU)
        driver = Driver(loaded, description)
        rows_of += driver.step([(driver.start(tokens), len(tokens))])
    assert torch.equal(*rows_of)
    assert dtypes == ["float32", "bfloat16"]


def mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Two numbers a byte, the low half first, and 32 with a power of two in common."""
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat((magnitudes, -magnitudes))
    pairs = torch.stack((table[(blocks & 15).long()], table[(blocks >> 4).long()]), -1)
    numbers = pairs.flatten(-2) * torch.exp2(scales.float() - 127).unsqueeze(-1)
    return numbers.flatten(-2)


def test_a_bias_where_others_have_a_mask_is_named(tmp_path: Path) -> None:
    make_model(case("exaone").make_config()).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    bias = {"transformer.h.0.attn.bias": torch.ones(1, 1, 128, 64)}
    save_file({**load_file(file), **bias}, file, metadata={"format": "pt"})
    source = ModelSource("broken", tmp_path)
    description = describe(source)
    with pytest.raises(ModelError, match="unexpected tensors: .*0.attn.bias"):
        load_model(source, description, load_kernels("reference", CPU), torch.float32, CPU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("transformer.h.0.mlp.c_fc.weight"), "missing tensors: .*c_fc.weight"),
        (lambda t: t.update({"transformer.h.9.x": torch.ones(1)}), "unexpected tensors: .*h.9.x"),
        (
            lambda t: t.update({"transformer.h.0.attn.masked_bias": torch.ones(32)}),
            "unexpected tensors: .*h.0.attn.masked_bias",
        ),
        (
            lambda t: t.update({"transformer.wpe.weight": torch.ones(3, 3)}),
            "mismatched tensors: .*wpe",
        ),
        (
            lambda t: t.update(
                {"transformer.wpe.weight": t["transformer.wpe.weight"].to(torch.float8_e4m3fn)}
            ),
            "transformer.wpe.weight: element type F8_E4M3 is not supported",
        ),
        (
            lambda t: t.update(
                {"transformer.wpe.weight": t["transformer.wpe.weight"].to(torch.int8)}
            ),
            "transformer.wpe.weight: element type I8 is not supported",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], Any], message: str
) -> None:
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=64, vocab_size=96)
    make_model(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    source = ModelSource("broken", tmp_path)
    description = describe(source)
    with pytest.raises(ModelError, match=message):
        load_model(source, description, load_kernels("reference", CPU), torch.float32, CPU)
