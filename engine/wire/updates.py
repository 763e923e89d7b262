"""Updates of many requests on their way to one reader, in as few messages as their size allows.

Sizes are bounds from above, computed and not measured: to measure is to serialise.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from engine.errors import EngineError
from engine.request import ChoiceDelta, FinishReason, GenerationUpdate, PromptReport, RequestId
from engine.step import TokenLogprobs
from engine.wire.failures import encode_failure
from engine.wire.logprobs import encode_logprobs, logprobs_bytes
from protos import generation_pb2, ingress_pb2, session_pb2
from protos.limits import PART_BYTES

_NEWS_BYTES = 32
_DELTA_BYTES = 32
_TIMES_BYTES = 32
_TOKEN_BYTES = 5
_CHAR_BYTES = 4
_REASONS = {
    None: generation_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}
_Item = TypeVar("_Item")


class UpdatePart(NamedTuple):
    """What one RequestNews says. Of a split prompt report only the last part is complete."""

    deltas: Sequence[ChoiceDelta]
    prompt: PromptReport | None
    complete: bool = True


def steps_of(
    news: Iterable[tuple[RequestId, GenerationUpdate | EngineError]],
    part_bytes: int = PART_BYTES,
    is_wanted: Callable[[RequestId], bool] = lambda request_id: True,
) -> Iterator[session_pb2.Step]:
    """News of requests in their order, in Steps of bounded size. Each is made when it is asked
    for: one update may be a hundred megabytes of logprobs, and not be wanted any more by then."""
    step, room = session_pb2.Step(), part_bytes
    for request_id, said in news:
        id_bytes = _NEWS_BYTES + _CHAR_BYTES * len(request_id)
        for part, num_bytes in _parts(said, part_bytes):
            if id_bytes + num_bytes > room and step.requests:
                yield step
                step, room = session_pb2.Step(), part_bytes
            if not is_wanted(request_id):
                break
            room -= id_bytes + num_bytes
            told = step.requests.add(request_id=request_id)
            if isinstance(part, EngineError):
                told.failure.CopyFrom(encode_failure(part))
            else:
                fill(told, part)
    if step.requests:
        yield step


def _parts(
    said: GenerationUpdate | EngineError, part_bytes: int
) -> Iterator[tuple[UpdatePart | EngineError, int]]:
    """With the bytes of each."""
    if isinstance(said, EngineError):
        yield said, failure_bytes(said)
        return
    num_bytes = update_bytes(said)
    if num_bytes <= part_bytes:
        yield UpdatePart(said.deltas, said.prompt), num_bytes
        return
    for part in split(said, part_bytes):
        yield part, update_bytes(GenerationUpdate(part.deltas, part.prompt))


def fill(news: session_pb2.RequestNews | ingress_pb2.GenerateUpdate, part: UpdatePart) -> None:
    """Adds what the part says."""
    for choice, token_ids, logprobs, finish_reason, stop_token_id in part.deltas:
        news.deltas.add(
            choice=choice,
            token_ids=token_ids,
            logprobs=None if logprobs is None else encode_logprobs(logprobs),
            finish_reason=_REASONS[finish_reason],
            stop_token_id=stop_token_id,
        )
    if part.prompt is not None:
        num_cached, entries, times = part.prompt
        news.prompt.num_cached_tokens = num_cached
        news.prompt.has_logprobs = entries is not None
        news.prompt.complete = part.complete
        news.prompt.logprobs.extend(encode_logprobs(_present(entries)))
        if times is not None:
            queued_s, prefill_s, transfer_s = times
            news.prompt.times.queued_s = queued_s
            news.prompt.times.prefill_s = prefill_s
            news.prompt.times.transfer_s = transfer_s


def _present(entries: Sequence[TokenLogprobs | None] | None) -> list[TokenLogprobs]:
    """All but the first prompt token's, which has none."""
    return [entry for entry in entries or () if entry is not None]


def update_bytes(update: GenerationUpdate) -> int:
    """No less than what its messages take, the request's id apart."""
    num_bytes = sum(_delta_bytes(delta) for delta in update.deltas)
    if update.prompt is not None:
        entries = _present(update.prompt.logprobs)
        num_bytes += _NEWS_BYTES + _TIMES_BYTES + sum(logprobs_bytes(entry) for entry in entries)
    return num_bytes


def failure_bytes(error: EngineError) -> int:
    """Measured: there are few, and what they quote is of any length."""
    return _NEWS_BYTES + encode_failure(error).ByteSize()


def _delta_bytes(delta: ChoiceDelta) -> int:
    num_bytes = _DELTA_BYTES + _TOKEN_BYTES * len(delta.token_ids)
    if delta.logprobs is not None:
        num_bytes += sum(logprobs_bytes(entry) for entry in delta.logprobs)
    return num_bytes


def split(update: GenerationUpdate, part_bytes: int) -> Iterator[UpdatePart]:
    """The prompt's report first, in parts; then the deltas, long ones in several."""
    if update.prompt is not None:
        yield from _split_prompt(update.prompt, part_bytes)
    deltas = [piece for delta in update.deltas for piece in _split_delta(delta, part_bytes)]
    for run in _runs(deltas, _delta_bytes, part_bytes):
        yield UpdatePart(run, None)


def _split_prompt(prompt: PromptReport, part_bytes: int) -> Iterator[UpdatePart]:
    runs: list[Sequence[TokenLogprobs]] = list(
        _runs(_present(prompt.logprobs), logprobs_bytes, part_bytes - _NEWS_BYTES - _TIMES_BYTES)
    )
    for run in runs[:-1]:
        yield UpdatePart((), PromptReport(prompt.num_cached_tokens, run), complete=False)
    rest = None if prompt.logprobs is None else (runs[-1] if runs else ())
    yield UpdatePart((), PromptReport(prompt.num_cached_tokens, rest, prompt.times))


def _split_delta(delta: ChoiceDelta, part_bytes: int) -> Iterator[ChoiceDelta]:
    """Only the last piece says how the choice ended."""
    room = part_bytes - _DELTA_BYTES
    if _delta_bytes(delta) <= part_bytes:
        yield delta
        return
    entries = delta.logprobs or (None,) * len(delta.token_ids)
    runs = list(_runs(list(zip(delta.token_ids, entries, strict=True)), _token_bytes, room))
    for number, run in enumerate(runs):
        logprobs = [entry for _, entry in run if entry is not None]
        ended = number == len(runs) - 1
        yield ChoiceDelta(
            delta.choice,
            [token for token, _ in run],
            None if delta.logprobs is None else logprobs,
            delta.finish_reason if ended else None,
            delta.stop_token_id if ended else None,
        )


def _token_bytes(token: tuple[int, TokenLogprobs | None]) -> int:
    return _TOKEN_BYTES + (0 if token[1] is None else logprobs_bytes(token[1]))


def _runs(
    items: Sequence[_Item], size: Callable[[_Item], int], limit: int
) -> Iterator[Sequence[_Item]]:
    """Consecutive items that together stay within the limit; at least one each."""
    start, total = 0, 0
    for end, item in enumerate(items):
        num_bytes = size(item)
        if end > start and total + num_bytes > limit:
            yield items[start:end]
            start, total = end, 0
        total += num_bytes
    if start < len(items):
        yield items[start:]
