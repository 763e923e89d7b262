"""From config.json to the shape of the native decoder."""

from __future__ import annotations

from dataclasses import replace

from engine.errors import ModelError
from engine.models.config_keys import refuse_unsupported, warn_of_unused
from engine.models.decoder_config import DecoderConfig, LayerConfig
from engine.models.families import FAMILIES, Family
from engine.models.interface import DtypeName
from engine.models.json_config import JsonConfig
from engine.models.layer_types import layer_windows
from engine.models.rope_config import RopeContext, longest_context
from engine.models.rope_keys import rope_pair

_DTYPES: dict[str, DtypeName] = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
}

# What transformers calls it -> engine.kernels.interface.Activation
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
}

# Of every class that does not say otherwise, for an absent key; no class takes a null for it.
_DEFAULTS = {"rms_norm_eps": 1e-6, "initializer_range": 0.02, "tie_word_embeddings": False}


def architecture_of(config: JsonConfig) -> str:
    names = config.texts("architectures")
    if not names:
        raise config.fail("architectures", "missing, the name of the model's class is needed")
    return names[0]


def parse_decoder(config: JsonConfig) -> DecoderConfig:
    architecture = architecture_of(config)
    family = FAMILIES.get(architecture)
    if family is None:
        raise ModelError(f"{config.where}: architectures: {architecture} has no native decoder")
    dtype = parse_dtype(config, "float32")
    if family.text_half:
        refuse_unsupported(config)
        text = config.section("text_config")
        if text is None:
            raise config.fail("text_config", "missing, the config of the text model is needed")
        decoder = _parse(text, architecture, family, parse_dtype(text, dtype))
        # transformers 5 writes both, and looks at the outer one alone; and for a head in the files.
        outer = config.overlaid_on({"tie_word_embeddings": True})
        tied = outer.flag("tie_word_embeddings", False)
        return replace(
            decoder,
            tied_embeddings=tied and decoder.tied_embeddings,
            tied_without_head=tied,
        )
    return _parse(config, architecture, family, dtype)


def parse_dtype(config: JsonConfig, default: DtypeName) -> DtypeName:
    key = "dtype" if config.raw("dtype") is not None else "torch_dtype"
    name = config.optional_text(key)
    if name is None or name == "auto":
        return default
    if name.removeprefix("torch.") not in _DTYPES:
        raise config.fail(key, f"{name!r}, must be float32, bfloat16 or float16")
    return _DTYPES[name.removeprefix("torch.")]


def _parse(own: JsonConfig, architecture: str, family: Family, dtype: DtypeName) -> DecoderConfig:
    refuse_unsupported(own)
    config = own.overlaid_on({**_DEFAULTS, **family.defaults})
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.fail("num_key_value_heads", f"{num_kv_heads} does not divide {num_heads}")
    hidden_size = config.integer("hidden_size")
    head_dim = config.integer("head_dim", hidden_size // num_heads)
    attention_bias = config.flag("attention_bias", False)
    decoder = DecoderConfig(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        mlp_size=config.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=_layers(config, family, head_dim),
        activation=_activation(config, family),
        norm_eps=config.number("rms_norm_eps"),
        max_positions=config.integer("max_position_embeddings", minimum=2),
        dtype=dtype,
        attention_scale=_attention_scale(config, family, head_dim),
        attention_soft_cap=_attention_soft_cap(config, family),
        final_soft_cap=config.optional_number("final_logit_softcapping") if family.gemma else None,
        embedding_scale=hidden_size**0.5 if family.gemma else None,
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias if family.output_bias is None else family.output_bias,
        mlp_bias=family.mlp_bias and config.flag("mlp_bias", False),
        head_norm=family.head_norm,
        sandwich_norms=family.gemma,
        norm_adds_one=family.gemma,
        tied_embeddings=config.flag("tie_word_embeddings"),
        initializer_range=config.number("initializer_range"),
        style=family.style,
    )
    warn_of_unused(config, architecture)
    return decoder


def _layers(config: JsonConfig, family: Family, head_dim: int) -> tuple[LayerConfig, ...]:
    partial = config.optional_number("partial_rotary_factor") or 1.0
    if partial != 1.0 and not family.partial_rotary:
        raise config.fail("partial_rotary_factor", f"{partial} is not supported here")
    context = RopeContext(
        head_dim=head_dim,
        max_positions=config.integer("max_position_embeddings", minimum=2),
        default_theta=10_000.0,
        partial_factor=partial,
        partial_allowed=family.partial_rotary,
        original_max_positions=config.optional_integer(
            "original_max_position_embeddings", minimum=2
        ),
        yarn_is_longrope=family.partial_rotary,
    )
    ropes = rope_pair(config, context, separate=family.local_rope)
    reach = longest_context(context.max_positions, ropes.full)
    return tuple(
        LayerConfig(
            # A window that no sequence can outgrow is full attention, whose cache is simpler.
            None if window is not None and window >= reach else window,
            ropes.full if window is None else ropes.local,
        )
        for window in layer_windows(config, family.window_rule)
    )


def _activation(config: JsonConfig, family: Family) -> str:
    key, usual = (
        ("hidden_activation", "gelu_pytorch_tanh") if family.gemma else ("hidden_act", "silu")
    )
    name = config.optional_text(key) or usual
    if name not in _ACTIVATIONS:
        raise config.fail(key, f"{name!r}, must be one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _attention_scale(config: JsonConfig, family: Family, head_dim: int) -> float:
    scalar = config.number("query_pre_attn_scalar") if family.gemma else float(head_dim)
    return float(scalar**-0.5)


def _attention_soft_cap(config: JsonConfig, family: Family) -> float | None:
    if not family.gemma:
        return None
    cap = config.optional_number("attn_logit_softcapping")
    if cap is not None and not family.attention_soft_cap:
        raise config.fail("attn_logit_softcapping", f"{cap} is not supported for this architecture")
    return cap
