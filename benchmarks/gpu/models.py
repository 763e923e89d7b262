"""Models and engines whose weights are made on the device, without a file."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.workloads import ModelShape
from engine.assemble import EngineInfo, assemble
from engine.config import EngineConfig
from engine.engine import Engine
from engine.fingerprint import fingerprint
from engine.generation_defaults import read_generation_defaults
from engine.model_source import ModelSource, resolve_model
from engine.models.decoder_loader import Reader
from engine.models.decoder_tensors import decoder_tensors
from engine.models.describe import describe
from engine.models.interface import CausalModel, ModelDescription
from engine.models.load import load_decoder
from engine.models.parse_config import parse_decoder
from engine.random_tensors import RandomTensors
from engine.sizing import decide_shape, memory_of, size_cache
from engine.weights import TensorSource


@dataclass(frozen=True)
class OfAnother:
    """The tensors of a model that is in memory."""

    tensors: Mapping[str, torch.Tensor]

    def read(self, name: str, out: torch.Tensor) -> None:
        out.copy_(self.tensors[name])


def write_config(folder: Path, shape: ModelShape, max_len: int) -> ModelSource:
    values: dict[str, Any] = shape.config() | {"max_position_embeddings": max_len}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return resolve_model(str(folder), weights=False)


def make_model(
    bench: Bench,
    source: ModelSource,
    dtype: torch.dtype,
    max_len: int,
    weights: TensorSource | None = None,
) -> tuple[CausalModel, ModelDescription]:
    description = replace(describe(source), max_model_len=max_len)
    config = parse_decoder(source.config)
    tensors = decoder_tensors(config, config.style.prefixes[0])
    reader = Reader(weights or RandomTensors(0, config.initializer_range), dtype, bench.device)
    model = load_decoder(config, tensors, reader, bench.kernels(), max_len)
    return model, description


def make_engine(
    bench: Bench,
    source: ModelSource,
    weights: TensorSource | None = None,
    wrap: Callable[[CausalModel], CausalModel] = lambda model: model,
    **knobs: Any,
) -> Engine:
    """What `Engine.create` makes, but for where the weights come from."""
    config = EngineConfig(
        model=str(source.folder), device=bench.device.type, kernels="triton", **knobs
    )
    described = describe(source)
    shape = decide_shape(config, described)
    model, described = make_model(bench, source, shape.dtype, shape.max_model_len, weights)
    info = EngineInfo(
        source=source,
        model=described,
        shape=shape,
        cache=size_cache(config, shape, described, memory_of(shape.device)),
        defaults=read_generation_defaults(source.folder),
        fingerprint=fingerprint(source, "dummy", config.seed, described.variant(shape.dtype_name)),
    )
    return Engine(info, assemble(config, info, wrap(model)), config.seed)
