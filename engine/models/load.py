"""Weights onto a device: from a source and its description to a model that can run."""

from __future__ import annotations

import torch

from engine.errors import ModelError
from engine.fingerprint import same_samples
from engine.kernels.interface import Kernels
from engine.model_source import ModelSource
from engine.models.decoder_config import DecoderConfig
from engine.models.decoder_loader import DecoderLoader, Reader
from engine.models.decoder_tensors import (
    DecoderTensors,
    decoder_tensors,
    refuse_unexpected,
    stored_tensors,
)
from engine.models.interface import CausalModel, LoadFormat, ModelDescription
from engine.models.parse_config import parse_decoder
from engine.models.replayed import EXACT, ON_A_LADDER, ReplayedDecoder
from engine.random_tensors import RandomTensors
from engine.weights import CheckpointTensors, TensorSource


def load_model(
    source: ModelSource,
    description: ModelDescription,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat = "auto",
    seed: int = 0,
) -> CausalModel:
    """`description.max_model_len` is the number of positions the model is made for.

    A server that allows less than the model promises passes a description that says so: tables
    are then smaller, and longrope models use their short factors where these suffice.
    """
    if not description.native:
        from engine.models.transformers_model import load_transformers_model

        return load_transformers_model(
            source, description, kernels, dtype, device, load_format, seed
        )
    config = parse_decoder(source.config)
    tensors, weights = _open(source, config, load_format, seed)
    return load_decoder(
        config, tensors, Reader(weights, dtype, device), kernels, description.max_model_len
    )


@torch.inference_mode()
def load_decoder(
    config: DecoderConfig,
    tensors: DecoderTensors,
    reader: Reader,
    kernels: Kernels,
    max_positions: int,
) -> CausalModel:
    decoder = DecoderLoader(config, tensors, reader, kernels, max_positions).load()
    sizes = EXACT if reader.device.type == "cpu" else ON_A_LADDER
    return ReplayedDecoder(decoder, kernels, sizes)


def _open(
    source: ModelSource, config: DecoderConfig, load_format: LoadFormat, seed: int
) -> tuple[DecoderTensors, TensorSource]:
    if load_format == "dummy":
        norm = 0.0 if config.norm_adds_one else 1.0
        random = RandomTensors(seed, config.initializer_range, norm)
        return decoder_tensors(config, config.style.prefixes[0]), random
    checkpoint = CheckpointTensors(source.folder)
    tensors = stored_tensors(config, checkpoint.stored)
    refuse_unexpected(config, tensors, checkpoint.stored)
    _check_tied(source, config, tensors, checkpoint)
    return tensors, checkpoint


def _check_tied(
    source: ModelSource,
    config: DecoderConfig,
    tensors: DecoderTensors,
    checkpoint: CheckpointTensors,
) -> None:
    """A head that is stored beside the embedding which it is tied to has to be the same: some
    would use it, and others not."""
    stored = checkpoint.stored
    heads = [name for name in stored if name.endswith("lm_head.weight")]
    embedding = stored.get(tensors.embedding.name)
    if not config.tied_embeddings or not heads or embedding is None:
        return
    if any(not same_samples(stored[head], embedding) for head in heads):
        raise ModelError(
            f"{source.folder}: {heads[0]} differs from {embedding.name}, to which config.json ties"
            " it; set tie_word_embeddings to false to use it, or leave it out of the checkpoint"
        )
