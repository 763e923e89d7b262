"""What came of an ingress's requests and was not sent yet."""

from dataclasses import dataclass, field

from engine.errors import EngineError
from engine.request import ChoiceDelta, GenerationUpdate, PromptReport, RequestId
from engine.wire.updates import StepWriter, failure_bytes, update_bytes
from protos.session_pb2 import Step


@dataclass(slots=True)
class _Unsent:
    deltas: list[ChoiceDelta] = field(default_factory=list)
    prompt: PromptReport | None = None
    error: EngineError | None = None
    num_bytes: int = 0


class Outbox:
    """Merges each request's updates until they are taken, in the order of the first ones."""

    def __init__(self) -> None:
        self._unsent: dict[RequestId, _Unsent] = {}
        self.num_bytes = 0  # of all that is unsent, about what its messages take

    def add(self, request_id: RequestId, update: GenerationUpdate) -> None:
        unsent = self._grow(request_id, update_bytes(update))
        unsent.deltas += update.deltas
        unsent.prompt = unsent.prompt or update.prompt

    def fail(self, request_id: RequestId, error: EngineError) -> None:
        """Comes after the request's updates."""
        self._grow(request_id, failure_bytes(error)).error = error

    def discard(self, request_id: RequestId) -> None:
        unsent = self._unsent.pop(request_id, None)
        if unsent is not None:
            self.num_bytes -= unsent.num_bytes

    def clear(self) -> None:
        self._unsent.clear()
        self.num_bytes = 0

    def take(self) -> list[Step]:
        writer = StepWriter()
        for request_id, unsent in self._unsent.items():
            if unsent.deltas or unsent.prompt is not None:
                writer.add(request_id, GenerationUpdate(unsent.deltas, unsent.prompt))
            if unsent.error is not None:
                writer.fail(request_id, unsent.error)
        self.clear()
        return writer.take()

    def _grow(self, request_id: RequestId, num_bytes: int) -> _Unsent:
        """An id counts too: of failures there may be many with little else."""
        unsent = self._unsent.get(request_id)
        if unsent is None:
            unsent = self._unsent[request_id] = _Unsent()
            num_bytes += len(request_id.encode())
        unsent.num_bytes += num_bytes
        self.num_bytes += num_bytes
        return unsent
