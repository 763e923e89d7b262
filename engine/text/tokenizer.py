"""A model's tokenizer, as its folder describes it."""

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers

from engine.errors import ModelError, RequestError
from engine.models.json_config import read_json_object
from engine.text.pieces import Pieces, pieces_of
from engine.text.special_tokens import SpecialTokens, read_special_tokens


class Tokenizer:
    """Text to token ids and back; safe to use from several threads, and others run meanwhile: the
    library lets them for batches alone.

    What is put around a text (a beginning-of-sequence token, say) is what tokenizer.json's
    post-processor says. Streams of tokens are the business of `Detokenizer`.
    """

    def __init__(self, backend: Any, special_tokens: SpecialTokens, source: str) -> None:
        """`backend` is a `tokenizers.Tokenizer`; `source` is where it came from, for errors."""
        backend.no_truncation()
        backend.no_padding()
        _mark_special(backend, special_tokens, source)
        self._backend = backend
        self.special_tokens = special_tokens
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.max_token_chars = max(map(len, vocab), default=0)

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        path = folder / "tokenizer.json"
        if not path.is_file():
            others = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
            found = [name for name in others if (folder / name).is_file()]
            hint = f"; {found[0]} alone is not enough, convert it" if found else ""
            raise ModelError(f"{path}: not there, and the model has no other tokenizer{hint}")
        config_path = folder / "tokenizer_config.json"
        config = read_json_object(config_path) if config_path.is_file() else {}
        read_json_object(path)  # the library's own errors say less
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
            backend.encode_batch_fast(["a"])  # or a post-processor that is broken fails each text
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises no narrower type, and panics
            raise ModelError(f"{path}: cannot be loaded as a tokenizer ({error})") from error
        return cls(backend, read_special_tokens(folder, config), str(path))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            encoding = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )[0]
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError("prompt", "must be Unicode text without lone surrogates") from error
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """All at once. Ids that the vocabulary lacks are left out."""
        texts: list[str] = self._backend.decode_batch(
            [list(token_ids)], skip_special_tokens=skip_special_tokens
        )
        return texts[0]

    def to_json(self) -> str:
        """As tokenizer.json would have it, with what tokenizer_config.json adds."""
        text: str = self._backend.to_str()
        return text

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling (`Ġthe`, `▁the`), for people who look closely."""
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def token_id(self, token: str) -> int | None:
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    def _named_id(self, name: str) -> int | None:
        content = self.special_tokens.named.get(name)
        return None if content is None else self.token_id(content)

    @functools.cached_property
    def pieces(self) -> Pieces:
        """What every token spells; special tokens spell their own name."""
        return pieces_of(self._backend, hidden=frozenset())

    @functools.cached_property
    def visible_pieces(self) -> Pieces:
        """The same with nothing for special tokens."""
        return pieces_of(self._backend, hidden=self.special_ids)


def _mark_special(backend: Any, special_tokens: SpecialTokens, source: str) -> None:
    """tokenizer_config.json may add tokens to tokenizer.json's, and call others special."""
    for added in special_tokens.added:
        if backend.token_to_id(added.content) is None:
            token = tokenizers.AddedToken(added.content, special=added.special, **added.options)
            _add(backend, [token], special=added.special)
            if backend.token_to_id(added.content) != added.token_id:
                raise ModelError(
                    f"{source}: tokenizer_config.json gives {added.content!r} the id "
                    f"{added.token_id}, which does not follow the vocabulary"
                )
    known = [c for c in special_tokens.contents if backend.token_to_id(c) is not None]
    marked = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    _add(backend, [c for c in known if c not in marked], special=True)


def _add(backend: Any, tokens: Iterable[Any], *, special: bool) -> None:
    tokens = list(tokens)
    if tokens:
        (backend.add_special_tokens if special else backend.add_tokens)(tokens)
