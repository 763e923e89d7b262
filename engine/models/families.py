"""Which architectures the native decoder covers, and what their config.json does not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from engine.models.decoder_config import CheckpointStyle
from engine.models.layer_types import WindowRule


@dataclass(frozen=True)
class Family:
    """An architecture's fixed traits, and the defaults of its class for absent keys."""

    qkv_bias: bool | None = None  # None: `attention_bias` decides
    output_bias: bool | None = None
    mlp_bias: bool = False  # whether `mlp_bias` is read
    window_rule: WindowRule = WindowRule.NONE
    head_norm: bool = False
    gemma: bool = False  # sandwich norms, 1 + w, scaled embeddings, query_pre_attn_scalar
    attention_soft_cap: bool = False
    local_rope: bool = False  # window layers have a rotation of their own
    partial_rotary: bool = False
    text_half: bool = False  # the text model of one that reads images too; these are refused
    style: CheckpointStyle = CheckpointStyle()
    defaults: Mapping[str, object] = field(default_factory=dict)


_GEMMA3 = Family(
    window_rule=WindowRule.PATTERN,
    head_norm=True,
    gemma=True,
    local_rope=True,
    defaults={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
)

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(mlp_bias=True),
    "MistralForCausalLM": Family(
        qkv_bias=False,
        output_bias=False,
        window_rule=WindowRule.ALL_LAYERS,
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "Qwen2ForCausalLM": Family(
        qkv_bias=True,
        output_bias=False,
        window_rule=WindowRule.UPPER_LAYERS,
        defaults={"num_key_value_heads": 32, "sliding_window": 4096},
    ),
    "Qwen3ForCausalLM": Family(
        window_rule=WindowRule.UPPER_LAYERS,
        head_norm=True,
        defaults={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
    ),
    "Phi3ForCausalLM": Family(
        qkv_bias=False,
        output_bias=False,
        window_rule=WindowRule.EVERY_LAYER,
        partial_rotary=True,
        style=CheckpointStyle(fused=True),
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    ),
    "Gemma2ForCausalLM": Family(
        window_rule=WindowRule.EVERY_OTHER,
        gemma=True,
        attention_soft_cap=True,
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": replace(
        _GEMMA3,
        text_half=True,
        style=CheckpointStyle(
            prefixes=("language_model.model.", "model.language_model."),
            ignored_prefixes=(
                "vision_tower.",
                "multi_modal_projector.",
                "model.vision_tower.",
                "model.multi_modal_projector.",
            ),
        ),
    ),
}

# Models that transformers has in the class of a family, and whose checkpoints name other tensors.
OTHER_TENSORS = frozenset({"exaone"})


def is_covered(architecture: str, model_type: str | None) -> bool:
    return architecture in FAMILIES and model_type not in OTHER_TENSORS
