"""Rotary position embedding as config.json asks for it, in either of its spellings.

The hub's classic keys are `rope_theta` and `rope_scaling`; transformers 5 writes
`rope_parameters`, with one entry for each layer type where these differ (Gemma 3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.models.json_config import MOST, JsonConfig


@dataclass(frozen=True)
class LinearScaling:
    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class YarnScaling:
    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float


@dataclass(frozen=True)
class LongRopeScaling:
    """Two sets of factors; the whole cache of an engine is computed with one of them.

    transformers changes sets in mid-sequence, when the first position beyond the original
    length comes; keys that are shared between sequences cannot. The engine's longest sequence
    decides, so a server limited to the original length gives what transformers gives.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_positions: int
    attention_factor: float


Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True)
class RopeConfig:
    theta: float
    rotary_dim: int
    scaling: Scaling | None = None


@dataclass(frozen=True)
class RopeContext:
    """What the rotary parameters depend on beside their own section."""

    head_dim: int
    max_positions: int
    default_theta: float
    partial_factor: float
    partial_allowed: bool
    original_max_positions: int | None
    yarn_is_longrope: bool  # early Phi-3 configs call it so


def parse_rope(section: JsonConfig, context: RopeContext) -> RopeConfig:
    """`section` is `rope_parameters`, one entry of it, or `rope_scaling` with theta put in."""
    theta = section.number("rope_theta", context.default_theta)
    partial = section.number("partial_rotary_factor", context.partial_factor)
    if partial != 1.0 and not context.partial_allowed:
        raise section.fail("partial_rotary_factor", f"{partial} is not supported here")
    rotary_dim = int(context.head_dim * partial)
    if rotary_dim % 2 or not 2 <= rotary_dim <= context.head_dim:
        raise section.fail(
            "partial_rotary_factor",
            f"{partial} of a head of {context.head_dim} gives {rotary_dim} rotated elements,"
            " which must be even and inside the head",
        )
    scaling = _parse_scaling(section, context, rotary_dim)
    if isinstance(scaling, YarnScaling) and theta <= 1:
        raise section.fail("rope_theta", f"{theta}, must be above 1 with yarn")
    if section.unseen:
        key = min(section.unseen)
        raise section.fail(key, "is not supported in rotary parameters")
    return RopeConfig(theta, rotary_dim, scaling)


def _parse_scaling(section: JsonConfig, context: RopeContext, rotary_dim: int) -> Scaling | None:
    legacy = section.optional_text("type")
    kind = section.optional_text("rope_type") or legacy or "default"
    if kind == "su" or (context.yarn_is_longrope and kind == "yarn"):
        kind = "longrope"
    own_original = section.optional_integer("original_max_position_embeddings", minimum=2)
    original = context.original_max_positions or own_original or context.max_positions
    match kind:
        case "default":
            section.seen |= {"factor", "short_factor", "long_factor"}
            return None
        case "dynamic":
            # Changes nothing up to max_position_embeddings, and we promise no more than that.
            section.number("factor")
            return None
        case "linear":
            return LinearScaling(section.number("factor"))
        case "llama3":
            return Llama3Scaling(
                section.number("factor"),
                section.number("low_freq_factor"),
                section.number("high_freq_factor"),
                original,
            )
        case "yarn":
            return _parse_yarn(section, context, original)
        case "longrope":
            return _parse_longrope(section, context, original, rotary_dim)
    raise section.fail(
        "rope_type",
        f"{kind!r} is not supported; supported are default, linear, dynamic, llama3, yarn and"
        " longrope",
    )


def _parse_yarn(section: JsonConfig, context: RopeContext, original: int) -> YarnScaling:
    factor = section.number("factor", context.max_positions / original)
    if original * factor > MOST:
        raise section.fail(
            "factor", f"{factor}, must be at most {MOST // original} with {original} positions"
        )
    section.seen.add("finetuned")  # says how the weights were made
    attention = section.optional_number("attention_factor")
    mscale = _number_unless_zero(section, "mscale")
    mscale_all_dim = _number_unless_zero(section, "mscale_all_dim")
    if attention is None:
        if mscale and mscale_all_dim:
            attention = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
        else:
            attention = _yarn_mscale(factor, 1.0)
    return YarnScaling(
        factor,
        original,
        beta_fast=_number_unless_zero(section, "beta_fast") or 32.0,
        beta_slow=_number_unless_zero(section, "beta_slow") or 1.0,
        truncate=section.flag("truncate", True),
        attention_factor=attention,
    )


def _number_unless_zero(section: JsonConfig, key: str) -> float | None:
    """Where transformers asks whether a number is true, 0 is as good as absent."""
    return None if section.raw(key) == 0 else section.optional_number(key)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _parse_longrope(
    section: JsonConfig, context: RopeContext, original: int, rotary_dim: int
) -> LongRopeScaling:
    factors = {}
    for key in ("short_factor", "long_factor"):
        factors[key] = section.numbers(key)
        if len(factors[key]) != rotary_dim // 2:
            raise section.fail(
                key, f"has {len(factors[key])} numbers, {rotary_dim // 2} are needed"
            )
    factor = section.number("factor", context.max_positions / original)
    attention = section.optional_number("attention_factor")
    if attention is None:
        attention = 1.0
        if factor > 1:
            attention = math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRopeScaling(factors["short_factor"], factors["long_factor"], original, attention)


def longest_context(max_positions: int, rope: RopeConfig) -> int:
    """Yarn's configs state the original length in `max_position_embeddings` as often as not."""
    if isinstance(rope.scaling, YarnScaling):
        stretched = int(rope.scaling.original_max_positions * rope.scaling.factor)
        return max(max_positions, stretched)
    return max_positions
