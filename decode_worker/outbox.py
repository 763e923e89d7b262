"""What came of an ingress's requests and was not sent yet."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from engine.errors import EngineError
from engine.request import ChoiceDelta, GenerationUpdate, PromptReport, RequestId
from engine.wire.updates import failure_bytes, steps_of, update_bytes
from protos.session_pb2 import Step


@dataclass(slots=True)
class _Unsent:
    deltas: list[ChoiceDelta] = field(default_factory=list)
    prompt: PromptReport | None = None
    error: EngineError | None = None
    num_bytes: int = 0


class Outbox:
    """Merges each request's updates until they are taken, in the order of the first ones.

    Pressing are first tokens, ends and failures: somebody waits for these.
    """

    def __init__(self) -> None:
        self._unsent: dict[RequestId, _Unsent] = {}
        self._pressing: dict[RequestId, _Unsent] = {}  # of these
        self._taken: dict[RequestId, _Unsent] = {}
        self._under_way: Iterator[Step] = iter(())  # of these
        self.num_bytes = 0  # of all that is unsent, about what its messages take

    def __len__(self) -> int:
        """Requests with something unsent."""
        return len(self._unsent)

    @property
    def is_pressing(self) -> bool:
        return bool(self._pressing)

    def add(self, request_id: RequestId, update: GenerationUpdate) -> None:
        unsent = self._grow(request_id, update_bytes(update))
        unsent.deltas += update.deltas
        unsent.prompt = unsent.prompt or update.prompt
        if update.prompt is not None or any(d.finish_reason for d in update.deltas):
            self._pressing[request_id] = unsent

    def fail(self, request_id: RequestId, error: EngineError) -> None:
        """Comes after the request's updates."""
        unsent = self._grow(request_id, failure_bytes(error))
        unsent.error = error
        self._pressing[request_id] = unsent

    def discard(self, request_id: RequestId) -> None:
        """Also what was taken and did not fit into the messages so far."""
        self._taken.pop(request_id, None)
        self._pressing.pop(request_id, None)
        unsent = self._unsent.pop(request_id, None)
        if unsent is not None:
            self.num_bytes -= unsent.num_bytes

    def clear(self) -> None:
        self._unsent, self._pressing, self.num_bytes = {}, {}, 0
        self._taken, self._under_way = {}, iter(())

    def take(self) -> list[Step]:
        """The next message of all there is, or none after its end. Each is made when it is taken:
        one request may have a hundred megabytes of logprobs."""
        step = list(islice(self._under_way, 1))
        if step or not self._unsent:
            return step
        taken = self._unsent
        self.clear()
        return self._begin(taken)

    def take_pressing(self) -> list[Step]:
        """The same of what is pressing, with all that is unsent of the same requests, and of what
        was begun before."""
        step = list(islice(self._under_way, 1))
        if step or not self._pressing:
            return step
        taken = dict(self._pressing)
        for request_id in taken:
            self.discard(request_id)
        return self._begin(taken)

    def _begin(self, taken: dict[RequestId, _Unsent]) -> list[Step]:
        self._taken = taken
        self._under_way = steps_of(_news(taken), is_wanted=taken.__contains__)
        return list(islice(self._under_way, 1))

    def _grow(self, request_id: RequestId, num_bytes: int) -> _Unsent:
        """An id counts too: of failures there may be many with little else."""
        unsent = self._unsent.get(request_id)
        if unsent is None:
            unsent = self._unsent[request_id] = _Unsent()
            num_bytes += len(request_id.encode())
        unsent.num_bytes += num_bytes
        self.num_bytes += num_bytes
        return unsent


def _news(
    of: dict[RequestId, _Unsent],
) -> Iterator[tuple[RequestId, GenerationUpdate | EngineError]]:
    """Of those that are still there when it is their turn; then they are let go."""
    for request_id in list(of):
        unsent = of.get(request_id)
        if unsent is None:
            continue
        if unsent.deltas or unsent.prompt is not None:
            yield request_id, GenerationUpdate(_joined(unsent.deltas), unsent.prompt)
        if unsent.error is not None:
            yield request_id, unsent.error
        of.pop(request_id, None)


def _joined(deltas: Sequence[ChoiceDelta]) -> Sequence[ChoiceDelta]:
    """One for each choice. All of a request's have logprobs, or none has."""
    if len(deltas) < 2:
        return deltas
    by_choice: dict[int, list[ChoiceDelta]] = {}
    for delta in deltas:
        by_choice.setdefault(delta.choice, []).append(delta)
    return [
        ChoiceDelta(
            choice,
            [token for delta in run for token in delta.token_ids],
            None if run[0].logprobs is None else [e for d in run for e in d.logprobs or ()],
            run[-1].finish_reason,
            run[-1].stop_token_id,
        )
        for choice, run in by_choice.items()
    ]
