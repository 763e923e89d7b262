"""Tiny models that run through transformers, and some that must be refused."""

from typing import Any

import transformers
from transformers import PreTrainedConfig

from tests.engine.models.cases import SMALL, Case, longrope

GEMMA4: dict[str, Any] = {
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 12,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 8,
}


def case(model_type: str, **changes: Any) -> Case:
    def make_config() -> PreTrainedConfig:
        return transformers.AutoConfig.for_model(model_type, **{**SMALL, **changes})

    return Case(model_type, make_config)


MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}

THETA = {"rope_theta": 10000.0}

LLAMA4: dict[str, Any] = {
    "layer_types": ["full_attention"] * 2,
    "no_rope_layers": [1, 0],
    "num_local_experts": 2,
    "head_dim": 16,
}

SERVED_CASES = (
    case("gpt2"),
    case("gpt_neox", rotary_pct=0.5),
    case("gpt_bigcode"),
    case("opt", ffn_dim=96, word_embed_proj_dim=48),
    case("biogpt"),
    case("phi", partial_rotary_factor=0.5),
    case("stablelm", use_qkv_bias=True),
    case("persimmon"),
    case("gemma", head_dim=32),
    case("vaultgemma", head_dim=32, sliding_window=12, query_pre_attn_scalar=20,
         attn_logit_softcapping=2.0, final_logit_softcapping=5.0),
    case("olmo", clip_qkv=3.0),
    case("olmo2"),
    case("olmo3", sliding_window=12, num_hidden_layers=4),
    case("cohere", logit_scale=0.5),
    case("cohere2", sliding_window=12, num_hidden_layers=4, head_dim=16),
    case(
        "granite",
        attention_multiplier=0.3,
        logits_scaling=2.0,
        residual_multiplier=0.5,
        embedding_multiplier=3.0,
    ),
    case("starcoder2", sliding_window=12),
    case("nemotron"),
    case("glm", head_dim=32),
    case("glm4", head_dim=32),
    case("smollm3"),
    case("seed_oss", head_dim=32,
         rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}),
    case("exaone4", sliding_window=12, num_hidden_layers=4),
    case("gptj", rotary_dim=8),
    case("dbrx", d_model=64, attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 2},
         ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}),
    case("gemma3n_text", **GEMMA4, laurel_rank=8),
    case("gemma4_text", **GEMMA4),
    # its text half
    case("gemma4", text_config={**SMALL, **GEMMA4}, image_token_id=90, video_token_id=91,
         audio_token_id=92, audio_config=None,
         vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16}),
    case("modernbert-decoder", local_attention=24),
    case("diffllama"),
    # whose classes look at values on the way
    case("jetmoe", num_local_experts=4, num_experts_per_tok=2, kv_channels=16),
    case("longcat_flash", num_layers=1, num_key_value_heads=4, head_dim=16, ffn_hidden_size=96,
         q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=24,
         n_routed_experts=4, zero_expert_num=2, moe_topk=2, expert_ffn_hidden_size=32),
    # of classes for models with recurrent layers, which these have not
    case("lfm2", layer_types=["full_attention"] * 2),
    case("granitemoehybrid", layer_types=["attention"] * 2, num_local_experts=0,
         shared_intermediate_size=96, position_embedding_type="rope"),
    case("qwen3_next", layer_types=["full_attention"] * 2, head_dim=32, num_experts=4,
         shared_expert_intermediate_size=32, **MOE),
    case("phimoe", num_local_experts=2, original_max_position_embeddings=64,
         rope_parameters={**longrope(8), "original_max_position_embeddings": 64,
                          "short_mscale": 1.2, "long_mscale": 1.5}),
    case("laguna", num_experts=4, head_dim=16, sliding_window=12, **MOE,
         layer_types=["sliding_attention", "full_attention"],
         rope_parameters={"full_attention": {**THETA, "rope_type": "dynamic", "factor": 2.0},
                          "sliding_attention": {**THETA, "rope_type": "default"}}),
    case("llama4_text", **LLAMA4, attn_temperature_tuning=False),
    case("gpt_oss", num_local_experts=4, num_experts_per_tok=2, sliding_window=16),
    case("granite_swa", sliding_window=16),
    case("mixtral", num_local_experts=4, num_experts_per_tok=2),
    case("qwen2_moe", num_experts=4, shared_expert_intermediate_size=32, **MOE),
    case("qwen3_moe", num_experts=4, head_dim=32, **MOE),
    case("olmoe", num_experts=4, num_experts_per_tok=2),
    case("granitemoe", num_local_experts=4, num_experts_per_tok=2),
    case("deepseek_v3", n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
         moe_intermediate_size=32, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16,
         qk_nope_head_dim=16, v_head_dim=24, first_k_dense_replace=1, head_dim=16,
         num_key_value_heads=4),
)  # fmt: skip


# Model type, changes to the small config, what the refusal must say.
REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("mamba", {}, "recurrent state"),
    ("recurrent_gemma", {}, "recurrent state"),
    ("jamba", {}, "recurrent state"),
    ("lfm2", {"layer_types": ["conv", "full_attention"]}, "recurrent state (conv)"),
    ("granitemoehybrid", {"layer_types": ["mamba", "attention"]}, "recurrent state"),
    ("rwkv", {}, "keeps recurrent state, which"),
    ("glm_moe_dsa", {}, "layers that paged attention cannot serve (indexed_attention)"),
    ("bart", {}, "encoder-decoder"),
    ("llama4_text", {"attention_chunk_size": 16, "num_local_experts": 2}, "(chunked_attention)"),
    (
        "llama4_text",
        LLAMA4,
        "model.layers.1.self_attn: its queries are scaled by positions that it is not told",
    ),
    ("git", {}, "knows attentions of its own alone"),
    ("doge", {}, "attention mask of its own"),
    ("hrm_text", {"head_dim": 16}, "it is computed in several rounds"),
    ("mllama", {"text_config": {**SMALL, "cross_attention_layers": [1]}}, "1 places of 2 layers"),
    ("bert", {}, "attention"),
    ("xlm-roberta", {"is_decoder": True}, "its positions do not begin at 0"),
)
