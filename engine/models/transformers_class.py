"""Which transformers class a model folder means, and why some of them cannot be served."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import ModelError
from engine.model_source import ModelSource
from engine.models.families import OTHER_TENSORS
from engine.models.layer_types import MOST_LAYERS
from engine.models.parse_config import architecture_of

MXFP4 = "mxfp4"  # as checkpoints name what gpt-oss comes in
# What transformers calls the layers of a model, in its config's layer_types.
_ATTENTION = {"full_attention", "sliding_attention", "attention"}
_RECURRENT = {"conv", "linear_attention", "mamba", "recurrent", "hybrid", "hybrid_sliding"}


@dataclass(frozen=True, eq=False)
class TransformersClass:
    """A causal model's class and config, as transformers reads it from the folder."""

    architecture: str
    model_class: Any
    config: Any

    @property
    def text_config(self) -> Any:
        """Of the text model, where the class has others beside it; mostly the same."""
        return self.config.get_text_config(decoder=True)

    @property
    def is_mxfp4(self) -> bool:
        """Whatever else is quantised has been refused."""
        return getattr(self.config, "quantization_config", None) is not None

    def instantiate(self, attention: str, dtype: torch.dtype) -> Any:
        """A model with the weights of transformers' own initialisation, on the current device."""
        with reported(self.architecture):
            try:
                model = self.model_class._from_config(
                    self.config, attn_implementation=attention, dtype=dtype
                )
            except KeyError as error:
                if error.args != (attention,):
                    raise
                raise ModelError("its class knows attentions of its own alone") from error
            return model.eval()


def transformers_class(source: ModelSource) -> TransformersClass:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config_json = source.config
    architecture = architecture_of(config_json)
    quantised = config_json.section("quantization_config")
    if quantised is not None and quantised.optional_text("quant_method") != MXFP4:
        message = f"quantised checkpoints are not supported, but for quant_method {MXFP4}"
        raise config_json.fail("quantization_config", message)
    class_name, config_name = _names(architecture, config_json.optional_text("model_type"))
    if not hasattr(transformers, class_name):
        remote = " (it comes with code of its own, which is not run)"
        note = remote if config_json.raw("auto_map") else ""
        raise _refusal(architecture, f"transformers has no such class{note}")
    if class_name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise _refusal(architecture, "is not a causal language model")
    model_class = getattr(transformers, class_name)
    config_class = getattr(transformers, config_name) if config_name else model_class.config_class
    names = config_class.attribute_map  # of what the class calls otherwise
    for section in filter(None, (config_json, config_json.section("text_config"))):
        for name in ("num_hidden_layers", names.get("num_hidden_layers", "num_hidden_layers")):
            section.optional_integer(name, maximum=MOST_LAYERS)
    with reported(architecture):
        config = config_class.from_pretrained(source.folder)
        found = TransformersClass(architecture, model_class, config)
        _refuse(architecture, model_class, found.text_config)
    return found


def _names(architecture: str, model_type: str | None) -> tuple[str, str | None]:
    """Of the class, and of its config where that is not the class's own: transformers has some
    models, such as InternLM 3 and EXAONE, as a config for another's class."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config_name = CONFIG_MAPPING_NAMES.get(model_type)
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    own_config = architecture.replace("ForCausalLM", "Config")
    saved_as = class_name if model_type in OTHER_TENSORS else None  # by transformers
    is_own = config_name == own_config and not hasattr(transformers, architecture)
    if class_name and (is_own or architecture == saved_as):
        return class_name, config_name
    return architecture, None


def _refuse(architecture: str, model_class: Any, config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise _refusal(architecture, "is an encoder-decoder")
    # The class of models with recurrent layers also has those without, as that of Granite 4 does.
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    recurrent = kinds & _RECURRENT
    if recurrent or (model_class._is_stateful and not kinds):
        named = f" ({', '.join(sorted(recurrent))})" if recurrent else ""
        raise _refusal(architecture, f"keeps recurrent state{named}, which has no paged cache")
    if other := sorted(kinds - _ATTENTION):
        names = ", ".join(other)
        raise _refusal(architecture, f"has layers that paged attention cannot serve ({names})")
    if not model_class._can_set_attn_implementation():
        raise _refusal(architecture, "its class takes no attention implementation")


def find_decoder(architecture: str, model: Any) -> Any:
    """The part between token ids and final hidden states."""
    decoder = model.get_decoder()
    # It goes by names, and one class calls its decoder otherwise, another its head so.
    if decoder in (model, model.get_output_embeddings()):
        decoder = getattr(model, "model", model)
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        raise _refusal(architecture, "its decoder takes no position_ids")
    # RoBERTa and its kin begin behind the padding token's id, where nobody tells them positions.
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in decoder.modules()):
        raise _refusal(architecture, "its positions do not begin at 0")
    return decoder


def max_positions(architecture: str, config: Any) -> int:
    """What positions the model is good for whatever it is batched with."""
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 2:
        raise _refusal(
            architecture,
            f"config.json: max_position_embeddings: {positions}, must be an integer of at least 2",
        )
    return min(positions, longrope_limit(config) or positions)


def longrope_limit(config: Any) -> int | None:
    """Where its class changes factors, for a whole batch when one sequence grows beyond."""
    rope = getattr(config, "rope_parameters", None) or {}
    limits = [
        int(section["original_max_position_embeddings"])
        for section in (rope, *(value for value in rope.values() if isinstance(value, dict)))
        if section.get("rope_type") == "longrope"
    ]
    return min(limits, default=None)


@contextmanager
def reported(architecture: str) -> Iterator[None]:
    """transformers raises whatever its config and model classes happen to trip over."""
    try:
        yield
    except ModelError as error:
        if str(error).startswith(architecture):
            raise
        raise _refusal(architecture, str(error)) from error
    except Exception as error:
        raise _refusal(architecture, f"{type(error).__name__}: {error}") from error


def _refusal(architecture: str, reason: str) -> ModelError:
    return ModelError(f"{architecture} cannot be served: {reason}")
