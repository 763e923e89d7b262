"""Tables of cosines and sines for a rotary config."""

from __future__ import annotations

import math

import torch

from engine.kernels.interface import Rotary
from engine.models.rope_config import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
)


def rotary_tables(config: RopeConfig, max_positions: int, device: torch.device) -> Rotary:
    """One row for each position below `max_positions`."""
    frequencies, attention_factor = _frequencies(config, max_positions)
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    cos, sin = angles.cos(), angles.sin_()
    if attention_factor != 1.0:
        cos *= attention_factor
        sin *= attention_factor
    return Rotary(cos.to(device), sin.to(device))


def _frequencies(config: RopeConfig, max_positions: int) -> tuple[torch.Tensor, float]:
    """Radians per position, [rotary_dim / 2] fp32, and the factor on cosines and sines."""
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).float() / config.rotary_dim
    periods = config.theta**exponents
    match config.scaling:
        case None:
            return 1.0 / periods, 1.0
        case LinearScaling(factor):
            return 1.0 / periods / factor, 1.0
        case Llama3Scaling() as scaling:
            return _llama3(1.0 / periods, scaling), 1.0
        case YarnScaling() as scaling:
            return _yarn(periods, config, scaling), scaling.attention_factor
        case LongRopeScaling() as scaling:
            is_long = max_positions > scaling.original_max_positions
            factors = scaling.long_factor if is_long else scaling.short_factor
            return 1.0 / (torch.tensor(factors) * periods), scaling.attention_factor


def _llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Slow turns are stretched, fast ones kept, those between interpolated."""
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)  # in the first context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _yarn(periods: torch.Tensor, config: RopeConfig, scaling: YarnScaling) -> torch.Tensor:
    half = config.rotary_dim // 2
    low, high = (
        _yarn_dimension(config, scaling, turns) for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    width = high - low or 0.001
    stretched = ((torch.arange(half, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return stretched / (scaling.factor * periods) + (1 - stretched) / periods


def _yarn_dimension(config: RopeConfig, scaling: YarnScaling, turns: float) -> float:
    """The element that makes this many turns within the original context."""
    ratio = scaling.original_max_positions / (turns * 2 * math.pi)
    return config.rotary_dim * math.log(ratio) / (2 * math.log(config.theta))
