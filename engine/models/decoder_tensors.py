"""Which tensors a checkpoint of the native decoder holds: names, shapes, and what is fused."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from engine.checkpoint import StoredTensor, is_no_weight
from engine.errors import ModelError
from engine.models.decoder_config import DecoderConfig


@dataclass(frozen=True)
class Part:
    name: str
    shape: tuple[int, ...]


Stack = tuple[Part, ...]  # parts that follow each other along the first axis; () where absent


@dataclass(frozen=True)
class LayerTensors:
    qkv: Stack
    qkv_bias: Stack
    output: Stack
    output_bias: Stack
    gate_up: Stack
    gate_up_bias: Stack
    down: Stack
    down_bias: Stack
    input_norm: Part
    post_attention_norm: Part | None  # behind attention, before the residual (Gemma)
    mlp_norm: Part
    post_mlp_norm: Part | None
    query_norm: Part | None
    key_norm: Part | None

    def parts(self) -> Iterator[Part]:
        for value in vars(self).values():
            if isinstance(value, Part):
                yield value
            elif value is not None:
                yield from value


@dataclass(frozen=True)
class DecoderTensors:
    embedding: Part
    layers: tuple[LayerTensors, ...]
    final_norm: Part
    head: Part | None  # None: tied to the embedding

    def parts(self) -> Iterator[Part]:
        yield self.embedding
        for layer in self.layers:
            yield from layer.parts()
        yield self.final_norm
        if self.head is not None:
            yield self.head

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(part.shape) for part in self.parts())


def decoder_tensors(config: DecoderConfig, prefix: str) -> DecoderTensors:
    embedding = (config.vocab_size, config.hidden_size)
    return DecoderTensors(
        Part(f"{prefix}embed_tokens.weight", embedding),
        tuple(
            _layer_tensors(config, f"{prefix}layers.{index}.")
            for index in range(len(config.layers))
        ),
        Part(f"{prefix}norm.weight", (config.hidden_size,)),
        None if config.tied_embeddings else Part(_head_name(prefix), embedding),
    )


def _head_name(prefix: str) -> str:
    return "language_model.lm_head.weight" if prefix.startswith("language_") else "lm_head.weight"


def _layer_tensors(config: DecoderConfig, prefix: str) -> LayerTensors:
    hidden, mlp = config.hidden_size, config.mlp_size
    attention, feed_forward = f"{prefix}self_attn.", f"{prefix}mlp."
    if config.style.fused:
        qkv_rows = {f"{attention}qkv_proj": config.q_size + 2 * config.kv_size}
        gate_up_rows = {f"{feed_forward}gate_up_proj": 2 * mlp}
    else:
        qkv_rows = {
            f"{attention}q_proj": config.q_size,
            f"{attention}k_proj": config.kv_size,
            f"{attention}v_proj": config.kv_size,
        }
        gate_up_rows = {f"{feed_forward}gate_proj": mlp, f"{feed_forward}up_proj": mlp}
    output_rows, down_rows = {f"{attention}o_proj": hidden}, {f"{feed_forward}down_proj": hidden}
    head_norm = config.head_norm

    def norm(name: str, wanted: bool = True, size: int = hidden) -> Part | None:
        return Part(f"{prefix}{name}.weight", (size,)) if wanted else None

    sandwich = config.sandwich_norms
    input_norm = norm("input_layernorm")
    mlp_norm = norm("pre_feedforward_layernorm" if sandwich else "post_attention_layernorm")
    assert input_norm is not None
    assert mlp_norm is not None
    return LayerTensors(
        qkv=_weights(qkv_rows, hidden),
        qkv_bias=_biases(qkv_rows, config.qkv_bias),
        output=_weights(output_rows, config.q_size),
        output_bias=_biases(output_rows, config.output_bias),
        gate_up=_weights(gate_up_rows, hidden),
        gate_up_bias=_biases(gate_up_rows, config.mlp_bias),
        down=_weights(down_rows, mlp),
        down_bias=_biases(down_rows, config.mlp_bias),
        input_norm=input_norm,
        post_attention_norm=norm("post_attention_layernorm", sandwich),
        mlp_norm=mlp_norm,
        post_mlp_norm=norm("post_feedforward_layernorm", sandwich),
        query_norm=norm("self_attn.q_norm", head_norm, config.head_dim),
        key_norm=norm("self_attn.k_norm", head_norm, config.head_dim),
    )


def _weights(rows: dict[str, int], columns: int) -> Stack:
    return tuple(Part(f"{name}.weight", (count, columns)) for name, count in rows.items())


def _biases(rows: dict[str, int], wanted: bool) -> Stack:
    return tuple(Part(f"{name}.bias", (n,)) for name, n in rows.items()) if wanted else ()


def stored_tensors(config: DecoderConfig, names: Iterable[str]) -> DecoderTensors:
    """As this checkpoint calls them."""
    present = set(names)
    prefix = _prefix(config, present)
    tensors, head = decoder_tensors(config, prefix), _head_name(prefix)
    if config.tied_embeddings and tensors.embedding.name not in present and head in present:
        # safetensors' save_model keeps a shared weight under the first of its names.
        return replace(tensors, embedding=replace(tensors.embedding, name=head))
    if config.tied_without_head and head not in present:
        return replace(tensors, head=None)
    return tensors


def _prefix(config: DecoderConfig, present: set[str]) -> str:
    """Which of the family's spellings this checkpoint uses."""
    for prefix in config.style.prefixes:
        if any(name.startswith(prefix) for name in present):
            return prefix
    return config.style.prefixes[0]


def refuse_unexpected(
    config: DecoderConfig, tensors: DecoderTensors, stored: Mapping[str, StoredTensor]
) -> None:
    """A tensor that we would not use means that we would compute something else."""
    expected = {part.name for part in tensors.parts()}
    unexpected = sorted(
        name
        for name, tensor in stored.items()
        if name not in expected and not _is_harmless(config, tensor)
    )
    if unexpected:
        shown = ", ".join(unexpected[:3]) + (", ..." if len(unexpected) > 3 else "")
        raise ModelError(
            f"{len(unexpected)} tensors of the checkpoint have no place in"
            f" {config.architecture} with this config: {shown}"
        )


def _is_harmless(config: DecoderConfig, tensor: StoredTensor) -> bool:
    return (
        is_no_weight(tensor)
        or (config.tied_embeddings and tensor.name.endswith("lm_head.weight"))
        or tensor.name.startswith(config.style.ignored_prefixes)
    )
