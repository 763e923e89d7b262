"""`kvrelay plan`: what of a model fits into a memory, before anything is loaded."""

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING

from cluster.commands.console import answer
from cluster.commands.sizes import parse_bytes
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.memory import format_bytes
from engine.model_source import resolve_model
from engine.models.describe import describe

if TYPE_CHECKING:
    from engine.capacity import Capacity

# of an engine's knobs those that decide what is left for the cache
_KNOBS = {
    "gpu_memory_utilization": (float, "share of a GPU's memory for weights and cache"),
    "max_num_seqs": (int, "sequences that run at once"),
    "max_num_batched_tokens": (int, "tokens computed in one step"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="bundled", help="folder, Hugging Face id")
    parser.add_argument("--revision", help="branch, tag or commit of a Hugging Face id")
    parser.add_argument("--download-dir", help="where downloads are kept")
    parser.add_argument(
        "--device",
        default="auto",
        help="cpu, or cuda, which need not be here; default: what an engine would choose here",
    )
    parser.add_argument(
        "--memory", help="of the device, such as 16GiB; default: what is available here"
    )
    parser.add_argument("--context", type=int, help="tokens of a sequence; default: the most")
    parser.add_argument("--dtype", default="auto", help="of the weights; default: the model's")
    parser.add_argument(
        "--block-size", type=int, help="tokens in a cache block; default: the device's"
    )
    for name, (kind, text) in _KNOBS.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=kind, help=f"{text}; default: the engine's")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> int:
    """1 where no format of the cache that is served has room for a sequence."""
    # the engine's own checks of the knobs that both have
    given = {name: getattr(arguments, name) for name in ("device", "dtype", "block_size", *_KNOBS)}
    config = EngineConfig(**{name: value for name, value in given.items() if value is not None})
    memory = None
    if arguments.memory is not None:
        memory = parse_bytes("memory", arguments.memory)
    source = resolve_model(
        arguments.model, arguments.revision, arguments.download_dir, weights=False
    )
    model = describe(source)
    context = arguments.context
    if context is not None and not 2 <= context <= model.max_model_len:
        raise ConfigError("context", f"{context}, must be in 2..{model.max_model_len}")
    from engine.capacity import plan_capacity  # the engine's decisions load torch

    capacity = plan_capacity(replace(config, max_model_len=context), model, memory)
    text = json.dumps(capacity.as_dict(), indent=2) if arguments.json else as_table(capacity)
    answer(text)
    fits = any(row.served and row.problem is None for row in capacity.formats)
    return 0 if fits else 1


def as_table(capacity: "Capacity") -> str:
    native = "our decoder" if capacity.native else "through transformers"
    lines = [
        f"{capacity.architecture} ({native}), {capacity.num_parameters / 1e6:.1f} M parameters",
        _shares(capacity),
        f"sequences of {capacity.context_tokens} tokens, blocks of {capacity.block_size}",
        "",
        f"{'KV format':<12}{'bytes/token':>12}{'bytes/block':>13}{'blocks':>14} {'tokens':>10}"
        f" {'sequences':>10}",
    ]
    for row in capacity.formats:
        blocks = "-" if row.num_blocks is None else "+".join(map(str, row.num_blocks))
        tokens = "-" if row.num_tokens is None else str(row.num_tokens)
        sequences = "none" if row.num_sequences is None else str(row.num_sequences)
        name = row.kv_format + ("" if row.served else " *")
        lines.append(
            f"{name:<12}{row.bytes_per_token:>12}{row.block_bytes:>13} {blocks:>13} {tokens:>10}"
            f" {sequences:>10}"
        )
    if any(row.num_blocks is not None and len(row.num_blocks) > 1 for row in capacity.formats):
        lines += ["", "tokens are those of layers that see all before them; layers with a window"]
        lines += ["keep the last ones of each sequence, in blocks of their own, behind the plus"]
    lines += ["", f"* not served beside weights in {capacity.dtype}; int4 is planned only"]
    lines += [f"{row.kv_format}: {row.problem}" for row in capacity.formats if row.problem]
    return "\n".join(lines)


def _shares(capacity: "Capacity") -> str:
    left = format_bytes(capacity.cache_bytes) if capacity.cache_bytes else "nothing"
    weights = f"{capacity.dtype} weights {format_bytes(capacity.weight_bytes)}"
    if capacity.device == "cuda":
        steps, memory = format_bytes(capacity.step_bytes), format_bytes(capacity.memory_bytes)
        used = f"{capacity.gpu_memory_utilization} of {memory} is used"
        held = f"others {format_bytes(capacity.held_bytes)}, " if capacity.held_bytes else ""
        return f"on cuda {used}: {held}{weights}, steps {steps}, {left} left for the cache"
    tables, memory = format_bytes(capacity.table_bytes), format_bytes(capacity.memory_bytes)
    shares = f"on cpu {weights} and tables {tables} of {memory}, {left} left for the cache"
    if not capacity.cache_bytes:
        return shares
    default = format_bytes(capacity.default_cache_bytes)
    return f"{shares};\nan engine takes {default} of that where kv_cache_memory_bytes does not say"
