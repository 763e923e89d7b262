"""A model's description from its config, without reading a weight."""

from __future__ import annotations

from engine.errors import ModelError
from engine.model_source import ModelSource
from engine.models.decoder_config import DecoderConfig
from engine.models.decoder_tensors import decoder_tensors
from engine.models.families import is_covered
from engine.models.interface import ModelDescription
from engine.models.parse_config import architecture_of, parse_decoder
from kv_cache.layout import LayoutError


def describe(source: ModelSource) -> ModelDescription:
    """Imports torch and transformers only for models that the native decoder does not cover."""
    model_type = source.config.optional_text("model_type")
    if is_covered(architecture_of(source.config), model_type):
        return describe_decoder(parse_decoder(source.config))
    from engine.models.transformers_describe import describe_transformers

    return describe_transformers(source)


def describe_decoder(config: DecoderConfig) -> ModelDescription:
    try:
        groups = config.groups
    except LayoutError as error:
        raise ModelError(f"{config.architecture}: {error}") from error
    return ModelDescription(
        architecture=config.architecture,
        native=True,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=len(config.layers),
        num_heads=config.num_heads,
        mlp_size=config.mlp_size,
        max_model_len=config.max_context,
        dtype=config.dtype,
        num_parameters=decoder_tensors(config, "").num_parameters,
        groups=groups,
        num_tied=config.vocab_size * config.hidden_size if config.tied_embeddings else 0,
        longrope_limit=config.longrope_limit,
        # a cosine and a sine in fp32 for every pair of elements that is turned
        position_bytes=sum(4 * rope.rotary_dim for rope in {one.rope for one in config.layers}),
    )
