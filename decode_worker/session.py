"""One ingress's requests on this worker. The stream under it is the service's business.

GREETING ──Hello──▶ OPEN ──half-close, drain──▶ ENDING ──nothing left──▶ (last message)
    └─────────────────┴── whatever breaks the rules of the stream ──▶ (a Failure)

An engine that dies ends it as well: its ingress counts the worker as dead then, and does not try a
request that engines die of at one worker after the other.
"""

import asyncio
import logging
from enum import Enum, auto

from decode_worker.answerer import Answerer, AnswerStream, decode_submit
from decode_worker.outbox import Outbox
from engine.errors import (
    EngineDiedError,
    EngineError,
    QueueFullError,
    RequestError,
    StepError,
    UnavailableError,
)
from engine.request import RequestId
from engine.wire.failures import encode_failure
from engine.wire.requests import check_request_id
from protos.generation_pb2 import Failure
from protos.limits import PROTOCOL
from protos.session_pb2 import DecodeMessage, Hello, IngressMessage, Leaving, Step, Submit
from protos.worker_pb2 import WorkerDescription

logger = logging.getLogger(__name__)

MAX_UNSENT_BYTES = 256 << 20
# Each request in a message is a write of the ingress's, which takes so long with all that handles
# it on its way. So after a message with many the next tokens wait, and share a write: at most so
# long that text still seems to flow.
WRITE_S = 0.0006
LONGEST_PAUSE_S = 0.04
# That a request has come is told so late at most. Of one that its worker dies of before that, the
# ingress takes the worker to have been dead when it was sent, and tries one worker more.
TELL_S = 0.002
_MANY = 8


class _Phase(Enum):
    GREETING = auto()
    OPEN = auto()
    ENDING = auto()
    ENDED = auto()


class Session:
    """Takes the ingress's messages, gives the worker's; used on one event loop.

    Nothing the ingress sends raises: it ends the session, with a Failure as its last message.
    Updates that wait for the stream are merged; past `max_unsent_bytes` the session fails. With
    many requests so are those of a few milliseconds, but for first tokens and ends.
    """

    def __init__(
        self,
        prefix: str,
        answerer: Answerer,
        welcome: WorkerDescription,
        max_unsent_bytes: int = MAX_UNSENT_BYTES,
    ) -> None:
        self._prefix = prefix  # makes request ids of all sessions differ
        self._answerer = answerer
        self._welcome = welcome
        self._max_unsent_bytes = max_unsent_bytes
        self._phase = _Phase.GREETING
        self._messages: list[DecodeMessage] = []  # before the next step
        self._farewell: Failure | None = None
        self._live: dict[RequestId, AnswerStream] = {}
        self._asks_to_move = False
        self._num_submitted = 0
        self._is_to_tell = False  # that these have come, though there is nothing else to say
        self._telling: asyncio.TimerHandle | None = None
        self._outbox = Outbox()
        self._pausing: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()

    @property
    def num_requests(self) -> int:
        return len(self._live)

    def receive(self, message: IngressMessage) -> None:
        self._receive_one(message)
        for one in message.more:
            self.receive(one)

    def _receive_one(self, message: IngressMessage) -> None:
        kind = message.WhichOneof("kind")
        if self._phase is _Phase.ENDED or (kind == "hello" and self._phase is _Phase.ENDING):
            return  # one that came while a drain began is told of that
        if kind == "hello" and self._phase is _Phase.GREETING:
            self._greet(message.hello)
        elif kind is None or kind == "hello" or self._phase is _Phase.GREETING:
            wrong = "a message of no known kind" if kind is None else f"{kind} out of order"
            self.fail(_invalid("kind", f"{wrong}; hello comes first, and once"))
        elif kind == "submit":
            self._submit(message.submit)
        elif kind == "cancel":
            self._cancel(RequestId(message.cancel.request_id))
        elif live := self._live.get(RequestId(message.stop_choice.request_id)):
            live.stop_choice(message.stop_choice.choice)

    def end_greeting(self) -> None:
        """There was time enough for a hello."""
        if self._phase is _Phase.GREETING:
            self.fail(_invalid("hello", "did not come"))

    async def next_messages(self) -> list[DecodeMessage]:
        """Waits for news; what came since the last call, of one step or of several. After an empty
        list nothing comes."""
        while True:
            if self._is_over():
                self._phase = _Phase.ENDED
            messages = self._take()
            if messages or self._phase is _Phase.ENDED:
                return messages
            self._news.clear()
            await self._news.wait()

    def finish(self) -> None:
        """The ingress sends nothing more, and still wants what it asked for."""
        self._end(None)

    def drain(self) -> None:
        """Takes nothing new; ends when nothing is left."""
        if self._phase is _Phase.OPEN and self._live:
            self._messages.append(DecodeMessage(leaving=Leaving()))
        self._end(Failure(kind=Failure.KIND_UNAVAILABLE, message="the worker is draining"))

    def ask_to_move(self) -> None:
        """What another worker can take is to be asked of that one. An ingress that has nothing
        here is told as well: it would move to here what it has elsewhere."""
        self._asks_to_move = True
        if self._phase is _Phase.OPEN or self._live:
            self._messages.append(DecodeMessage(leaving=Leaving(move=True)))
            self._news.set()

    def fail(self, failure: Failure) -> None:
        """Ends at once."""
        if self._phase is not _Phase.ENDED:
            self._drop_all()
            self._phase, self._farewell = _Phase.ENDED, failure
            self._news.set()

    def fail_requests(self, error: EngineError) -> None:
        """Ends every request, each with the error."""
        for request_id in list(self._live):
            if self._phase is not _Phase.ENDED:
                self._forget(request_id)
                self._note_failure(request_id, error)

    def close(self) -> None:
        """The stream is gone; so are its requests. Idempotent."""
        self._drop_all()
        self._phase, self._farewell = _Phase.ENDED, None
        self._news.set()

    def _greet(self, hello: Hello) -> None:
        ours = self._welcome.format.fingerprint
        if hello.protocol != PROTOCOL:
            self.fail(_incompatible("protocol", PROTOCOL, hello.protocol))
        elif hello.fingerprint not in ("", ours):
            self.fail(_incompatible("fingerprint", ours, hello.fingerprint))
        else:
            self._phase = _Phase.OPEN
            self._messages.append(DecodeMessage(welcome=self._welcome))
            if self._asks_to_move:
                self._messages.append(DecodeMessage(leaving=Leaving(move=True)))
            self._news.set()

    def _submit(self, message: Submit) -> None:
        self._num_submitted += 1
        self._tell_soon()
        request_id = RequestId(message.request_id)
        try:
            check_request_id(request_id)
            if request_id in self._live:
                raise RequestError("request_id", f"{request_id!r} is running already")
        except RequestError as error:
            # The session's end: an answer under this id would be taken for another request's.
            self.fail(encode_failure(error))
            return
        # Once cancelled an id may come again, while others still end what was begun for it.
        own_id = RequestId(f"{self._prefix}{self._num_submitted}/{request_id}")
        try:
            if self._phase is not _Phase.OPEN:
                raise UnavailableError("the worker is draining")
            submitted = decode_submit(message, own_id)
        except EngineError as error:
            self._note_failure(request_id, error)
            return
        stream = self._answerer.submit(submitted)
        self._live[request_id] = stream
        stream.listen(lambda: self._hear(request_id, stream))
        self._hear(request_id, stream)

    def _tell_soon(self) -> None:
        """A request that its worker dies of had come to it, so the ingress is told at once; with
        many requests, by the message that soon comes anyway."""
        if len(self._live) < _MANY:
            self._tell()
        elif self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(TELL_S, self._tell)

    def _tell(self) -> None:
        self._is_to_tell = True
        self._news.set()

    def _hear(self, request_id: RequestId, stream: AnswerStream) -> None:
        """Takes what came. Of one that is closed there may be more."""
        error: EngineError | None = None
        try:
            while self._live.get(request_id) is stream and (update := stream.take()):
                self._outbox.add(request_id, update)
                self._note_news()
        except EngineError as refusal:
            error = refusal
        except Exception as bug:  # noqa: BLE001 - of ours: whoever waits is told
            logger.exception("request %s failed", request_id)
            error = StepError(f"the worker failed: {bug!r}")
        if isinstance(error, EngineDiedError):
            self.fail(encode_failure(error))
            return
        if self._live.get(request_id) is stream and (error is not None or stream.has_ended):
            self._forget(request_id)
            if error is not None:
                self._note_failure(request_id, error)
            self._news.set()

    def _note_failure(self, request_id: RequestId, error: EngineError) -> None:
        self._outbox.fail(request_id, error)
        self._note_news()

    def _note_news(self) -> None:
        if self._pausing is None or self._outbox.is_pressing:
            self._news.set()
        unsent = self._outbox.num_bytes
        if unsent > self._max_unsent_bytes:
            error = QueueFullError(f"{unsent} bytes wait for an ingress that is slow")
            self.fail(encode_failure(error))

    def _cancel(self, request_id: RequestId) -> None:
        """Ids that are not known are of requests that have ended."""
        self._forget(request_id)
        self._outbox.discard(request_id)
        self._news.set()

    def _forget(self, request_id: RequestId) -> None:
        stream = self._live.pop(request_id, None)
        if stream is not None:
            stream.close()

    def _drop_all(self) -> None:
        for request_id in list(self._live):
            self._forget(request_id)
        self._outbox.clear()
        self._messages.clear()

    def _end(self, farewell: Failure | None) -> None:
        if self._phase in (_Phase.GREETING, _Phase.OPEN):
            self._phase, self._farewell = _Phase.ENDING, farewell
            self._news.set()

    def _is_over(self) -> bool:
        return self._phase is _Phase.ENDING and not self._live

    def _take(self) -> list[DecodeMessage]:
        messages, self._messages = self._messages, []
        messages += [DecodeMessage(step=step) for step in self._take_steps()]
        if self._phase is _Phase.ENDED and self._farewell is not None and not messages:
            messages.append(DecodeMessage(failure=self._farewell))
            self._farewell = None
        if self._is_to_tell and self._phase is not _Phase.ENDED:
            messages = messages or [DecodeMessage(step=Step())]
        if messages:
            self._is_to_tell = False
            if self._telling is not None:
                self._telling.cancel()
                self._telling = None
        for message in messages:
            message.num_submitted = self._num_submitted
        return messages

    def _take_steps(self) -> list[Step]:
        if self._pausing is not None and self._phase is not _Phase.ENDED:
            return self._outbox.take_pressing()
        num_requests = len(self._outbox)
        if num_requests >= _MANY:
            pause_s = min(LONGEST_PAUSE_S, num_requests * WRITE_S)
            self._pausing = asyncio.get_running_loop().call_later(pause_s, self._end_pause)
        return self._outbox.take()

    def _end_pause(self) -> None:
        self._pausing = None
        if len(self._outbox):
            self._news.set()


def _invalid(field: str, message: str) -> Failure:
    return Failure(kind=Failure.KIND_INVALID, field=field, message=message)


def _incompatible(field: str, ours: object, theirs: object) -> Failure:
    message = f"this worker's is {ours}, {str(theirs)[:200]!r} was expected"
    return Failure(kind=Failure.KIND_INCOMPATIBLE, field=field, message=message)
