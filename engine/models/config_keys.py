"""Keys of config.json that the native decoder refuses, and those that change nothing for it."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from engine.models.json_config import JsonConfig

log = logging.getLogger(__name__)

# Key -> the values at which it changes nothing that is computed.
REFUSED: Mapping[str, tuple[object, ...]] = {
    "adapters": (),
    "add_cross_attention": (False,),
    "alibi": (False,),
    "altup_num_inputs": (),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "clip_qkv": (),
    "compression_config": (),
    "embedding_multiplier": (1,),
    "is_encoder_decoder": (False,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "n_routed_experts": (0, 1),
    "no_rope_layers": ([],),
    "num_experts": (0, 1),
    "num_kv_shared_layers": (0,),
    "num_local_experts": (0, 1),
    "parallel_attn": (False,),
    "qk_layernorm": (False,),
    "quantization_config": (),
    "residual_multiplier": (1,),
    "rope_interleaved": (False,),
    "sparsity_config": (),
    "use_bidirectional_attention": (False,),
    "use_qk_norm": (False,),
}

# transformers' own bookkeeping, training, generation (read elsewhere), and keys that only some
# of the covered families use.
_HARMLESS_NAMES = """
_attn_implementation _name_or_path _sliding_window_pattern architectures attention_bias
attention_dropout attn_logit_softcapping auto_map bos_token_id cache_implementation
chunk_size_feed_forward dtype embd_pdrop eos_token_id final_logit_softcapping hidden_act
hidden_activation hidden_dropout id2label initializer_range is_decoder label2id layer_types
max_length max_window_layers mlp_bias model_type original_max_position_embeddings
output_attentions output_hidden_states pad_token_id partial_rotary_factor pretraining_tp
problem_type query_pre_attn_scalar resid_pdrop return_dict rope_local_base_freq sliding_window
sliding_window_pattern task_specific_params tie_encoder_decoder tokenizer_class torch_dtype
transformers_version unsloth_fixed unsloth_version use_cache use_sliding_window
"""
HARMLESS = frozenset(_HARMLESS_NAMES.split())


def refuse_unsupported(config: JsonConfig) -> None:
    for key, neutral in REFUSED.items():
        value = config.raw(key)
        if value is not None and value not in neutral:
            raise config.fail(key, f"{value!r} is not supported by the native decoder")


def warn_of_unused(config: JsonConfig, architecture: str) -> None:
    """transformers keeps keys that its class does not know, and never reads them; so do we."""
    unused = sorted(config.unseen - HARMLESS - REFUSED.keys())
    if unused:
        names = ", ".join(unused)
        log.warning("%s: %s does not use these keys: %s", config.where, architecture, names)
