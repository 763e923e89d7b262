"""From text to training tokens: the byte-level BPE and the streams that batches come from."""

import random
from typing import NamedTuple

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from engine.bundled.chat import (
    BOS,
    CHAT_TEMPLATE,
    END,
    EOS,
    PAD,
    SPECIAL_TOKENS,
    conversations,
)
from engine.bundled.corpus import Corpus, Module

VOCAB_SIZE = 4096
MAX_LENGTH = 2048
# Indentation stays one piece up to its last space, which joins the word behind it.
PIECES = r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\n]*|\s*[\n]+|\s+(?!\S)|\s+"
CHAT_PASSES = 6


class Documents(NamedTuple):
    """Plain texts of one kind each, and conversations that hold their own special tokens."""

    prose: list[str]
    source: list[str]
    chat: list[str]


class Stream:
    """Tokens of many documents one behind the other; windows may start at any of them."""

    def __init__(self, documents: list[list[int]], aligned: bool) -> None:
        self.tokens = torch.tensor([t for document in documents for t in document])
        lengths = torch.tensor([0, *map(len, documents)])
        self._starts = lengths.cumsum(0)[:-1]
        self._aligned = aligned

    def window(self, length: int, rng: random.Random) -> torch.Tensor:
        """`length` tokens from a random place, the start of a document if aligned."""
        at = rng.randrange(len(self.tokens))
        if self._aligned:
            at = int(self._starts[torch.searchsorted(self._starts, at, right=True) - 1])
        at = max(0, min(at, len(self.tokens) - length))
        return self.tokens[at : at + length]


def documents_of(corpus: Corpus, seed: int) -> Documents:
    rng = random.Random(seed)
    prose = [reference_page(m) for m in corpus.modules if m.doc or m.entries]
    prose += [f"{topic.title}\n\n{topic.text}" for topic in corpus.topics]
    source = [m.source for m in corpus.modules if m.source]
    rng.shuffle(prose)
    rng.shuffle(source)
    chat = [c for _ in range(CHAT_PASSES) for c in conversations(corpus, rng)]
    return Documents(prose, source, chat)


def reference_page(module: Module) -> str:
    sections = [f"# {module.name}\n\n{module.doc}".strip()]
    sections += [f"## {entry.signature}\n\n{entry.doc}" for entry in module.entries]
    return "\n\n".join(sections)


def train_tokenizer(documents: Documents) -> Tokenizer:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Prose counts twice: answers are prose, and there is four times as much source.
    bpe.train_from_iterator(documents.prose * 2 + documents.source, trainer)
    bpe.post_processor = TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    return bpe


def with_chat_template(bpe: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[t for t in SPECIAL_TOKENS if t not in (BOS, END, PAD)],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def streams_of(tokenizer: PreTrainedTokenizerFast, documents: Documents) -> dict[str, Stream]:
    def encode(texts: list[str]) -> list[list[int]]:
        encoded = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def plain(texts: list[str]) -> list[list[int]]:
        bos, eos = tokenizer.convert_tokens_to_ids([BOS, EOS])
        return [[bos, *ids, eos] for ids in encode(texts)]

    return {
        "prose": Stream(plain(documents.prose), aligned=False),
        "source": Stream(plain(documents.source), aligned=False),
        "chat": Stream(encode(documents.chat), aligned=True),
    }
