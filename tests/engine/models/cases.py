"""Tiny random models of every covered family, made by transformers itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

VOCAB = 96
PROMPT_LEN = 37  # longer than every window below
NUM_TOKENS = 8
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


@dataclass(frozen=True)
class Case:
    name: str
    make_config: Callable[[], PreTrainedConfig]
    max_model_len: int | None = None  # where a server's own limit changes what is computed


def _config(name: str, class_name: str, max_model_len: int | None = None, **changes: Any) -> Case:
    values = {**SMALL, **changes}
    return Case(name, lambda: getattr(transformers, class_name)(**values), max_model_len)


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **values}


LLAMA3_ROPE = _rope(
    "llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN_ROPE = _rope("yarn", factor=4.0, original_max_position_embeddings=32)


def longrope(pairs: int) -> dict[str, Any]:
    return _rope(
        "longrope",
        short_factor=[1.0 + 0.1 * i for i in range(pairs)],
        long_factor=[2.0 + 0.5 * i for i in range(pairs)],
    )


def _gemma3_with_vision() -> PreTrainedConfig:
    text = {k: v for k, v in SMALL.items() if not k.endswith("_token_id")}
    return transformers.Gemma3Config(
        text_config={**text, "head_dim": 32, "sliding_window": 12, "num_hidden_layers": 3},
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "image_size": 16,
            "patch_size": 4,
        },
        mm_tokens_per_image=4,
        image_token_index=90,
        boi_token_index=91,
        eoi_token_index=92,
        architectures=["Gemma3ForConditionalGeneration"],
    )


NATIVE_CASES = (
    _config("llama-mha-head16", "LlamaConfig", num_key_value_heads=4),
    _config("llama-gqa-llama3rope-head32", "LlamaConfig", head_dim=32, rope_parameters=LLAMA3_ROPE),
    _config("llama-mqa-linear-head256", "LlamaConfig", head_dim=256, num_key_value_heads=1,
            rope_parameters=_rope("linear", factor=2.0)),
    _config("llama-biases-tied-head80", "LlamaConfig", head_dim=80, attention_bias=True,
            mlp_bias=True, tie_word_embeddings=True),
    _config("llama-yarn-head128", "LlamaConfig", head_dim=128, rope_parameters=YARN_ROPE),
    _config("llama-dynamic", "LlamaConfig", rope_parameters=_rope("dynamic", factor=2.0)),
    _config("mistral-window", "MistralConfig", sliding_window=12),
    _config("mistral-no-window", "MistralConfig", sliding_window=None),
    _config("mistral-layer-types", "MinistralConfig", sliding_window=12, num_hidden_layers=3,
            head_dim=16, architectures=["MistralForCausalLM"],
            layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    _config("qwen2", "Qwen2Config", num_hidden_layers=3),
    _config("qwen2-upper-window", "Qwen2Config", num_hidden_layers=3, use_sliding_window=True,
            sliding_window=10, max_window_layers=1),
    _config("qwen3-head64", "Qwen3Config", head_dim=64),
    _config("qwen3-layer-types", "Qwen3Config", head_dim=32, num_hidden_layers=3,
            use_sliding_window=True, sliding_window=9, attention_bias=True,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    _config("phi3-window", "Phi3Config", sliding_window=16),
    _config("phi3-longrope-short", "Phi3Config", max_model_len=64, partial_rotary_factor=0.5,
            original_max_position_embeddings=64, rope_parameters=longrope(4)),
    _config("phi3-longrope-long", "Phi3Config", original_max_position_embeddings=32,
            rope_parameters=longrope(8)),
    _config("gemma2-head96", "Gemma2Config", head_dim=96, sliding_window=12, num_hidden_layers=4,
            query_pre_attn_scalar=48, attn_logit_softcapping=5.0, final_logit_softcapping=6.0),
    _config("gemma3", "Gemma3TextConfig", head_dim=32, sliding_window=12, num_hidden_layers=7,
            query_pre_attn_scalar=24,
            rope_parameters={"full_attention": _rope("linear", factor=8.0),
                             "sliding_attention": _rope("default", rope_theta=100.0)}),
    Case("gemma3-with-vision", _gemma3_with_vision),
)  # fmt: skip


def make_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """fp32 on the CPU with eager attention; weights spread so that no two logits nearly tie."""
    config._attn_implementation = "eager"
    architectures = config.architectures or []
    torch.manual_seed(seed)
    if "Gemma3ForConditionalGeneration" in architectures:
        model = transformers.Gemma3ForConditionalGeneration(config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config)
    spread(model, seed)
    return model.eval()


def spread(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(noise * 0.2)


def prompt_tokens(seed: int, length: int = PROMPT_LEN) -> list[int]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(3, VOCAB - 10, (length,), generator=generator).tolist()


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
    """transformers' own generate, prompt included."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=transformers.GenerationConfig(
            max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
        ),
    )
    tokens: list[int] = out[0].tolist()
    return tokens


@torch.inference_mode()
def dense_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocab] by one uncached pass."""
    logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.float()
