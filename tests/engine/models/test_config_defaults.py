"""What a config.json does not say is what transformers' class takes it to be: for each family."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelError
from engine.models.json_config import JsonConfig
from engine.models.layer_types import FULL, SLIDING
from engine.models.parse_config import parse_decoder

# Such as no class has by default; more layers than Qwen has below its windows.
NEEDED = {
    "vocab_size": 1000,
    "hidden_size": 2560,
    "intermediate_size": 3000,
    "num_hidden_layers": 30,
    "num_attention_heads": 64,
    "max_position_embeddings": 16384,
}
TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Phi3ForCausalLM": "phi3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
}


def in_words_of_transformers(folder: Path) -> dict[str, Any]:
    from transformers import AutoConfig  # loads torch

    config = AutoConfig.from_pretrained(folder).get_text_config()
    num_layers = config.num_hidden_layers
    knows_windows = hasattr(type(config)(), "sliding_window")  # or keeps it, and never looks
    window = config.sliding_window if knows_windows else None
    kinds = getattr(config, "layer_types", None) or [SLIDING if window else FULL] * num_layers
    ropes = config.rope_parameters
    own_head_dim = config.hidden_size // config.num_attention_heads
    scalar = getattr(config, "query_pre_attn_scalar", None)
    head_dim = getattr(config, "head_dim", None) or own_head_dim
    return {
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "activation": getattr(config, "hidden_act", None) or config.hidden_activation,
        "norm_eps": config.rms_norm_eps,
        "attention_scale": (scalar or head_dim) ** -0.5,
        "attention_soft_cap": getattr(config, "attn_logit_softcapping", None),
        "final_soft_cap": getattr(config, "final_logit_softcapping", None),
        "tied_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
        "layers": [
            (window if kind == SLIDING else None, ropes.get(kind, ropes)["rope_theta"])
            for kind in kinds
        ],
    }


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "sliding_window": 256, "max_window_layers": 3},
        {"rope_theta": 5000.0, "rms_norm_eps": 1e-3, "head_dim": 64},
        {"sliding_window_pattern": 3},
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": False},
    ],
    ids=lambda said: "-".join(said) or "nothing",
)
@pytest.mark.parametrize("architecture", TYPES)
def test_what_is_not_said(architecture: str, said: dict[str, Any], tmp_path: Path) -> None:
    check(architecture, said, tmp_path)


@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Phi3ForCausalLM"],
)
def test_a_null_is_as_many_heads_as_queries_have(architecture: str, tmp_path: Path) -> None:
    """The other classes take none."""
    check(architecture, {"num_key_value_heads": None}, tmp_path)


@pytest.mark.parametrize("architecture", TYPES)
def test_a_null_activation_is_the_class_s_own(architecture: str) -> None:
    """Which transformers refuses by now, and took for it in the first Gemma."""
    name = "hidden_activation" if "Gemma" in architecture else "hidden_act"

    def read(said: dict[str, Any]) -> str:
        return parse_decoder(JsonConfig(config(architecture, said), "config.json")).activation

    assert read({name: None}) == read({})


@pytest.mark.parametrize(
    ("key", "needed"),
    [
        ("rms_norm_eps", "a positive number"),
        ("initializer_range", "a positive number"),
        ("tie_word_embeddings", "true or false"),
    ],
)
@pytest.mark.parametrize("architecture", TYPES)
def test_a_null_that_no_class_takes_is_refused(
    architecture: str, key: str, needed: str, tmp_path: Path
) -> None:
    values = config(architecture, {key: None})
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(Exception, match=key):
        in_words_of_transformers(tmp_path)
    with pytest.raises(ModelError, match=f"{key}: missing, {needed} is needed"):
        parse_decoder(JsonConfig(values, "config.json"))


def test_a_null_outside_of_a_text_half_unties_it(tmp_path: Path) -> None:
    values = config("Gemma3ForConditionalGeneration", {}) | {"tie_word_embeddings": None}
    (tmp_path / "config.json").write_text(json.dumps(values))
    from transformers import AutoConfig  # loads torch

    assert not AutoConfig.from_pretrained(tmp_path).tie_word_embeddings
    assert not parse_decoder(JsonConfig(values, "config.json")).tied_embeddings


def config(architecture: str, said: dict[str, Any]) -> dict[str, Any]:
    own = {**NEEDED, **said}
    values: dict[str, Any] = {"architectures": [architecture], "model_type": TYPES[architecture]}
    is_text_half = TYPES[architecture] == "gemma3"
    return values | ({"text_config": {**own, "model_type": "gemma3_text"}} if is_text_half else own)


def check(architecture: str, said: dict[str, Any], tmp_path: Path) -> None:
    values = config(architecture, said)
    (tmp_path / "config.json").write_text(json.dumps(values))
    decoder = parse_decoder(JsonConfig(values, "config.json"))
    expected = in_words_of_transformers(tmp_path)
    layers = [(layer.window, layer.rope.theta) for layer in decoder.layers]
    read = {name: getattr(decoder, name) for name in expected} | {"layers": layers}
    assert read == expected
