"""Learns what every attention layer of a transformers model computes, by one recorded pass.

The model lives on the meta device: no weight is read and nothing is computed. Where its class looks
at values on the way, as to count the tokens of each expert, all of them are zeros instead, and take
no memory either. An attention that ours would get wrong (a mask, a bias that it would ignore) is
refused here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from engine.errors import ModelError
from engine.kernels.interface import AttentionSpec
from engine.models.mask_reach import MaskFunction, mask_window

PROBE = "kvrelay_probe"
NUM_TOKENS = 4

# What models pass to any attention function and what does not change its result.
_IGNORED_ARGUMENTS = frozenset(
    {
        "dropout",
        "position_ids",
        "cache_position",
        "use_cache",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "layer_idx",
    }
)

_BY_LENGTH = ("dynamic", "longrope")  # rotations that change where positions go far


@dataclass(frozen=True)
class ProbedAttention:
    module: str  # its name inside the model
    spec: AttentionSpec
    sinks: str | None  # the parameter's name


class _MaskMarker:
    """Rides on the mask tensor that a model hands to its layers; not every mask is used."""

    def __init__(self, mask_function: MaskFunction) -> None:
        self._mask_function = mask_function

    @cached_property
    def window(self) -> int | None:
        return mask_window(self._mask_function)


class _Recorder:
    """Stands in for the attention function of the one model that is being probed."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}  # of the model's modules, by id
        self.attentions: list[ProbedAttention] = []
        self._queries: dict[str, torch.Tensor] = {}  # by module, as they were first given

    def forget(self) -> None:
        self.attentions.clear()
        self._queries.clear()

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,  # [1, heads, tokens, head_dim]
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **arguments: Any,
    ) -> tuple[torch.Tensor, None]:
        name = self.names[id(module)]
        if self._queries.setdefault(name, query) is not query:
            # With a cache, some of these read what another round has written.
            raise ModelError(f"{name}: it is computed in several rounds")
        window = _window(name, attention_mask, arguments.pop("sliding_window", None))
        causal = arguments.pop("is_causal", None)
        if causal is False or (causal is None and getattr(module, "is_causal", True) is False):
            raise ModelError(f"{name}: its attention is not causal")
        # Llama 4 counts them by itself, from the first token of a step.
        if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
            raise ModelError(f"{name}: its queries are scaled by positions that it is not told")
        scale = arguments.pop("scaling", None)
        soft_cap = arguments.pop("softcap", None)
        sinks = _sinks(module, name, query.shape[1], arguments)
        _refuse_arguments(name, arguments)
        head_dim = query.shape[-1]
        self.attentions.append(
            ProbedAttention(
                name,
                AttentionSpec(
                    num_heads=query.shape[1],
                    num_kv_heads=key.shape[1],
                    head_dim=head_dim,
                    value_dim=value.shape[-1],
                    scale=head_dim**-0.5 if scale is None else float(scale),
                    window=window,
                    soft_cap=None if soft_cap is None else float(soft_cap),
                ),
                sinks,
            )
        )
        return value.new_empty(1, query.shape[2], query.shape[1], value.shape[-1]), None


def _window(name: str, mask: torch.Tensor | None, argument: int | None) -> int | None:
    if mask is None:
        window = None
    else:
        marker = getattr(mask, "kvrelay_marker", None)
        if not isinstance(marker, _MaskMarker):
            raise ModelError(f"{name}: it makes an attention mask of its own")
        window = marker.window
    if argument is not None and argument != window:
        raise ModelError(f"{name}: asks for a window of {argument}, its mask has {window}")
    return window


def _sinks(
    module: torch.nn.Module, name: str, num_heads: int, arguments: dict[str, Any]
) -> str | None:
    """Stays among the arguments if it is no parameter of one score a head."""
    for parameter, value in module.named_parameters(recurse=False):
        if value is arguments.get("s_aux") and value.shape == (num_heads,):
            del arguments["s_aux"]
            return f"{name}.{parameter}"
    return None


def _refuse_arguments(name: str, arguments: Mapping[str, object]) -> None:
    for key, value in arguments.items():
        if value is not None and value is not False and key not in _IGNORED_ARGUMENTS:
            raise ModelError(f"{name}: the attention argument {key} is not supported")


class _MarkedMask(torch.Tensor):
    """Stays the same where a model takes all of it, as Gemma 4 does for layers that share keys."""

    kvrelay_marker: _MaskMarker

    def __getitem__(self, index: Any) -> torch.Tensor:
        part = super().__getitem__(index)
        sliced = isinstance(index, tuple) and all(isinstance(one, slice) for one in index)
        return self if sliced and part.shape == self.shape else part.as_subclass(torch.Tensor)


def _marked_mask(
    q_length: int, kv_length: int, mask_function: MaskFunction, **_: object
) -> torch.Tensor:
    mask = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool).as_subclass(_MarkedMask)
    mask.kvrelay_marker = _MaskMarker(mask_function)
    return mask


def probe_attention(
    instantiate: Callable[[str], Any], find_decoder: Callable[[Any], Any]
) -> tuple[Any, list[ProbedAttention]]:
    """A model without data, made for the attention it is told, and its layers' attentions."""
    from transformers import AttentionInterface, AttentionMaskInterface

    recorder = _Recorder()
    AttentionInterface.register(PROBE, recorder)
    AttentionMaskInterface.register(PROBE, _marked_mask)
    with torch.inference_mode():
        with torch.device("meta"):
            model = instantiate(PROBE)
        recorder.names = {id(module): name for name, module in model.named_modules()}
        _turn_by_no_length(model)
        decoder = find_decoder(model)
        try:
            with torch.device("meta"):
                _run(decoder)
        except RuntimeError:  # there are no values to look at
            recorder.forget()
            model._apply(lambda x: torch.zeros((), dtype=x.dtype).expand(x.shape))
            with _ProductsOfZeros():
                _run(decoder)
    return model, recorder.attentions


def _run(decoder: Any) -> None:
    shape = (1, NUM_TOKENS)
    decoder(
        input_ids=torch.zeros(shape, dtype=torch.int64),
        position_ids=torch.zeros(shape, dtype=torch.int64),
        # A mask of ones keeps transformers from looking for packed sequences, by value. It has
        # data, because some models look whether there are but ones.
        attention_mask=torch.ones(shape, dtype=torch.int64, device="cpu"),
        use_cache=False,
    )


class _ProductsOfZeros(TorchFunctionMode):
    """Need not be computed: for JetMoe's 8 billion parameters that took 12 s, and the rest 1.5."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (_zeros if func is F.linear else func)(*args, **(kwargs or {}))


def _zeros(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return input.new_zeros(*input.shape[:-1], weight.shape[0])


def _turn_by_no_length(model: Any) -> None:
    """Some rotations look how far positions go, and here there are none."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, dict):  # by the types of layers
            module.rope_type = {
                layers: "default" if kind in _BY_LENGTH else kind for layers, kind in kinds.items()
            }
        elif kinds in _BY_LENGTH:
            module.rope_type = "default"
            module.config = copy.deepcopy(module.config)  # where that of PhiMoE looks
            module.config.rope_parameters["rope_type"] = "default"
