"""The knobs of an engine, under the names that users know from vLLM."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_args, get_origin, get_type_hints

from engine.errors import ConfigError

_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    type(None): "null",
}


def type_words(types: Iterable[type]) -> str:
    """As people know them who write YAML."""
    known = set(types)
    if float in known:
        known.discard(int)
    return " or ".join(words for one, words in _WORDS.items() if one in known)


def _knob(default: Any, help: str, choices: tuple[Any, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True)
class EngineConfig:
    """Everything one engine needs to know; checked when made, unknown names are errors.

    None means "decided at start, from the model and the machine"; what was decided is printed.
    """

    model: str = _knob("bundled", "a folder, a Hugging Face id, or 'bundled'")
    revision: str | None = _knob(None, "branch, tag or commit of a Hugging Face id")
    download_dir: str | None = _knob(None, "where downloads are kept")
    load_format: str = _knob(
        "auto", "safetensors, or random weights in the model's shape", ("auto", "dummy")
    )
    dtype: str = _knob(
        "auto", "of weights and activations", ("auto", "bfloat16", "float16", "float32")
    )
    device: str = _knob("auto", "where the model runs", ("auto", "cpu", "cuda"))
    kernels: str = _knob(
        "auto", "which kernels do the work", ("auto", "reference", "cpu", "triton")
    )
    num_threads: int | None = _knob(None, "CPU threads of this engine")
    seed: int = _knob(
        0, "of random weights, and of requests without a seed (the HTTP front draws one for each)"
    )

    block_size: int | None = _knob(None, "tokens in a cache block, a power of two")
    kv_cache_dtype: str = _knob(
        "auto",
        "format of the cache: 'auto' is the model's; 'fp8' is 'fp8_e4m3'",
        ("auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"),
    )
    kv_cache_memory_bytes: int | None = _knob(None, "size of the cache; overrides the share")
    gpu_memory_utilization: float | None = _knob(
        None, "share of a GPU's memory for weights and cache; by default 0.9"
    )
    max_model_len: int | None = _knob(None, "longest prompt and answer together, in tokens")
    enable_prefix_caching: bool = _knob(True, "keep full blocks for prompts that share them")
    eviction_policy: str = _knob(
        "lru", "which cached blocks go first", ("lru", "priority", "frequency")
    )
    watermark: float = _knob(0.01, "share of the blocks that no new sequence may take")

    max_num_seqs: int = _knob(64, "sequences that run at once")
    max_num_batched_tokens: int = _knob(2048, "tokens computed in one step")
    max_pause_s: float = _knob(
        0.5, "prompts get what lets a step beside answers end so soon, else in twice that"
    )
    max_num_queued_reqs: int = _knob(
        4096, "requests that may wait; more are rejected, but for answers begun elsewhere"
    )
    scheduling_policy: str = _knob(
        "fcfs",
        "who goes first; with 'priority' lower is sooner, with 'shortest' the shorter prompt",
        ("fcfs", "priority", "shortest"),
    )
    max_overtake_s: float = _knob(
        10.0, "with 'shortest', nobody goes before one who came so much sooner"
    )
    preemption_mode: str = _knob(
        "recompute", "what becomes of a preempted sequence's cache", ("recompute", "swap")
    )
    swap_space_bytes: int = _knob(1 << 30, "host memory for swapped sequences")
    async_scheduling: bool | None = _knob(
        None, "plan a step while the device is at the one before; a GPU does unless told otherwise"
    )
    stall_timeout_s: float = _knob(
        60.0,
        "work queued and no step for so long, nor for 3 times what it should take, is reported",
    )

    def __post_init__(self) -> None:
        for knob in fields(self):
            self._check_type(knob.name)
            choices = knob.metadata["choices"]
            value = getattr(self, knob.name)
            if choices and value not in choices:
                raise ConfigError(knob.name, f"{value!r}, must be one of {', '.join(choices)}")
        if not self.model:
            raise ConfigError("model", "must not be empty")
        size = self.block_size
        if size is not None and (size < 8 or size & (size - 1)):
            raise ConfigError("block_size", f"{size}, must be a power of two, at least 8")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not value > 0:  # nor NaN
                raise ConfigError(name, f"{value}, must be positive")
        for name, most in _MOST.items():
            value = getattr(self, name)
            if value is not None and value > most:
                raise ConfigError(name, f"{value}, must be at most {most}")
        if self.max_model_len == 1:
            raise ConfigError("max_model_len", "1, must be at least 2: a prompt and an answer")
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError("seed", "must be an integer of 64 bits")
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ConfigError("gpu_memory_utilization", "must be above 0 and at most 1")
        if not 0 <= self.watermark < 0.5:
            raise ConfigError("watermark", f"{self.watermark}, must be in 0 .. 0.5")
        if self.swap_space_bytes < 0:
            raise ConfigError("swap_space_bytes", "must not be negative")

    def _check_type(self, name: str) -> None:
        hint, value = _HINTS[name], getattr(self, name)
        allowed = get_args(hint) if get_origin(hint) is not None else (hint,)
        ok = isinstance(value, allowed) or (float in allowed and type(value) is int)
        if not ok or (isinstance(value, bool) and bool not in allowed):
            raise ConfigError(name, f"{value!r}, must be {type_words(allowed)}")

    @property
    def kv_cache_format(self) -> str:
        """`kv_cache_dtype` by the one name of each format, which configs can be compared by."""
        return "fp8_e4m3" if self.kv_cache_dtype == "fp8" else self.kv_cache_dtype

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> "EngineConfig":
        """From YAML, JSON or the command line."""
        for name in options:
            if name not in _HINTS:
                raise ConfigError(name, f"unknown option; known are {', '.join(sorted(_HINTS))}")
        return cls(**options)


_HINTS = get_type_hints(EngineConfig)
KNOBS = frozenset(_HINTS)
_POSITIVE = (
    "num_threads",
    "kv_cache_memory_bytes",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_pause_s",
    "max_num_queued_reqs",
    "max_overtake_s",
    "stall_timeout_s",
)
# far beyond every machine: what would exhaust one before it is noticed
_MOST = {
    "num_threads": 1024,
    "max_num_seqs": 65536,
    "max_model_len": 2**27,
    "max_pause_s": 10**6,
    "max_overtake_s": 10**6,
}
