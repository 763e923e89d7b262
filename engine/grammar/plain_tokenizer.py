"""A tokenizer as the library must see it: no text is a special token."""

import json
from collections.abc import Mapping
from typing import Any

# No text of a grammar has it by accident; by design it would fail its own request.
_HIDDEN = "\x00special {token_id}\x00"


def plain_tokenizer(tokenizer_json: str) -> str:
    """The same tokens under the same ids, but special ones have names that nobody writes.

    Otherwise a grammar that wants the text `<|end|>` would have the tokenizer name the token,
    which ends the answer instead of spelling it.
    """
    tokenizer = json.loads(tokenizer_json)
    hidden: dict[str, str] = {}
    for token in tokenizer["added_tokens"]:
        if token["special"]:
            name = _HIDDEN.format(token_id=token["id"])
            hidden[token["content"]] = token["content"] = name
    tokenizer["post_processor"] = None  # puts special tokens around a text, by their names
    tokenizer["decoder"] = _known_decoder(tokenizer["decoder"])
    model = tokenizer["model"]
    model["vocab"] = _renamed(model["vocab"], hidden)
    if model.get("unk_token") in hidden:
        model["unk_token"] = hidden[model["unk_token"]]
    return json.dumps(tokenizer, ensure_ascii=False)


def _known_decoder(decoder: Any) -> Any:
    """The library does not know this one by its own name."""
    if decoder is None or decoder["type"] != "Metaspace":
        return decoder
    steps = [
        {"type": "Replace", "pattern": {"String": decoder["replacement"]}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    return {"type": "Sequence", "decoders": steps}


def _renamed(vocab: Any, hidden: Mapping[str, str]) -> Any:
    """A map from tokens to ids, or a list of tokens with their scores."""
    if isinstance(vocab, dict):
        return {hidden.get(token, token): token_id for token, token_id in vocab.items()}
    return [[hidden.get(token, token), *rest] for token, *rest in vocab]
