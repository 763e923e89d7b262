"""Which layers see everything and which a window, from config.json."""

from __future__ import annotations

from enum import Enum, auto

from engine.models.json_config import JsonConfig

MOST_LAYERS = 10_000  # far beyond every model: each of them is described, and built
FULL = "full_attention"
SLIDING = "sliding_attention"


class WindowRule(Enum):
    """What a family makes of `sliding_window`; where `layer_types` does not say, for all but
    EVERY_LAYER, which does not look at it."""

    NONE = auto()  # the family knows no window
    EVERY_LAYER = auto()  # Phi-3
    ALL_LAYERS = auto()  # Mistral; with `layer_types` it is what transformers calls Ministral
    UPPER_LAYERS = auto()  # Qwen: from `max_window_layers` on, if `use_sliding_window`
    EVERY_OTHER = auto()  # Gemma 2: the first one has it
    PATTERN = auto()  # Gemma 3: every `sliding_window_pattern`-th layer sees everything


def layer_windows(config: JsonConfig, rule: WindowRule) -> tuple[int | None, ...]:
    num_layers = config.integer("num_hidden_layers", maximum=MOST_LAYERS)
    if rule is WindowRule.NONE:
        return (None,) * num_layers
    window = config.optional_integer("sliding_window")
    if rule is WindowRule.EVERY_LAYER:
        return (window,) * num_layers
    if rule is WindowRule.UPPER_LAYERS and not config.flag("use_sliding_window", False):
        window = None
    kinds = config.texts("layer_types") or _implied_kinds(config, rule, num_layers, window)
    if len(kinds) != num_layers:
        raise config.fail("layer_types", f"has {len(kinds)} entries for {num_layers} layers")
    unknown = sorted(set(kinds) - {FULL, SLIDING})
    if unknown:
        raise config.fail("layer_types", f"{unknown[0]!r} is not supported")
    if SLIDING in kinds and window is None:
        raise config.fail("sliding_window", "missing, layer_types names layers with a window")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _implied_kinds(
    config: JsonConfig, rule: WindowRule, num_layers: int, window: int | None
) -> tuple[str, ...]:
    if rule in (WindowRule.PATTERN, WindowRule.EVERY_OTHER):
        period = 2 if rule is WindowRule.EVERY_OTHER else config.integer("sliding_window_pattern")
        return tuple(FULL if (i + 1) % period == 0 else SLIDING for i in range(num_layers))
    if window is None:
        return (FULL,) * num_layers
    if rule is WindowRule.ALL_LAYERS:
        return (SLIDING,) * num_layers
    first = config.integer("max_window_layers", 28, minimum=0)
    return tuple(SLIDING if i >= first else FULL for i in range(num_layers))
