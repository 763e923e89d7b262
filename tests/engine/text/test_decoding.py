"""Streams of tokens against the tokenizer's own decoding of everything at once."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from engine.text.decoding import ByteDecoder, WindowDecoder, decoder_of
from engine.text.detokenizer import Detokenizer, TextOptions
from engine.text.tokenizer import Tokenizer
from tests.engine.text.conftest import make
from tests.engine.text.small_tokenizers import KINDS, TEXT

kinds = st.sampled_from(sorted(KINDS))
texts = st.one_of(st.sampled_from(TEXT), st.text(max_size=40))


def cut(data: st.DataObject, token_ids: list[int]) -> list[list[int]]:
    """The same tokens in pieces of random sizes."""
    pieces, rest = [], token_ids
    while rest:
        size = data.draw(st.integers(1, max(1, min(4, len(rest)))))
        pieces.append(rest[:size])
        rest = rest[size:]
    return pieces


def decode_by_hand(tokenizer: Tokenizer, token_ids: list[int], *, skip: bool) -> str:
    """What the decoder's steps say, with the one difference that we promise: of a run of
    fallback bytes the valid characters stay, each byte of the rest is replaced."""
    tokens = [tokenizer.token(i) for i in token_ids if not (skip and i in tokenizer.special_ids)]
    text, run = "", b""
    for token in [*tokens, None]:
        if token is not None and re.fullmatch("<0x[0-9A-F]{2}>", token):
            run += bytes([int(token[3:5], 16)])
            continue
        while run:
            size = next((n for n in range(1, 5) if is_character(run[:n])), 0)
            text += run[:size].decode() if size else "\ufffd"
            run = run[max(size, 1) :]
        text += "" if token is None else token.replace("▁", " ")
    return text


def is_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


@pytest.mark.parametrize("skip", [False, True])
@settings(max_examples=60)
@given(kind=kinds, data=st.data())
def test_pieces_of_random_tokens_join_to_the_full_decoding(
    kind: str, skip: bool, data: st.DataObject
) -> None:
    tokenizer = make(kind)
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    pieces = tokenizer.visible_pieces if skip else tokenizer.pieces
    decoder = decoder_of(pieces)
    text = "".join(decoder.push(piece) for piece in cut(data, token_ids)) + decoder.finish()
    if kind in ("llama_2", "gemma"):
        known = [i for i in token_ids if tokenizer.token(i) is not None]
        expected = decode_by_hand(tokenizer, known, skip=skip)
        assert text == (expected.removeprefix(" ") if kind == "llama_2" else expected)
    else:
        assert text == tokenizer.decode(token_ids, skip_special_tokens=skip)


@settings(max_examples=60)
@given(kind=kinds, text=texts, data=st.data())
def test_real_text_joins_to_the_full_decoding_without_broken_characters(
    kind: str, text: str, data: st.DataObject
) -> None:
    tokenizer = make(kind)
    token_ids = tokenizer.encode(text)
    decoder = decoder_of(tokenizer.visible_pieces)
    pieces = [decoder.push(piece) for piece in cut(data, token_ids)]
    assert decoder.finish() == ""
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=True)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=60)
@example("word_suffix", "0000x'00000x", 11)  # many unknown ones, which are not shown, in between
@given(kind=kinds, text=texts, split=st.integers(0, 60))
def test_text_goes_on_where_the_prompt_ends(kind: str, text: str, split: int) -> None:
    """The prompt's text and the answer's join to the text of both together."""
    tokenizer = make(kind)
    token_ids = tokenizer.encode(text)
    prompt, answer = token_ids[:split], token_ids[split:]
    head = decoder_of(tokenizer.visible_pieces)
    tail = decoder_of(tokenizer.visible_pieces, prompt)
    joined = head.push(prompt) + "".join(tail.push([token]) for token in answer) + tail.finish()
    assert joined == tokenizer.decode(token_ids, skip_special_tokens=True)


def test_a_word_after_the_prompt_keeps_its_space(llama_2: Tokenizer) -> None:
    dog = llama_2.encode(" dog", add_special_tokens=False)
    prompt = llama_2.encode("The lazy")
    assert str(llama_2.token(dog[0])).startswith("▁")
    assert decoder_of(llama_2.visible_pieces, prompt).push(dog).startswith(" ")
    # Behind nothing but a skipped token the text begins here.
    first = decoder_of(llama_2.visible_pieces, prompt[:1])
    spelt = llama_2.decode(dog, skip_special_tokens=True)
    assert first.push(dog) == spelt


def test_a_character_is_shown_when_its_last_byte_is_there(byte_level: Tokenizer) -> None:
    decoder = decoder_of(byte_level.pieces)
    token_ids = bytes_of(byte_level, "a😀é")
    assert [decoder.push([i]) for i in token_ids] == ["a", "", "", "", "😀", "", "é"]
    assert decoder.finish() == ""
    half = decoder_of(byte_level.pieces)
    assert half.push(token_ids[:3]) == "a"
    assert half.finish() == "\ufffd" == byte_level.decode(token_ids[:3])[1:]


def bytes_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """A token for each byte."""
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    ids = [tokenizer.token_id(char) for piece, _ in pieces for char in piece]
    return [token_id for token_id in ids if token_id is not None]


def test_kinds_without_neighbours_decode_by_table(tokenizer: Tokenizer) -> None:
    decoder = decoder_of(tokenizer.pieces)
    by_window = tokenizer.token_id("dog</w>") is not None
    assert isinstance(decoder, WindowDecoder if by_window else ByteDecoder)


def test_offsets_say_where_each_token_begins(byte_level: Tokenizer) -> None:
    token_ids = bytes_of(byte_level, "a😀éb")
    detokenizer = Detokenizer(byte_level.pieces, options=TextOptions(track_offsets=True))
    assert detokenizer.push(token_ids[:3]).text == "a"
    assert detokenizer.push(token_ids[3:]).text == "😀éb"
    assert detokenizer.offsets == [0, 1, 1, 1, 1, 2, 2, 3]


def test_tokens_beyond_the_vocabulary_spell_nothing(tokenizer: Tokenizer) -> None:
    beyond = tokenizer.vocab_size + 5
    assert decoder_of(tokenizer.pieces).push([beyond]) == ""
    assert tokenizer.pieces.token_bytes(beyond) == b""
