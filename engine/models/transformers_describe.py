"""The description of a model that runs through transformers, from its config alone."""

from __future__ import annotations

from typing import Any

import torch

from engine.errors import ModelError
from engine.kernels.interface import AttentionSpec
from engine.model_source import ModelSource
from engine.models.attention_probe import ProbedAttention, probe_attention
from engine.models.decoder_config import group_layers
from engine.models.interface import ModelDescription
from engine.models.parse_config import parse_dtype
from engine.models.transformers_class import (
    TransformersClass,
    find_decoder,
    longrope_limit,
    max_positions,
    reported,
    transformers_class,
)
from kv_cache.layout import KvGroup


def describe_transformers(source: ModelSource) -> ModelDescription:
    found = transformers_class(source)
    model, attentions = probe(found)
    with reported(found.architecture):
        config = found.text_config
        return ModelDescription(
            architecture=found.architecture,
            native=False,
            vocab_size=model.get_output_embeddings().weight.shape[0],
            hidden_size=config.hidden_size,
            num_layers=len(attentions),
            num_heads=attentions[0].spec.num_heads,
            mlp_size=_mlp_size(model, config),
            max_model_len=max_positions(found.architecture, config),
            dtype=parse_dtype(source.config, "bfloat16" if found.is_mxfp4 else "float32"),
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            groups=attention_groups([attention.spec for attention in attentions]),
            longrope_limit=longrope_limit(config),
        )


def probe(found: TransformersClass) -> tuple[Any, list[ProbedAttention]]:
    """The model on the meta device, and what each of its layers' attention computes."""
    with reported(found.architecture):
        # bf16: the grouped matrix products of mixture models take no other type there.
        model, attentions = probe_attention(
            lambda attention: found.instantiate(attention, torch.bfloat16),
            lambda model: find_decoder(found.architecture, model),
        )
        num_layers = found.text_config.num_hidden_layers
        num_modules = len({attention.module for attention in attentions})
        if num_modules != num_layers:
            raise ModelError(f"attention is called in {num_modules} places of {num_layers} layers")
    return model, attentions


def _mlp_size(model: Any, config: Any) -> int:
    """The widest weight but of embedding and head. Where a router chooses among experts, their
    number is under the one name that most configs have for it."""
    sizes: list[int] = [
        max(weight.shape[-2:])
        for module in model.modules()
        if not isinstance(module, torch.nn.Embedding)
        and module is not model.get_output_embeddings()
        for weight in module.parameters(recurse=False)
        if weight.dim() > 1
    ]
    chosen: int = getattr(config, "num_experts_per_tok", None) or 1
    return max(sizes, default=config.hidden_size) * chosen


def attention_groups(specs: list[AttentionSpec]) -> tuple[KvGroup, ...]:
    return group_layers((s.num_kv_heads, (s.head_dim, s.value_dim), s.window) for s in specs)
