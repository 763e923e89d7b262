import json
from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import RequestError
from engine.grammar.keywords import loosened, restated
from engine.grammar.library import Vocabulary
from engine.grammar.table import GrammarTable
from engine.grammar.value import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from engine.sampler.interface import Draws
from engine.step import Sample
from tests.engine.grammar.cases import (
    EOS,
    PERSON,
    VOCAB_SIZE,
    choice,
    regex,
    schema,
    spelt,
    tokenizer,
    vocabulary,
)
from tests.engine.sampler.cases import TWINS, all_draws, sample, sequence
from tests.engine.text.small_tokenizers import KINDS, byte_level, wrapped


def allowed(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (regex("("), "unclosed group"),
        (regex("(?=a)b"), "look-around"),
        (regex(r"(a)\1"), "backreferences"),
        (regex(".*" * 500), "limits"),
        (schema({"type": 5}), "type must be a string"),
        (schema({"$ref": "#"}), "NoExtension"),
        (schema({"$ref": "http://127.0.0.1/x.json"}), "retriev"),
        (schema({"type": "integer", "minimum": 5, "maximum": 4}), "Unsatisfiable"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"type": "string", "format": "uri-reference"}), "Unknown format: uri-reference"),
        (schema({"x-guidance": {"lenient": True}, "not": {}}), "not"),
        (schema({"properties": {f"p{i}": {} for i in range(3000)}}), "too big"),
        (Grammar(GrammarKind.JSON_SCHEMA, "{"), "EOF"),
        (Grammar(GrammarKind.JSON_SCHEMA, "[]"), "object"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"items":' * 3000 + "{}" + "}" * 3000), "recursion"),
        (Grammar(GrammarKind.CHOICE, "[]"), "at least one"),
        (Grammar(GrammarKind.CHOICE, '["a", 1]'), "a choice"),
        (Grammar(GrammarKind.CHOICE, '{"a": 1}'), "array"),
        (Grammar(GrammarKind.GRAMMAR, "nonsense"), "Lark nor GBNF"),
        (Grammar(GrammarKind.GRAMMAR, "start: nowhere"), "nowhere"),
    ],
)
def test_what_cannot_be_compiled_is_explained(grammar: Grammar, why: str) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        vocabulary().compile(grammar)
    assert caught.value.field == "grammar"
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "text",
    [
        '?start: sum\n?sum: N ("+" N)*\nN: /[0-9]/',  # as Lark's own manual has it
        "!start : N\nN: /[0-9]/",
        "root ::= digit\ndigit ::= [0-9]",
        "%llguidance {}\nstart: /[0-9]/",
    ],
)
def test_lark_and_gbnf_are_told_apart(text: str) -> None:
    state = vocabulary().compile(Grammar(GrammarKind.GRAMMAR, text)).start(spelt("5"))
    assert state.accept(EOS[0]) is None
    assert state.is_complete


def test_a_format_that_json_schema_does_not_define_says_nothing() -> None:
    """As Pydantic (paths, secrets), Zod and OpenAPI write them."""
    string, secret = {"type": "string"}, {"type": "string", "format": "password"}
    names = {"format": secret, "const": secret}  # of properties
    enum = {"enum": [{"format": "password"}]}
    other = {"type": "array", "items": {"anyOf": [secret, enum]}}
    vocabulary().compile(schema({"type": "object", "properties": names, "$defs": {"x": other}}))

    def text(value: dict[str, Any]) -> str:
        return restated(schema(value).text)

    assert json.loads(text(other)) == {**other, "items": {"anyOf": [string, enum]}}
    assert json.loads(text({"properties": names})) == {
        "properties": {"format": string, "const": string}
    }
    date = {"type": "string", "format": "date"}
    assert json.loads(text(date)) == date


def fits(value: dict[str, Any], answer: Any) -> bool:
    template = vocabulary().compile(schema(value))
    return template.start([*spelt(json.dumps(answer, ensure_ascii=False)), EOS[0]]).is_complete


@pytest.mark.parametrize(
    ("names", "key", "other"),
    [
        ({"type": "string"}, 'a "', None),  # Zod, of every map
        ({"enum": ["a b", "x.y", '"', "ü"]}, '"', "xzy"),  # Pydantic
        ({"type": "string", "enum": ["x.y", "ü"]}, "ü", "xü"),
        ({"$ref": "#/$defs/Key"}, "k", "l"),
        ({"pattern": "^k+$"}, "kk", "kl"),
    ],
)
def test_keys_of_maps_are_what_their_schema_says(
    names: dict[str, Any], key: str, other: str | None
) -> None:
    of_numbers = {"propertyNames": names, "additionalProperties": {"type": "integer"}}
    value = {
        "type": "object",
        "properties": {"map": {"type": "object", **of_numbers}},
        "$defs": {"Key": {"enum": ["k"], "title": "Key", "type": "string"}},
    }
    assert fits(value, {"map": {key: 5}})
    assert not fits(value, {"map": {key: "5"}})
    assert other is None or not fits(value, {"map": {other: 5}})
    assert restated(json.dumps(loosened(value))) == restated(schema(value).text)


@pytest.mark.parametrize("required", [["a", "b"], ["a"]])
def test_a_map_of_keys_that_are_required_ends_with_them(required: list[str]) -> None:
    """Zod's record of an enum: after the last key there is nothing to look for."""
    names = {"type": "string", "enum": ["a", "b"]}
    value = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "boolean"}}
    both, table = {"a": True, "b": False}, GrammarTable(VOCAB_SIZE, EOS)
    value["required"] = required
    assert fits(value, both)
    assert not fits(value, {"b": True})
    assert not fits(value, {**both, "c": True})
    table.enter(0, vocabulary().compile(schema(value)), spelt(json.dumps(both)[:-1]))
    masks = table.masks(all_draws(1))
    assert masks is not None
    comma, brace = spelt(","), spelt("}")
    assert set(brace) <= allowed(masks[0])
    assert set(comma).isdisjoint(allowed(masks[0])) is (required == ["a", "b"])


@pytest.mark.parametrize(
    "odd",
    [
        {"required": 5},
        {"required": [[]]},
        {"required": ["c"]},
        {"propertyNames": 5},
        {"propertyNames": {"enum": [1]}},
        {"propertyNames": {"$ref": "#/x/y"}},
        {"propertyNames": {"$ref": "#/$defs/Key", "maxLength": 1}},
    ],
)
def test_odd_maps_are_left_to_the_library(odd: dict[str, Any]) -> None:
    value = {"propertyNames": {"enum": ["a"]}, "$defs": {"Key": {"pattern": "^a+$"}}, **odd}
    with pytest.raises(RequestError):
        vocabulary().compile(schema(value))


def test_a_loose_schema_is_no_longer_than_what_it_was_made_of() -> None:
    """Every map that refers to the same keys has them for itself when it is said otherwise."""
    keys = {"type": "string", "enum": [f"k{number}" for number in range(1000)]}
    maps = {f"p{number}": {"propertyNames": {"$ref": "#/$defs/Key"}} for number in range(100)}
    value = {"properties": maps, "$defs": {"Key": keys}}
    assert loosened(value) == value


def test_an_id_that_is_no_uri_says_nothing() -> None:
    """As Griptape names a schema; others may be referred to."""
    assert fits({"$id": "Output Format", "type": "integer"}, 5)
    of_id = {"$id": "https://a/b", "properties": {"a": {"$ref": "https://a/b#/$defs/x"}}}
    assert not fits({**of_id, "type": "object", "$defs": {"x": {"type": "null"}}}, {"a": 5})


def test_that_items_may_repeat_says_nothing() -> None:
    assert fits({"type": "array", "uniqueItems": False}, [1, 1])


KIND = {"type": "object", "properties": {"kind": {"default": "a"}}}
NOT = {"$defs": {"Not": {"type": "string", "pattern": "^(?!a)"}}}


@pytest.mark.parametrize(
    ("value", "answer", "other"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, [1, 1], ["1"]),
        ({"type": "object", "propertyNames": {"minLength": 2}}, {"a": 1}, []),
        ({"type": "string", "not": {"const": "a"}}, "a", 1),
        ({"type": "string", "format": "regex"}, "(", 1),
        ({"type": "string", "format": "date", "pattern": "^(?=2)"}, "1999-01-01", "1999"),
        ({"type": "string", "pattern": r"^\d\b"}, "a", 1),
        ({"type": "string", "pattern": r"^a\\b"}, "a\\b", "b"),
        ({"type": "string", "pattern": r"^(?P<x>a)(?P=x)$"}, "b", 1),
        ({"type": "string", "pattern": r"^(?<x>a)\k<x>$"}, "b", 1),
        ({"type": "object", "propertyNames": {"$ref": "#/$defs/Not"}, **NOT}, {"ab": 1}, []),
        (
            {
                "patternProperties": {"^(?!b)": {"type": "null"}, "^b": {"type": "integer"}},
                "additionalProperties": False,
            },
            {"a": "x", "b": 1},
            {"b": "x"},
        ),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, 5, "5"),
        ({"oneOf": [{}, {"type": "integer"}], "anyOf": [{"type": "string"}]}, "a", 5),
        ({"oneOf": [{"type": "integer"}, {"items": {"$ref": "#/oneOf/0"}}]}, [5], ["5"]),
        ({"oneOf": [KIND, KIND], "properties": {"not": {"not": {}}}}, {"not": 1}, 5),
        ({"enum": [{"not": 1}]}, {"not": 1}, {}),
    ],
)
def test_a_loose_schema_is_what_can_be_kept(value: dict[str, Any], answer: Any, other: Any) -> None:
    """Pydantic's sets and unions, Zod's patterns; what is kept of them still holds."""
    loose = loosened(value)
    assert fits(loose, answer)
    assert not fits(loose, other)


@pytest.mark.parametrize("text", ["", "x" * (MAX_GRAMMAR_BYTES + 1), "\ud800"])
def test_texts_are_bounded(text: str) -> None:
    with pytest.raises(RequestError, match="grammar"):
        regex(text)


@pytest.mark.parametrize("beyond", [0, 1, 4, 31, 33])
def test_logits_beyond_the_tokenizer_are_never_allowed(beyond: int) -> None:
    wide = Vocabulary(tokenizer().to_json(), VOCAB_SIZE + beyond, EOS)
    table = GrammarTable(VOCAB_SIZE + beyond, EOS)
    table.enter(0, wide.compile(regex("(?s:.*)")), ())
    masks = table.masks(all_draws(1))
    assert masks is not None
    tokens = allowed(masks[0])
    assert max(tokens) < VOCAB_SIZE
    assert set(EOS) <= tokens
    assert tokens.isdisjoint(tokenizer().special_ids - set(EOS))


def test_the_end_is_allowed_only_where_the_grammar_has_one() -> None:
    table = GrammarTable(VOCAB_SIZE, EOS)
    table.enter(3, vocabulary().compile(regex("ab")), spelt("a"))
    draws = Draws(np.array([3], np.int32), np.array([0], np.int32))
    masks = table.masks(draws)
    assert masks is not None
    b = spelt("b")[0]
    assert allowed(masks[0]) == {b}
    assert table.accept([Sample(3, b, None)]) == {}
    masks = table.masks(draws)
    assert masks is not None
    assert allowed(masks[0]) == set(EOS)
    assert table.complete([3, 4]) == [3]
    assert table.accept([Sample(3, b, None)]).keys() == {3}, "it cannot have been drawn"


def test_a_token_takes_no_more_work_than_a_batch_can_wait_for() -> None:
    """Each is read in many more ways than the one before."""
    table = GrammarTable(VOCAB_SIZE, EOS)
    text = 'start: x\nx: x x | "a" | "b" | "aa" | "ab" | "ba" | "bb" | " "'
    table.enter(0, vocabulary().compile(Grammar(GrammarKind.GRAMMAR, text)), ())
    (long,) = spelt(" " * 35)
    failed: dict[int, str] = {}
    num_tokens = 0
    while not failed:
        table.masks(all_draws(1))
        failed = table.accept([Sample(0, long, None)])
        num_tokens += 1
    assert "Too many items" in failed[0]
    assert num_tokens < 10, "with the library's own bound 17, the last of them in seconds"


def test_a_slot_without_a_grammar_is_free() -> None:
    table = GrammarTable(VOCAB_SIZE, EOS)
    compiled = vocabulary().compile(choice("a"))
    for slot in range(3):
        table.enter(slot, compiled, ())
    table.enter(1, None, ())
    masks = table.masks(all_draws(3))
    assert masks is not None
    assert [len(allowed(row)) for row in masks] == [1, VOCAB_SIZE, 1]
    for slot in range(3):
        table.enter(slot, None, ())
    assert table.masks(all_draws(3)) is None


def test_the_samplers_twins_draw_the_same_of_it() -> None:
    torch.manual_seed(1)
    table = GrammarTable(VOCAB_SIZE, EOS)
    compiled = vocabulary().compile(schema(PERSON))
    starts = ["", "{", '{"name": "', '{"name":"x","age":', '{"name":"x","age":1,"boss":null}']
    for slot, start in enumerate(starts):
        table.enter(slot, compiled, spelt(start))
    masks = table.masks(all_draws(len(starts)))
    assert masks is not None
    logits = torch.randn(len(starts), VOCAB_SIZE) * 3
    drawing = [sequence(seed, temperature=1.0, top_p=0.9) for seed in range(len(starts))]
    drawn = [
        sample(twin, logits, drawing, bitmask=torch.from_numpy(masks)).token_ids.tolist()
        for twin in TWINS
    ]
    assert drawn[0] == drawn[1]
    for row, token in enumerate(drawn[0]):
        assert token in allowed(masks[row])
    assert table.accept(map(Sample, range(len(starts)), drawn[0], [None] * len(starts))) == {}


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"word_suffix"}))
def test_every_kind_of_tokenizer(kind: str) -> None:
    """A text that spells a special token is not that token."""
    small = wrapped(KINDS[kind]())
    end = small.token_id("</s>")
    assert end is not None
    # unigram's vocabulary has no such letters
    texts = {"the quick fox", "an end" if kind == "unigram" else "an end </s>"}
    compiled = Vocabulary(small.to_json(), small.vocab_size, (end,)).compile(choice(*texts))
    told = set()
    for seed in range(8):
        rng, tokens = np.random.default_rng(seed), list[int]()
        table = GrammarTable(small.vocab_size, (end,))
        table.enter(0, compiled, ())
        while not tokens or tokens[-1] != end:
            masks = table.masks(all_draws(1))
            assert masks is not None
            tokens.append(int(rng.choice(sorted(allowed(masks[0])))))
            assert table.accept([Sample(0, tokens[-1], None)]) == {}
        assert set(tokens[:-1]).isdisjoint(small.special_ids)
        told.add(small.decode(tokens[:-1]))
    assert told == texts


def test_a_tokenizer_that_cannot_be_is_refused() -> None:
    small = wrapped(KINDS["word_suffix"]())
    with pytest.raises(RequestError, match="tokenizer"):
        Vocabulary(small.to_json(), small.vocab_size, (1,)).compile(regex("a"))


def test_a_model_without_an_end_is_refused() -> None:
    with pytest.raises(RequestError, match="no end of sequence"):
        Vocabulary(tokenizer().to_json(), VOCAB_SIZE, ()).compile(regex("a"))


def test_choices_by_the_thousand() -> None:
    texts = [f"a{number}" for number in range(3000)]
    small = wrapped(byte_level())
    end = small.token_id("</s>")
    assert end is not None
    compiled = Vocabulary(small.to_json(), small.vocab_size, (end,)).compile(choice(*texts))
    state = compiled.start([])
    for token_id in (*small.encode("a2999", add_special_tokens=False), end):
        assert state.accept(token_id) is None
    assert state.is_complete
