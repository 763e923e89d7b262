"""A `CausalModel` made of a transformers model with our paged attention plugged in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from engine.checkpoint import StoredTensor, is_no_weight, open_checkpoint
from engine.errors import ModelError
from engine.kernels.interface import Kernels, StepBatch
from engine.model_source import ModelSource
from engine.models.attention_probe import ProbedAttention
from engine.models.interface import LoadFormat, ModelDescription
from engine.models.paged_attention import PAGED, PagedLayer, StepSlot, register_paged_attention
from engine.models.transformers_class import (
    TransformersClass,
    find_decoder,
    reported,
    transformers_class,
)
from engine.models.transformers_describe import probe
from kv_cache.layout import KvGroup
from kv_cache.slab import KvSlab

QUANTISED = ("F8_E4M3", "F8_E5M2", "I8")  # as safetensors spells them


class TransformersModel:
    """Runs a step as one flattened sequence; only attention tells its sequences apart."""

    def __init__(self, model: Any, decoder: Any, step: StepSlot, vocab_size: int) -> None:
        self._model = model
        self._decoder = decoder
        self._step = step
        self._vocab_size = vocab_size
        self._head_input: torch.Tensor | None = None
        self._run_decoder: Callable[..., Any] = decoder.forward
        # A base around the decoder, for images beside text, looks at the tokens on its way there.
        for body in {decoder, model.base_model} - {model}:
            body.forward = partial(self._body_or_given, body.forward)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def forward(
        self, batch: StepBatch, slabs: Sequence[KvSlab], wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        self._step.batch, self._step.slabs = batch, slabs
        self._step.to_come = iter(self._step.layers)
        try:
            output = self._run_decoder(
                input_ids=batch.token_ids.unsqueeze(0),
                position_ids=batch.positions.unsqueeze(0),
                use_cache=False,
            )
            assert next(self._step.to_come, None) is None, "a layer has not called attention"
        finally:
            self._step.batch, self._step.slabs = None, ()
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden if wanted is None else hidden.index_select(0, wanted)

    def prepare(self, slabs: Sequence[KvSlab], max_num_seqs: int) -> None:
        """Is ready."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The whole model with its decoder left out: heads scale and cap each in their own way."""
        self._head_input = hidden.unsqueeze(0)
        try:
            logits: torch.Tensor = self._model(inputs_embeds=self._head_input).logits[0]
        finally:
            self._head_input = None
        return logits

    def _body_or_given(self, run: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if self._head_input is None:
            return run(*arguments, **named)
        return _GivenHidden(self._head_input)


class _GivenHidden:
    """A decoder's output in which only the hidden states are set, whatever its class offers."""

    def __init__(self, last_hidden_state: torch.Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def load_transformers_model(
    source: ModelSource,
    description: ModelDescription,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat,
    seed: int,
) -> TransformersModel:
    found = transformers_class(source)
    _, attentions = probe(found)
    register_paged_attention()
    if load_format == "dummy":
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(seed)
            model = found.instantiate(PAGED, dtype)
    else:
        model = _from_checkpoint(found, source, dtype)
    model = model.to(device)
    step = StepSlot()
    step.layers = _attach(model, attentions, description.groups, kernels, step)
    decoder = find_decoder(found.architecture, model)
    return TransformersModel(model, decoder, step, description.vocab_size)


def _from_checkpoint(found: TransformersClass, source: ModelSource, dtype: torch.dtype) -> Any:
    from transformers import Mxfp4Config

    stored = open_checkpoint(source.folder)  # says which file is broken, and how
    for tensor in stored.values():
        if tensor.dtype in QUANTISED:  # which transformers would take for plain numbers
            where = f"{tensor.file}: {tensor.name}"
            raise ModelError(f"{where}: element type {tensor.dtype} is not supported")
    with reported(found.architecture):
        model, info = found.model_class.from_pretrained(
            source.folder,
            config=found.config,
            dtype=dtype,
            attn_implementation=PAGED,
            quantization_config=Mxfp4Config(dequantize=True) if found.is_mxfp4 else None,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are reported, below
        )
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs"):
        found_names = sorted(str(name) for name in info.get(problem) or ())
        if problem == "unexpected_keys":  # transformers knows some of these, by class and release
            no_weights = _renamed(model, filter(is_no_weight, stored.values()))
            found_names = [name for name in found_names if name not in no_weights]
        if found_names:
            what = problem.replace("_", " ").replace("keys", "tensors")
            raise ModelError(f"{source.folder}: {what}: {', '.join(found_names[:3])}")
    return model.eval()


def _renamed(model: Any, tensors: Iterable[StoredTensor]) -> set[str]:
    """What transformers calls them, which names those of some classes anew before it looks."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    return {rename_source_key(tensor.name, renamings, [])[0] for tensor in tensors}


def _attach(
    model: Any,
    attentions: list[ProbedAttention],
    groups: tuple[KvGroup, ...],
    kernels: Kernels,
    step: StepSlot,
) -> list[PagedLayer]:
    """In the order of their calls; a module finds its own."""
    layers = []
    for index, attention in enumerate(attentions):
        group = next(g for g, kv_group in enumerate(groups) if index in kv_group.layers)
        layer = groups[group].layers.index(index)
        sinks = None
        if attention.sinks is not None:
            sinks = model.get_parameter(attention.sinks).detach().float()
        layers.append(PagedLayer(kernels, attention.spec, group, layer, sinks, step))
        module = model.get_submodule(attention.module)
        module.kvrelay_layers = [*getattr(module, "kvrelay_layers", ()), layers[-1]]
    return layers
