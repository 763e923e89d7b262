"""Small tokenizers of every kind that models come with, trained in a moment."""

import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from engine.text.special_tokens import SpecialTokens
from engine.text.tokenizer import Tokenizer as OurTokenizer

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEXT = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "def decode(tokens):\n    return ''.join(pieces[t] for t in tokens)\n\n\n",
    "Grüße aus Köln: naïve façade, Ærø, señor, žluťoučký kůň.",
    "日本語のテキストと中文文本 and 한국어.",
    "Emoji: 😀 👩‍👩‍👧 🇩🇪 ✨.  Two  spaces, a\ttab.",
)


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    tokenizer.add_tokens([AddedToken("two words", special=False)])
    return tokenizer


def _fallback_bpe(*, strip: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), *steps] if strip else steps
    )
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=["<unk>", *SPECIAL, *fallback],
        limit_alphabet=40,
        show_progress=False,
    )
    tokenizer.train_from_iterator([text.replace(" ", "▁") for text in TEXT * 4], trainer)
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*decoding, decoders.Strip(" ", 1, 0)] if strip else decoding
    )
    return _with_plain_fallback_tokens(tokenizer)


def _with_plain_fallback_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """The trainer marks the byte tokens special, which no real model does."""
    description = json.loads(tokenizer.to_str())
    description["added_tokens"] = [
        token for token in description["added_tokens"] if not token["content"].startswith("<0x")
    ]
    return Tokenizer.from_str(json.dumps(description))


def llama_2() -> Tokenizer:
    tokenizer = _fallback_bpe(strip=True)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A",
        pair="<s> $A <s> $B",
        special_tokens=[("<s>", tokenizer.token_to_id("<s>"))],
    )
    return tokenizer


def gemma() -> Tokenizer:
    return _fallback_bpe(strip=False)


def unigram() -> Tokenizer:
    """SentencePiece's other kind, with spaces as marks before words."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=[*SPECIAL, "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    return tokenizer


def word_suffix() -> Tokenizer:
    """As GPT-1 has it: what a token spells depends on whether another follows."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", *SPECIAL],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "llama_2": llama_2,
    "gemma": gemma,
    "unigram": unigram,
    "word_suffix": word_suffix,
}


def wrapped(backend: Tokenizer) -> OurTokenizer:
    special = SpecialTokens({"bos_token": "<s>", "eos_token": "</s>"}, (), ())
    return OurTokenizer(backend, special, "small")


def save(backend: Tokenizer, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    return folder
