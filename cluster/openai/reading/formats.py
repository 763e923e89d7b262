"""Which of the formats a model writes: by its chat template, unless its operator says."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from cluster.openai.reading.gemma import FUNCTION_GEMMA, GEMMA4, GemmaReader
from cluster.openai.reading.granite import MARK, GraniteReader
from cluster.openai.reading.harmony import Harmony
from cluster.openai.reading.harmony_messages import CHANNEL, MESSAGE
from cluster.openai.reading.harmony_messages import START as MESSAGE_START
from cluster.openai.reading.hermes import END, START, HermesReader
from cluster.openai.reading.hunyuan import CALLS_END, CALLS_START, HunyuanReader
from cluster.openai.reading.llama3 import PYTHON_TAG, Llama3Reader
from cluster.openai.reading.marked import MarkedReader
from cluster.openai.reading.mistral import ARGUMENTS, CALL_ID, MARKER, MistralReader
from cluster.openai.reading.nemotron import LIST_END, LIST_START, NemotronReader
from cluster.openai.reading.olmo3 import LINES_END, LINES_START, Olmo3Reader
from cluster.openai.reading.parts import Reader
from cluster.openai.reading.phi4_mini import MARK_END, WORD, Phi4MiniReader
from cluster.openai.reading.pythonic import PythonicReader
from cluster.openai.reading.reasoning import Marks
from cluster.openai.reading.sections import DEEPSEEK_V3, KIMI_K2, SectionReader
from cluster.openai.reading.tagged import (
    ARGUMENT_MARKS,
    GLM45,
    MINIMAX_M2,
    QWEN3_CODER,
    SEED_OSS,
    TaggedReader,
)

AUTO, NONE, HARMONY = "auto", "none", "harmony"
_ALPHANUMERIC = string.ascii_letters + string.digits


def long_id(name: str, number: int) -> str:
    return "call_" + secrets.token_hex(12)


def _short_id(name: str, number: int) -> str:
    """Mistral's templates take nothing else back."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


def _telling_id(name: str, number: int) -> str:
    """Kimi's templates tell the model no more of a call than this and its arguments."""
    return f"functions.{name}:{number}"


class JsonCalls(NamedTuple):
    """A call as an object with `name` and `arguments`, or an array of calls, behind a mark."""

    marks: tuple[str, ...]
    in_array: bool = False


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`marks` are shown to the reader even where they are special tokens."""

    make: Callable[[Mapping[str, Any]], Reader]  # from the parameters of the request's tools
    marks: tuple[str, ...]
    new_id: Callable[[str, int], str] = long_id  # of a function, and of the chat's n-th call
    begins: Callable[[str], str] | None = None  # a call of a function, where no mark does
    json: JsonCalls | None = None  # None: its calls are written otherwise

    def beginnings(self, tools: Iterable[str]) -> tuple[str, ...]:
        """Of answers that call one of them."""
        reader = self.make({})
        marks = reader.beginnings if isinstance(reader, MarkedReader) else ()
        return (*marks, *(map(self.begins, tools) if self.begins else ()))


TOOL_FORMATS = {
    "hermes": ToolFormat(lambda tools: HermesReader(), (START,), json=JsonCalls((START,))),
    "qwen3_coder": ToolFormat(lambda tools: TaggedReader(QWEN3_CODER, tools), (START,)),
    "seed_oss": ToolFormat(lambda tools: TaggedReader(SEED_OSS, tools), SEED_OSS.marks),
    "minimax_m2": ToolFormat(lambda tools: TaggedReader(MINIMAX_M2, tools), MINIMAX_M2.marks),
    "glm45": ToolFormat(lambda tools: TaggedReader(GLM45, tools), (START, END, *ARGUMENT_MARKS)),
    "mistral": ToolFormat(lambda tools: MistralReader(), (MARKER, CALL_ID, ARGUMENTS), _short_id),
    "deepseek_v3": ToolFormat(lambda tools: SectionReader(DEEPSEEK_V3), DEEPSEEK_V3.marks),
    "kimi_k2": ToolFormat(lambda tools: SectionReader(KIMI_K2), KIMI_K2.marks, _telling_id),
    "granite": ToolFormat(
        lambda tools: GraniteReader(), (MARK, START), json=JsonCalls((MARK, START), in_array=True)
    ),
    "nemotron": ToolFormat(
        lambda tools: NemotronReader(),
        (LIST_START, LIST_END),
        json=JsonCalls((LIST_START,), in_array=True),
    ),
    "hunyuan_a13b": ToolFormat(
        lambda tools: HunyuanReader(),
        (CALLS_START, CALLS_END),
        json=JsonCalls((CALLS_START,), in_array=True),
    ),
    "phi4_mini": ToolFormat(
        lambda tools: Phi4MiniReader(), (MARK, MARK_END), json=JsonCalls((MARK,), in_array=True)
    ),
    "gemma4": ToolFormat(lambda tools: GemmaReader(GEMMA4, tools), GEMMA4),
    "functiongemma": ToolFormat(lambda tools: GemmaReader(FUNCTION_GEMMA, tools), FUNCTION_GEMMA),
    "olmo3": ToolFormat(lambda tools: Olmo3Reader(), (LINES_START, LINES_END)),
    "llama3_json": ToolFormat(Llama3Reader, (PYTHON_TAG,), begins='{{"name": "{}"'.format),
    "pythonic": ToolFormat(PythonicReader, (), begins="[{}".format),
}
# The first that a template has in it tells what its model writes: kin of Qwen 3 Coder and GLM use
# Hermes's marks too, and functions in tags of other kinds are nothing that is read here. Llama's
# templates for Python have all that its others have.
_SIGNS = (
    (SEED_OSS.marks[0], "seed_oss"),
    (MINIMAX_M2.marks[0], "minimax_m2"),
    ("<parameter=", "qwen3_coder"),
    ("<arg_key>", "glm45"),
    ("<function=", NONE),
    (MARK_END, "phi4_mini"),
    (WORD, "phi4_mini"),
    (MARK, "granite"),
    (LIST_START, "nemotron"),
    (GEMMA4.start, "gemma4"),
    (FUNCTION_GEMMA.start, "functiongemma"),
    (LINES_START, "olmo3"),
    (CALLS_START + "[{", "hunyuan_a13b"),
    (START, "hermes"),
    (MARKER, "mistral"),
    (DEEPSEEK_V3.call, "deepseek_v3"),
    (KIMI_K2.call, "kimi_k2"),
    ("[func_name1(", "pythonic"),
    (PYTHON_TAG, "llama3_json"),
    ("Environment: ipython", "llama3_json"),
)
REASONING_FORMATS = {
    "think": Marks("<think>", "</think>"),
    "mistral": Marks("[THINK]", "[/THINK]"),
    "seed": Marks("<seed:think>", "</seed:think>"),
    "kimi": Marks("◁think▷", "◁/think▷"),
    "gemma4": Marks("<|channel>", "<channel|>", "thought"),
}
# Harmony is a format of both, and neither a mark before calls nor marks around reasoning.
TOOL_PARSERS, REASONING_PARSERS = (*TOOL_FORMATS, HARMONY), (*REASONING_FORMATS, HARMONY)
_HARMONY_SIGNS = (MESSAGE_START, CHANNEL, MESSAGE)


def tool_format(name: str, templates: Iterable[str]) -> ToolFormat | None:
    """None: what models write about tools stays text."""
    if name == AUTO:
        text = "\n".join(templates)
        name = next((format_name for sign, format_name in _SIGNS if sign in text), NONE)
    return TOOL_FORMATS.get(name)


def reasoning_format(name: str, templates: Iterable[str]) -> Marks | None:
    if name != AUTO:
        return REASONING_FORMATS.get(name)
    text = "\n".join(templates)
    return next((one for one in REASONING_FORMATS.values() if one.end in text), None)


def harmony_format(
    tool_parser: str, reasoning_parser: str, templates: Iterable[str]
) -> Harmony | None:
    text = "\n".join(templates)
    is_told = all(sign in text for sign in _HARMONY_SIGNS)
    says = [
        name == HARMONY or (name == AUTO and is_told) for name in (tool_parser, reasoning_parser)
    ]
    return Harmony(*says) if any(says) else None
