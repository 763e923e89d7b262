"""Finds the rotary parameters in config.json, in the hub's spelling or transformers 5's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine.models.json_config import JsonConfig
from engine.models.layer_types import FULL, SLIDING
from engine.models.rope_config import RopeConfig, RopeContext, parse_rope

GEMMA3_THETA = {FULL: 1_000_000.0, SLIDING: 10_000.0}


@dataclass(frozen=True)
class RopePair:
    """The rotations of layers that see everything and of window layers; mostly the same."""

    full: RopeConfig
    local: RopeConfig


def rope_pair(config: JsonConfig, context: RopeContext, separate: bool) -> RopePair:
    if not separate:
        rope = parse_rope(_single_section(config, context), context)
        return RopePair(rope, rope)
    sections = {
        FULL: _layer_section(config, FULL, "rope_theta"),
        SLIDING: _layer_section(config, SLIDING, "rope_local_base_freq"),
    }
    own = replace(context, original_max_positions=None)  # their sections say it, or nobody
    full, local = (
        parse_rope(sections[kind], replace(own, default_theta=GEMMA3_THETA[kind]))
        for kind in (FULL, SLIDING)
    )
    return RopePair(full, local)


def _single_section(config: JsonConfig, context: RopeContext) -> JsonConfig:
    key = "rope_scaling" if config.raw("rope_scaling") else "rope_parameters"
    section = config.section(key)
    theta = config.number("rope_theta", context.default_theta)
    if section is None:
        return JsonConfig({"rope_theta": theta}, config.where)
    for kind in (FULL, SLIDING):
        if section.raw(kind) is not None:
            raise section.fail(kind, "one rotation for all layers is needed here")
    return section.overlaid_on({"rope_theta": theta})


def _layer_section(config: JsonConfig, kind: str, theta_key: str) -> JsonConfig:
    theta = config.optional_number(theta_key)
    defaults: Mapping[str, object] = {"rope_theta": theta}
    per_layer = config.section("rope_parameters")
    section = per_layer.section(kind) if per_layer is not None else None
    if per_layer is not None and section is None and per_layer.unseen - {FULL, SLIDING}:
        raise per_layer.fail(kind, "missing, the rotation of each layer type is needed")
    classic = config.section("rope_scaling") if kind == FULL else None
    if classic is not None:
        own = section.values if section is not None else {}
        return JsonConfig({**defaults, **own, **classic.values}, classic.where)
    return (section or JsonConfig({}, config.where)).overlaid_on(defaults)
