"""TokenLogprobs: the same in answers, prompt reports and hand-offs."""

from collections.abc import Iterable, Sequence

from engine.errors import RequestError
from engine.sampling import MAX_LOGPROBS
from engine.step import TokenLogprobs
from protos import generation_pb2 as pb

# At most: tags, lengths and varints of an entry, and of one alternative.
_ENTRY_BYTES = 40
_TOP_BYTES = 13


def encode_logprobs(entries: Iterable[TokenLogprobs]) -> list[pb.TokenLogprobs]:
    return [
        pb.TokenLogprobs(
            token_id=token_id,
            logprob=logprob,
            rank=rank,
            top_token_ids=[token for token, _ in top],
            top_logprobs=[value for _, value in top],
        )
        for token_id, logprob, rank, top in entries
    ]


def decode_logprobs(
    messages: Iterable[pb.TokenLogprobs], field: str, vocab_size: int = 2**32
) -> list[TokenLogprobs]:
    """RequestError, naming the field, for what cannot be of that vocabulary."""
    return [_decode(message, field, vocab_size) for message in messages]


def _decode(message: pb.TokenLogprobs, field: str, vocab_size: int) -> TokenLogprobs:
    tokens: Sequence[int] = message.top_token_ids
    values: Sequence[float] = message.top_logprobs
    if len(tokens) != len(values):
        raise RequestError(field, f"{len(tokens)} alternatives with {len(values)} values")
    if len(tokens) > MAX_LOGPROBS:
        raise RequestError(field, f"{len(tokens)} alternatives, at most {MAX_LOGPROBS} can be")
    if max(message.token_id, *tokens, 0) >= vocab_size:
        raise RequestError(field, "a token is not in the vocabulary")
    top = tuple(zip(tokens, values, strict=True))
    return TokenLogprobs(message.token_id, message.logprob, message.rank, top)


def logprobs_bytes(entry: TokenLogprobs) -> int:
    """No less than its message takes."""
    return _ENTRY_BYTES + _TOP_BYTES * len(entry.top)
