"""Which of the formats a model writes: by its chat template, unless its operator says."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.openai.reading.hermes import START, HermesReader
from cluster.openai.reading.llama3 import PYTHON_TAG, Llama3Reader
from cluster.openai.reading.mistral import ARGUMENTS, CALL_ID, MARKER, MistralReader
from cluster.openai.reading.parts import Reader
from cluster.openai.reading.reasoning import Marks

AUTO, NONE = "auto", "none"
_ALPHANUMERIC = string.ascii_letters + string.digits


def long_id() -> str:
    return "call_" + secrets.token_hex(12)


def _short_id() -> str:
    """Mistral's templates take nothing else back."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`marks` are shown to the reader even where they are special tokens; `signs` are
    what a template has in it, one at least, whose model writes so."""

    make: Callable[[Mapping[str, Any]], Reader]  # from the parameters of the request's tools
    marks: tuple[str, ...]
    signs: tuple[str, ...]
    new_id: Callable[[], str] = long_id


TOOL_FORMATS = {
    "hermes": ToolFormat(lambda tools: HermesReader(), (START,), (START,)),
    "mistral": ToolFormat(
        lambda tools: MistralReader(), (MARKER, CALL_ID, ARGUMENTS), (MARKER,), _short_id
    ),
    "llama3_json": ToolFormat(Llama3Reader, (PYTHON_TAG,), (PYTHON_TAG, "Environment: ipython")),
}
REASONING_FORMATS = {
    "think": Marks("<think>", "</think>"),
    "mistral": Marks("[THINK]", "[/THINK]"),
    "seed": Marks("<seed:think>", "</seed:think>"),
    "kimi": Marks("◁think▷", "◁/think▷"),
}
# Qwen 3 Coder and its kin write XML between Hermes's marks.
_OTHER_SIGNS = ("<function=", "<arg_key>")


def tool_format(name: str, templates: Iterable[str]) -> ToolFormat | None:
    """None: what models write about tools stays text."""
    if name != AUTO:
        return TOOL_FORMATS.get(name)
    text = "\n".join(templates)
    if any(sign in text for sign in _OTHER_SIGNS):
        return None
    formats = TOOL_FORMATS.values()
    return next((one for one in formats if any(sign in text for sign in one.signs)), None)


def reasoning_format(name: str, templates: Iterable[str]) -> Marks | None:
    if name != AUTO:
        return REASONING_FORMATS.get(name)
    text = "\n".join(templates)
    return next((one for one in REASONING_FORMATS.values() if one.end in text), None)
