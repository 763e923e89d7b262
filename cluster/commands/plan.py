"""`kvrelay plan`: what of a model fits into a memory, before anything is loaded."""

import argparse
import json
import sys

from cluster.commands.sizes import parse_bytes
from engine.capacity import Capacity, plan_capacity
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.machine import available_memory
from engine.memory import format_bytes
from engine.model_source import resolve_model
from engine.models.describe import describe
from engine.models.interface import ModelDescription

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="bundled", help="folder, Hugging Face id")
    parser.add_argument("--revision", help="branch, tag or commit of a Hugging Face id")
    parser.add_argument("--download-dir", help="where downloads are kept")
    parser.add_argument(
        "--memory", help="for weights and cache, such as 16GiB; default: what is available here"
    )
    parser.add_argument("--context", type=int, help="tokens of a sequence; default: the most")
    parser.add_argument("--dtype", default="auto", help="of the weights; default: the model's")
    parser.add_argument("--block-size", type=int, default=16, help="tokens in a cache block")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> int:
    source = resolve_model(
        arguments.model, arguments.revision, arguments.download_dir, weights=False
    )
    model = describe(source)
    # the engine's own checks of the knobs that both have
    config = EngineConfig(dtype=arguments.dtype, block_size=arguments.block_size)
    memory = available_memory()
    if arguments.memory is not None:
        memory = parse_bytes("memory", arguments.memory)
    context = model.max_model_len if arguments.context is None else arguments.context
    if not 1 <= context <= model.max_model_len:
        raise ConfigError("context", f"{context}, must be in 1..{model.max_model_len}")
    capacity = plan_capacity(
        model,
        weight_bytes(model, config),
        memory,
        context,
        arguments.block_size,
        config.max_num_batched_tokens,
    )
    text = json.dumps(capacity.as_dict(), indent=2) if arguments.json else as_table(capacity)
    sys.stdout.write(text + "\n")
    return 0


def weight_bytes(model: ModelDescription, config: EngineConfig) -> int:
    """As an engine on this machine has them."""
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    copies_tied = model.num_tied > 0 and _copies_tied(config, dtype)
    return model.weight_bytes(ITEM_BYTES[dtype], copies_tied)


def _copies_tied(config: EngineConfig, dtype: str) -> bool:
    """Loads torch, which takes seconds: asked only where it matters."""
    from engine.kernels.registry import load_kernels
    from engine.sizing import DTYPES, find_device

    return load_kernels(config.kernels, find_device(config)).copies_tied(DTYPES[dtype])


def as_table(capacity: Capacity) -> str:
    native = "our decoder" if capacity.native else "through transformers"
    left = format_bytes(capacity.cache_bytes) if capacity.cache_bytes else "nothing"
    lines = [
        f"{capacity.architecture} ({native}), {capacity.num_parameters / 1e6:.1f} M parameters",
        f"weights {format_bytes(capacity.weight_bytes)} of {format_bytes(capacity.memory_bytes)},"
        f" {left} left for the cache",
        f"sequences of {capacity.context_tokens} tokens, blocks of {capacity.block_size}",
        "",
        f"{'KV format':<12}{'bytes/token':>12}{'bytes/block':>13}{'blocks':>14} {'sequences':>10}",
    ]
    for row in capacity.formats:
        blocks = "-" if row.num_blocks is None else "+".join(map(str, row.num_blocks))
        sequences = "none" if row.num_sequences is None else str(row.num_sequences)
        name = row.kv_format + ("" if row.served else " *")
        lines.append(
            f"{name:<12}{row.bytes_per_token:>12}{row.block_bytes:>13} {blocks:>13} {sequences:>10}"
        )
    lines += ["", "* planned only: the engine does not serve this format yet"]
    lines += [f"{row.kv_format}: {row.problem}" for row in capacity.formats if row.problem]
    return "\n".join(lines)
