"""Logprobs as the two APIs word them."""

from collections.abc import Sequence
from typing import Any

from engine.step import TokenLogprobs
from engine.text.pieces import Pieces

# JSON has no infinity; a token that a mask or a soft cap rules out gets this.
_LOWEST = -9999.0


class TokenSpeller:
    """Names tokens in logprobs: each by itself, special ones by their name."""

    def __init__(self, pieces: Pieces, *, as_ids: bool) -> None:
        self._pieces = pieces
        self._as_ids = as_ids

    def key(self, token_id: int) -> str:
        """Tells apart tokens that are parts of characters, as keys of an object must."""
        if self._as_ids:
            return f"token_id:{token_id}"
        piece = self._pieces.token_bytes(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        """Chat's entry: the text may be broken, the bytes are exact."""
        piece = self._pieces.token_bytes(token_id)
        token = f"token_id:{token_id}" if self._as_ids else piece.decode(errors="replace")
        return {"token": token, "logprob": _finite(logprob), "bytes": list(piece)}


def completion_logprobs(
    speller: TokenSpeller,
    logprobs: Sequence[TokenLogprobs | None],
    token_ids: Sequence[int],
    offsets: Sequence[int],
    num_top: int,
) -> dict[str, Any]:
    """Four arrays, an element for each token; the first token of a prompt has no logprob."""
    return {
        "text_offset": list(offsets),
        "token_logprobs": [_finite(entry.logprob) if entry else None for entry in logprobs],
        "tokens": [speller.key(token_id) for token_id in token_ids],
        "top_logprobs": [_top(speller, entry, num_top) if entry else None for entry in logprobs],
    }


def chat_logprobs(
    speller: TokenSpeller, logprobs: Sequence[TokenLogprobs], num_top: int
) -> dict[str, Any]:
    content = []
    for entry in logprobs:
        token = speller.entry(entry.token_id, entry.logprob)
        token["top_logprobs"] = [speller.entry(*top) for top in entry.top[:num_top]]
        content.append(token)
    return {"content": content, "refusal": None}


def prompt_logprobs(
    speller: TokenSpeller, logprobs: Sequence[TokenLogprobs | None], num_top: int
) -> list[dict[str, Any] | None]:
    """vLLM's form: for each prompt token, by token id, its own logprob and the best ones'."""
    return [_by_id(speller, entry, num_top) if entry else None for entry in logprobs]


def _by_id(speller: TokenSpeller, entry: TokenLogprobs, num_top: int) -> dict[str, Any]:
    ranked = [(entry.token_id, entry.logprob, entry.rank)]
    ranked += [(*top, rank) for rank, top in enumerate(entry.top[:num_top], 1)]
    return {
        str(token_id): {
            "logprob": _finite(logprob),
            "rank": rank,
            "decoded_token": speller.key(token_id),
        }
        for token_id, logprob, rank in ranked
    }


def _top(speller: TokenSpeller, entry: TokenLogprobs, num_top: int) -> dict[str, float]:
    """The sampled token is always among them."""
    best = {speller.key(token_id): _finite(lp) for token_id, lp in entry.top[:num_top]}
    return best | {speller.key(entry.token_id): _finite(entry.logprob)}


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
