"""Tiny random models in Hugging Face's format, with a transformers twin as the oracle."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 256
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,  # logits far enough apart that no order hangs on rounding
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"num_hidden_layers": 2}),
    "mistral": ("MistralConfig", {"num_hidden_layers": 2, "sliding_window": 20}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 4,
            "sliding_window": 20,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "initializer_range": 0.15,
        },
    ),
}
# Those that fewer tests go through: our decoder's other families, and the ways of transformers.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": (
        "Qwen2Config",
        {
            "num_hidden_layers": 2,
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("Qwen3Config", {"num_hidden_layers": 2}),
    "phi3": ("Phi3Config", {"num_hidden_layers": 2, "pad_token_id": 0}),
    "gemma2": (
        "Gemma2Config",
        {
            "num_hidden_layers": 4,
            "sliding_window": 20,
            "query_pre_attn_scalar": 16,
            "initializer_range": 0.15,
        },
    ),
    "gpt2": ("GPT2Config", {"num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 2}),
    "cohere2": ("Cohere2Config", {"num_hidden_layers": 4, "sliding_window": 20, "pad_token_id": 0}),
}


@dataclass(frozen=True)
class TinyModel:
    name: str
    folder: Path

    @cached_property
    def twin(self) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=torch.float32
        ).eval()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        found = self.twin.config.eos_token_id
        return () if found is None else (int(found),)

    @torch.inference_mode()
    def next_logits(self, texts: list[list[int]]) -> torch.Tensor:
        """After each text, [texts, vocab], without a cache. One pass of a model this small takes
        as long as one of all: what stands behind a text's end is not seen from there."""
        longest = max(map(len, texts))
        rows = torch.tensor([text + [1] * (longest - len(text)) for text in texts])
        ends = torch.tensor([len(text) - 1 for text in texts])
        logits: torch.Tensor = self.twin(rows, use_cache=False).logits
        return logits[torch.arange(len(texts)), ends].float()

    def greedy(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Every token from the whole text before it."""
        texts = prompts
        for _ in range(num_tokens):
            best = self.next_logits(texts).argmax(1).tolist()
            texts = [[*text, token] for text, token in zip(texts, best, strict=True)]
        return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]

    @torch.inference_mode()
    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """Row i is of the token after tokens[: i + 1]."""
        logits = self.twin(torch.tensor([tokens]), use_cache=False).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)


def make_tiny(name: str, folder: Path, **changes: Any) -> TinyModel:
    config_class, extra = {**CONFIGS, **OTHERS}[name]
    torch.manual_seed(7)
    config = getattr(transformers, config_class)(**{**COMMON, **extra, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):  # which begin as zeros, as if there were none
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return TinyModel(name, folder)
