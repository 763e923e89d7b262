"""llguidance: grammars compiled for a tokenizer's vocabulary.

What a grammar may take is bounded, for compiling and for each step; past a bound it is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from engine.errors import RequestError
from engine.grammar.keywords import restated
from engine.grammar.plain_tokenizer import plain_tokenizer
from engine.grammar.value import Grammar, GrammarKind

if TYPE_CHECKING:
    from engine.grammar.interface import Bits

# Between JSON's tokens: endless white space would fit otherwise, and models are fond of it.
_JSON_SPACE = r"( |\r?\n[ \t]{0,32})?"
_JSON_OPTIONS = {"whitespace_pattern": _JSON_SPACE, "lenient": False, "coerce_one_of": False}
_LIMITS = LLParserLimits(
    max_grammar_size=10_000,  # symbols; compiling takes time in their square
    max_lexer_states=50_000,  # 1 to 2 kB each
    # Of the parser, for a token. They take the whole batch's time, in their square: some 0.15 s, or
    # 1.9 s by the library's own bound of 50,000.
    step_max_items=20_000,
    verbose_errors=False,
)
_OF_LEXER = "lexer error:"  # it has as many states as it may
_SILENT = 0
# Its first rule, with what Lark may have before a name; GBNF has ::= behind one.
_OF_LARK = re.compile(r"^\s*(%llguidance\b|[?!]?start\s*:(?!:))", re.MULTILINE)
_MAX_MESSAGE_CHARS = 300


@dataclass(frozen=True)
class Vocabulary:
    """What grammars are compiled for. `vocab_size` is the model's, which may exceed the
    tokenizer's; `tokenizer_json` is in Hugging Face's format."""

    tokenizer_json: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def compile(self, grammar: Grammar) -> Template:
        """RequestError for what is no grammar, or too large a one. Deeply nested ones take a
        large stack."""
        text = _as_library_text(grammar)
        matcher = LLMatcher(self._tokenizer, text, log_level=_SILENT, limits=_LIMITS)
        problem = _problem(matcher)
        if problem is None:
            fits = matcher.compute_bitmask().strip(b"\0")
            problem = _problem(matcher) or (None if fits else "no text fits it")
        if problem is not None:
            raise RequestError("grammar", problem)
        return Template(matcher)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        if not self.eos_token_ids:
            raise RequestError("grammar", "this model has no end of sequence")
        try:
            plain = plain_tokenizer(self.tokenizer_json)
            return LLTokenizer(plain, n_vocab=self.vocab_size, eos_token=list(self.eos_token_ids))
        except Exception as error:  # the library raises no narrower type
            raise RequestError(
                "grammar", f"not with this model's tokenizer: {_shortened(str(error))}"
            ) from error


class Template:
    """A compiled grammar at its start. Copies share what the lexer learns, from each answer more;
    once that is too much for one of them it is for all."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.is_spent = False
        self._matcher = matcher

    def start(self, token_ids: Sequence[int]) -> State:
        state = State(self._matcher.deep_copy(), self)
        if token_ids:
            state.consume(list(token_ids))
        return state


class State:
    """A matcher; once in error it stays so."""

    is_free = False  # that anything fits cannot be told without trying it

    def __init__(self, matcher: LLMatcher, template: Template) -> None:
        self._matcher = matcher
        self._template = template

    def consume(self, token_ids: list[int]) -> None:
        self._matcher.consume_tokens(token_ids)

    def fill(self, bits: Bits) -> str | None:
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        return self._problem()

    def accept(self, token_id: int) -> str | None:
        return None if self._matcher.consume_token(token_id) else self._problem()

    def _problem(self) -> str | None:
        problem = _problem(self._matcher)
        if problem is not None and problem.startswith(_OF_LEXER):
            self._template.is_spent = True
        return problem

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()


def _problem(matcher: LLMatcher) -> str | None:
    return _shortened(matcher.get_error()) if matcher.is_error() else None


def _shortened(message: str) -> str:
    if "Enable 'coerce_one_of' option" in message:  # of the library's, which no client has
        return "a oneOf whose branches may overlap cannot be kept; an anyOf can"
    words = " ".join(message.replace("<non-verbose/>", "").split())
    return words if len(words) <= _MAX_MESSAGE_CHARS else words[:_MAX_MESSAGE_CHARS] + "..."


def _as_library_text(grammar: Grammar) -> str:
    try:
        return _READERS[grammar.kind](grammar.text)
    except (ValueError, RecursionError) as error:
        raise RequestError("grammar", _shortened(str(error))) from None


def _read_schema(text: str) -> str:
    text = restated(text)
    return LLMatcher.grammar_from_json_schema(text, overrides=_JSON_OPTIONS)  # type: ignore[arg-type]


def _read_choice(text: str) -> str:
    try:
        choices = json.loads(text)
    except ValueError:
        choices = None
    if not isinstance(choices, list) or not choices:
        raise ValueError("choices must be a JSON array of at least one text")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError("a choice must be a text, and not empty")
    # One terminal, for the lexer: the parser takes 2,000 alternatives at most.
    return LLMatcher.grammar_from_lark("start: TEXT\nTEXT: " + " | ".join(map(json.dumps, choices)))


def _read_grammar(text: str) -> str:
    try:
        lark = text if _OF_LARK.search(text) else gbnf_to_lark(text)
    except Exception as error:  # the converter's own, of any kind
        raise ValueError(f"neither Lark nor GBNF: {error}") from error
    return LLMatcher.grammar_from_lark(lark)


_READERS: Mapping[GrammarKind, Callable[[str], str]] = {
    GrammarKind.JSON_SCHEMA: _read_schema,
    GrammarKind.REGEX: LLMatcher.grammar_from_regex,
    GrammarKind.CHOICE: _read_choice,
    GrammarKind.GRAMMAR: _read_grammar,
}
