"""How long a step takes, and how much a worker holds: the model of a device and of its model.

    compute = (2 layer (u + B) + 2 head (B + done) + pair (pairs + ctx)) / (flops mfu)
    memory  = (weights + kv (ctx + cached)) / (bytes mbu)
    step    = overhead + max(compute, memory)

`u` new prompt tokens that attend to `pairs` tokens and read `cached` ones, `done` prompts that end
in the step, `B` sequences that decode and read `ctx` tokens. A step reads the weights once, however
much is in it: prompts and decoding share what the other one leaves idle.
"""

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.simulate.traffic import BLOCK_TOKENS
from engine.errors import ConfigError
from router.workers import LinkSpeed, StepCosts

H200_LLAMA_8B = Path(__file__).with_name("h200_llama_8b.toml")


@dataclass(frozen=True, slots=True)
class PromptWork:
    """Of all prompts in one step."""

    num_tokens: int = 0
    num_pairs: float = 0.0
    num_cached: int = 0
    num_done: int = 0

    def plus(self, new: int, cached: int, done: bool) -> "PromptWork":
        pairs = new * cached + new * new / 2
        return PromptWork(
            self.num_tokens + new, self.num_pairs + pairs, self.num_cached + cached,
            self.num_done + done,
        )  # fmt: skip


NO_PROMPTS = PromptWork()


@dataclass(frozen=True, slots=True)
class Device:
    """Rates are what is reached, not what is on the data sheet."""

    flops_per_s: float
    bytes_per_s: float
    prompt_step_s: float
    decode_step_s: float
    weight_bytes: float
    layer_parameters: float
    head_parameters: float
    pair_flops: float
    kv_token_bytes: int
    block_tokens: int
    num_blocks: int
    link: LinkSpeed

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.kv_token_bytes

    def compute_s(self, prompts: PromptWork, num_sequences: int, context: int) -> float:
        """The arithmetic of a step."""
        flops = (
            2 * self.layer_parameters * (prompts.num_tokens + num_sequences)
            + 2 * self.head_parameters * (num_sequences + prompts.num_done)
            + self.pair_flops * (prompts.num_pairs + context)
        )
        return flops / self.flops_per_s

    def memory_s(self, prompts: PromptWork, context: int) -> float:
        """The reading of a step."""
        tokens = context + prompts.num_cached
        return (self.weight_bytes + self.kv_token_bytes * tokens) / self.bytes_per_s

    def step_s(self, prompts: PromptWork, num_sequences: int = 0, context: int = 0) -> float:
        overhead_s = self.prompt_step_s if prompts.num_tokens else self.decode_step_s
        return overhead_s + max(
            self.compute_s(prompts, num_sequences, context), self.memory_s(prompts, context)
        )

    def prefill_costs(self) -> StepCosts:
        """What a prefill worker reports: its steps are bound by arithmetic."""
        return StepCosts(
            step_s=self.prompt_step_s,
            prompt_token_s=2 * self.layer_parameters / self.flops_per_s,
            prompt_pair_s=self.pair_flops / self.flops_per_s,
        )

    def decode_costs(self) -> StepCosts:
        """What a decode worker reports: its steps are bound by reading."""
        return self.prefill_costs()._replace(
            step_s=self.decode_step_s + self.weight_bytes / self.bytes_per_s,
            context_token_s=self.kv_token_bytes / self.bytes_per_s,
        )


# Sections of the file, and their keys; every one is a positive number.
_KEYS = {
    "device": (
        "flops_per_s",
        "bytes_per_s",
        "mfu",
        "mbu",
        "prompt_step_s",
        "decode_step_s",
    ),
    "model": (
        "weight_bytes",
        "layer_parameters",
        "head_parameters",
        "pair_flops",
        "kv_token_bytes",
    ),
    "cache": ("num_tokens",),
    "link": ("bytes_per_s", "latency_s"),
}


def load_device(path: Path = H200_LLAMA_8B) -> Device:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError("device", f"{path}: {error}") from error
    device, model, cache, link = (_section(path, found, name) for name in _KEYS)
    if extra := found.keys() - _KEYS.keys():
        raise ConfigError("device", f"{path}: unknown section {min(extra)!r}")
    rates = {
        "flops_per_s": device["flops_per_s"] * device["mfu"],
        "bytes_per_s": device["bytes_per_s"] * device["mbu"],
    }
    values: dict[str, Any] = {**device, **model, **rates}
    known = {field.name for field in fields(Device)}
    return Device(
        **{key: value for key, value in values.items() if key in known and key != "kv_token_bytes"},
        kv_token_bytes=int(model["kv_token_bytes"]),
        block_tokens=BLOCK_TOKENS,
        num_blocks=int(cache["num_tokens"]) // BLOCK_TOKENS,
        link=LinkSpeed(**link),
    )


def _section(path: Path, found: dict[str, Any], name: str) -> dict[str, float]:
    section = found.get(name)
    if not isinstance(section, dict):
        raise ConfigError("device", f"{path}: has no section [{name}]")
    for key in _KEYS[name]:
        value = section.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError("device", f"{path}: {name}.{key}: {value!r}, must be above 0")
    if extra := section.keys() - set(_KEYS[name]):
        raise ConfigError("device", f"{path}: {name}: unknown key {min(extra)!r}")
    for share in ("mfu", "mbu"):
        if section.get(share, 0) > 1:
            raise ConfigError("device", f"{path}: {name}.{share}: must be at most 1")
    return section
