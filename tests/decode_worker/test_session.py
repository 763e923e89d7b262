"""The session without a stream under it: what goes in, what comes out."""

import asyncio

import pytest

from decode_worker.answerer import (
    LocalPrefill,
    PrefillCandidate,
    PrefixSource,
    Route,
    SubmittedRequest,
    decode_submit,
    encode_submit,
)
from decode_worker.session import Session
from engine.errors import (
    EngineDiedError,
    QueueFullError,
    RequestError,
    StepError,
    UnavailableError,
)
from engine.request import ChoiceDelta, FinishReason, GenerationRequest, PromptReport, RequestId
from engine.sampling import SamplingParams
from protos.generation_pb2 import FINISH_REASON_LENGTH, Failure
from protos.limits import PROTOCOL
from protos.session_pb2 import (
    Cancel,
    DecodeMessage,
    Hello,
    IngressMessage,
    RequestNews,
    Step,
    StopChoice,
    Submit,
)
from tests.decode_worker.fakes import DESCRIPTION, PushedAnswerer, PushedStream

HELLO = IngressMessage(hello=Hello(protocol=PROTOCOL))


def submit(name: str, n: int = 1) -> Submit:
    request = GenerationRequest(RequestId(name), [1, 2, 3], SamplingParams(n=n))
    return encode_submit(SubmittedRequest(request))


class Ends:
    """A session and both its ends."""

    def __init__(self, max_unsent_bytes: int = 1 << 20, *, greeted: bool = True) -> None:
        self.answerer = PushedAnswerer()
        self.session = Session("7/", self.answerer, DESCRIPTION, max_unsent_bytes)
        if greeted:
            self.session.receive(HELLO)

    def submit(self, name: str, n: int = 1) -> PushedStream:
        self.session.receive(IngressMessage(submit=submit(name, n)))
        return self.answerer.streams[-1]

    def cancel(self, name: str) -> None:
        self.session.receive(IngressMessage(cancel=Cancel(request_id=name)))

    async def messages(self) -> list[DecodeMessage]:
        """Without those that only say that a request has come."""
        async with asyncio.timeout(30):
            while messages := await self.session.next_messages():
                if told := [one for one in messages if not _is_receipt(one)]:
                    return told
        return []

    async def welcome(self) -> None:
        (message,) = await self.messages()
        assert message.welcome == DESCRIPTION

    async def news(self) -> list[RequestNews]:
        """Of one message."""
        (message,) = await self.messages()
        assert message.WhichOneof("kind") == "step"
        return list(message.step.requests)

    async def farewell(self) -> Failure:
        """The last message, after which nothing comes."""
        (message,) = await self.messages()
        assert message.WhichOneof("kind") == "failure"
        assert await self.messages() == []
        assert self.session.num_requests == 0
        return message.failure


def _is_receipt(message: DecodeMessage) -> bool:
    return message.WhichOneof("kind") == "step" and not message.step.requests


@pytest.fixture
async def ends() -> Ends:
    ends = Ends()
    await ends.welcome()
    return ends


async def test_one_message_has_the_news_of_all_requests(ends: Ends) -> None:
    streams = [ends.submit(f"r{i}") for i in range(5)]
    streams[0].push(ChoiceDelta(0, [9]), prompt=PromptReport(2))
    for token, stream in enumerate(streams):
        stream.push(ChoiceDelta(0, [token]))
    streams[4].fail(StepError("no more memory"))
    news = await ends.news()
    assert [n.request_id for n in news] == ["r0", "r1", "r2", "r3", "r4", "r4"]
    tokens = [[list(delta.token_ids) for delta in n.deltas] for n in news]
    assert tokens == [[[9, 0]], [[1]], [[2]], [[3]], [[4]], []]
    assert news[0].prompt.num_cached_tokens == 2
    assert news[5].failure.kind == Failure.KIND_INTERNAL
    assert ends.session.num_requests == 4


async def test_tokens_of_many_share_a_message_but_first_and_last_ones_wait_for_nothing(
    ends: Ends,
) -> None:
    many = 64
    streams = [ends.submit(f"r{i}", n=2) for i in range(many)]
    for stream in streams:
        stream.push(ChoiceDelta(0, [0]), prompt=PromptReport(2))
    assert len(await ends.news()) == many
    for token in (1, 2):
        for stream in streams:
            stream.push(ChoiceDelta(0, [token]), ChoiceDelta(1, [token + 10]))
        await asyncio.sleep(0)
    ending = ChoiceDelta(0, [3], finish_reason=FinishReason.LENGTH)
    streams[7].push(ending)
    (last,) = await ends.news()
    assert last.request_id == "r7"
    assert [list(delta.token_ids) for delta in last.deltas] == [[1, 2, 3], [11, 12]]
    assert last.deltas[0].finish_reason == FINISH_REASON_LENGTH
    late = ends.submit("late")
    late.push(ChoiceDelta(0, [0]), prompt=PromptReport(2))
    assert [n.request_id for n in await ends.news()] == ["late"]
    rest = await ends.news()
    assert [n.request_id for n in rest] == [f"r{i}" for i in range(many) if i != 7]
    assert all([list(d.token_ids) for d in n.deltas] == [[1, 2], [11, 12]] for n in rest)


async def test_tokens_of_few_wait_for_nothing(ends: Ends) -> None:
    streams = [ends.submit(f"r{i}") for i in range(4)]
    for token in range(10):
        for stream in streams:
            stream.push(ChoiceDelta(0, [token]))
        await asyncio.sleep(0)
        tokens = [list(delta.token_ids) for n in await ends.news() for delta in n.deltas]
        assert tokens == [[token]] * 4


async def test_a_failure_brings_what_was_held_back(ends: Ends) -> None:
    streams = [ends.submit(f"r{i}") for i in range(64)]
    for token in (1, 2):
        for stream in streams:
            stream.push(ChoiceDelta(0, [token]))
        if token == 1:
            assert len(await ends.news()) == 64
    await asyncio.sleep(0)
    streams[3].fail(StepError("no more memory"))
    first, second = await ends.news()
    assert [list(delta.token_ids) for delta in first.deltas] == [[2]]
    assert second.failure.kind == Failure.KIND_INTERNAL
    ends.session.close()
    assert await ends.messages() == []


async def test_that_a_request_has_come_is_told_at_once(ends: Ends) -> None:
    """Before there is any news of it, and with all news from then on."""
    first = ends.submit("a")
    assert await ends.session.next_messages() == [DecodeMessage(step=Step(), num_submitted=1)]
    ends.submit("b")
    first.push(ChoiceDelta(0, [1]))
    await asyncio.sleep(0)
    (message,) = await ends.session.next_messages()
    assert (message.num_submitted, message.step.requests[0].request_id) == (2, "a")


async def test_with_many_that_one_has_come_is_told_with_what_comes_next(ends: Ends) -> None:
    """Or else each is a message of its own; but not so long after that its worker's death, of which
    it may be the cause, would be taken for one before it."""
    streams = [ends.submit(f"r{i}") for i in range(8)]
    while await told_to_come(ends) < 8:
        pass
    ends.submit("more")
    streams[0].push(ChoiceDelta(0, [1]))
    (message,) = await ends.session.next_messages()
    assert (message.num_submitted, len(message.step.requests)) == (9, 1)
    ends.submit("and more")
    waiting = asyncio.create_task(ends.session.next_messages())
    await asyncio.sleep(0)
    assert not waiting.done()
    assert await waiting == [DecodeMessage(step=Step(), num_submitted=10)]


async def told_to_come(ends: Ends) -> int:
    (message,) = await ends.session.next_messages()
    return message.num_submitted


async def test_requests_are_the_engines_under_a_name_of_the_session(ends: Ends) -> None:
    stream = ends.submit("r")
    assert stream.submitted.request.request_id == "7/1/r"
    stream.push(ChoiceDelta(0, [1], finish_reason=FinishReason.LENGTH))
    stream.end()
    (news,) = await ends.news()
    assert (news.request_id, news.deltas[0].finish_reason) == ("r", FINISH_REASON_LENGTH)
    assert stream.closed.is_set()
    assert ends.session.num_requests == 0
    assert ends.submit("r") is not stream, "an id is free again when its request has ended"


async def test_what_was_said_next_comes_next() -> None:
    ends = Ends(greeted=False)
    first, second, third = (IngressMessage(submit=submit(name)) for name in "abc")
    cancel = IngressMessage(cancel=Cancel(request_id="b"), more=[third])
    hello = IngressMessage(hello=Hello(protocol=PROTOCOL), more=[first, second, cancel])
    ends.session.receive(hello)
    streams = ends.answerer.streams
    assert [one.submitted.request.request_id[-1] for one in streams] == ["a", "b", "c"]
    assert [one.closed.is_set() for one in streams] == [False, True, False]


async def test_cancel_closes_and_silences(ends: Ends) -> None:
    first, second = ends.submit("a"), ends.submit("b")
    first.push(ChoiceDelta(0, [1]))
    await asyncio.sleep(0)
    ends.cancel("a")
    ends.cancel("a")
    ends.cancel("never heard of")
    assert first.closed.is_set()
    first.push(ChoiceDelta(0, [2]))
    second.push(ChoiceDelta(0, [3]))
    (news,) = await ends.news()
    assert news.request_id == "b"


async def test_stop_choice_reaches_the_stream(ends: Ends) -> None:
    stream = ends.submit("a", n=2)
    for name in ("a", "unknown"):
        stop = StopChoice(request_id=name, choice=1)
        ends.session.receive(IngressMessage(stop_choice=stop))
    assert stream.stopped == [1]


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("params", {"params": {"temperature": -1.0}}),
        ("prefill_workers", {"prefill_workers": [{"address": "unix:/x"}]}),
        ("sources", {"sources": [{"address": "host"}]}),
        ("prefill_workers", {"prefill_workers": [{"address": "h:1"}] * 65}),
        ("local_prefill", {"local_prefill": 9}),
    ],
)
async def test_a_bad_request_is_refused_alone(
    ends: Ends, field: str, message: dict[str, object]
) -> None:
    other = ends.submit("good")
    submit = Submit(request_id="bad", token_ids=[1], **message)  # type: ignore[arg-type]
    ends.session.receive(IngressMessage(submit=submit))
    (news,) = await ends.news()
    assert (news.request_id, news.failure.kind) == ("bad", Failure.KIND_INVALID)
    assert news.failure.field == ("temperature" if field == "params" else field)
    other.push(ChoiceDelta(0, [1]))
    assert [n.request_id for n in await ends.news()] == ["good"]


async def test_a_running_id_ends_the_session(ends: Ends) -> None:
    """Whatever came under that id would be taken for the first request's."""
    stream = ends.submit("same")
    ends.submit("same")
    assert stream.closed.is_set()
    failure = await ends.farewell()
    assert (failure.kind, failure.field) == (Failure.KIND_INVALID, "request_id")


@pytest.mark.parametrize("name", ["", "x" * 257])
async def test_an_impossible_id_ends_the_session(ends: Ends, name: str) -> None:
    ends.session.receive(IngressMessage(submit=Submit(request_id=name, token_ids=[1])))
    assert (await ends.farewell()).field == "request_id"


@pytest.mark.parametrize(
    ("message", "kind", "field"),
    [
        (IngressMessage(), Failure.KIND_INVALID, "kind"),
        (IngressMessage(submit=Submit(request_id="r")), Failure.KIND_INVALID, "kind"),
        (IngressMessage(cancel=Cancel(request_id="r")), Failure.KIND_INVALID, "kind"),
        (IngressMessage(hello=Hello()), Failure.KIND_INCOMPATIBLE, "protocol"),
        (
            IngressMessage(hello=Hello(protocol=PROTOCOL, fingerprint="hub:abd")),
            Failure.KIND_INCOMPATIBLE,
            "fingerprint",
        ),
    ],
)
async def test_what_is_no_greeting(
    message: IngressMessage, kind: Failure.Kind.ValueType, field: str
) -> None:
    ends = Ends(greeted=False)
    ends.session.receive(message)
    ends.session.receive(HELLO)
    failure = await ends.farewell()
    assert (failure.kind, failure.field) == (kind, field)
    assert not ends.answerer.streams


async def test_a_second_greeting_ends_the_session(ends: Ends) -> None:
    stream = ends.submit("r")
    ends.session.receive(HELLO)
    assert (await ends.farewell()).field == "kind"
    assert stream.closed.is_set()


async def test_who_has_greeted_outlasts_the_time_for_it(ends: Ends) -> None:
    stream = ends.submit("r")
    ends.session.end_greeting()
    stream.push(ChoiceDelta(0, [1]))
    assert [n.request_id for n in await ends.news()] == ["r"]


async def test_the_expected_fingerprint_is_welcome() -> None:
    ends = Ends(greeted=False)
    hello = Hello(protocol=PROTOCOL, fingerprint=DESCRIPTION.format.fingerprint)
    ends.session.receive(IngressMessage(hello=hello))
    await ends.welcome()


async def test_closing_drops_everything(ends: Ends) -> None:
    streams = [ends.submit("a"), ends.submit("b")]
    streams[0].push(ChoiceDelta(0, [1]))
    ends.session.close()
    ends.session.close()
    assert all(stream.closed.is_set() for stream in streams)
    assert await ends.messages() == []


async def test_half_closed_the_rest_is_answered(ends: Ends) -> None:
    stream = ends.submit("a")
    ends.session.finish()
    stream.push(ChoiceDelta(0, [1], finish_reason=FinishReason.STOP))
    stream.end()
    assert [n.request_id for n in await ends.news()] == ["a"]
    assert await ends.messages() == []


async def test_draining_refuses_what_is_new_and_ends_with_the_last(ends: Ends) -> None:
    stream = ends.submit("old")
    ends.session.drain()
    (leaving,) = await ends.session.next_messages()
    assert leaving.HasField("leaving")
    assert not leaving.leaving.move
    ends.submit("new")
    (news,) = await ends.news()
    assert (news.request_id, news.failure.kind) == ("new", Failure.KIND_UNAVAILABLE)
    stream.end()
    failure = await ends.farewell()
    assert failure.kind == Failure.KIND_UNAVAILABLE


async def test_a_draining_worker_asks_to_move_what_is_left(ends: Ends) -> None:
    stream = ends.submit("a")
    ends.session.drain()
    ends.session.ask_to_move()
    messages = await ends.session.next_messages()
    assert [message.leaving.move for message in messages] == [False, True]
    stream.push(ChoiceDelta(0, [1]))  # nobody else could take it: it goes on
    (news,) = await ends.news()
    assert news.deltas


async def test_an_idle_session_is_asked_to_move_as_well(ends: Ends) -> None:
    ends.session.ask_to_move()
    (asked,) = await ends.messages()
    assert asked.leaving.move


async def test_each_session_is_asked_with_its_own_number_of_requests(ends: Ends) -> None:
    """Both messages are taken before either is written."""
    other = Ends()
    await other.welcome()
    for name in "ab":
        ends.submit(name)
    for one in (ends, other):
        one.session.ask_to_move()
    asked = [await one.session.next_messages() for one in (ends, other)]
    assert [[message.num_submitted for message in messages] for messages in asked] == [[2], [0]]


async def test_who_greets_after_that_is_asked_behind_the_welcome() -> None:
    ends = Ends(greeted=False)
    ends.session.ask_to_move()
    ends.session.receive(HELLO)
    welcome, asked = await ends.messages()
    assert welcome.HasField("welcome")
    assert asked.leaving.move


async def test_an_idle_session_drains_at_once(ends: Ends) -> None:
    ends.session.drain()
    assert (await ends.farewell()).kind == Failure.KIND_UNAVAILABLE


async def test_who_greets_while_a_drain_begins_is_told_of_that() -> None:
    ends = Ends(greeted=False)
    ends.session.drain()
    ends.session.receive(HELLO)
    assert (await ends.farewell()).kind == Failure.KIND_UNAVAILABLE


async def test_what_is_left_can_be_failed(ends: Ends) -> None:
    streams = [ends.submit("a"), ends.submit("b")]
    ends.session.fail_requests(UnavailableError("the worker is stopping"))
    assert all(stream.closed.is_set() for stream in streams)
    news = await ends.news()
    assert {(n.request_id, n.failure.kind) for n in news} == {
        ("a", Failure.KIND_UNAVAILABLE),
        ("b", Failure.KIND_UNAVAILABLE),
    }


async def test_an_engine_that_dies_takes_the_session_with_it(ends: Ends) -> None:
    """To the ingress the worker is dead, whose process may be there for a while."""
    streams = [ends.submit("a"), ends.submit("b")]
    streams[0].fail(EngineDiedError("the engine died"))
    assert all(stream.closed.is_set() for stream in streams)
    farewell = await ends.farewell()
    assert (farewell.kind, farewell.message) == (Failure.KIND_UNAVAILABLE, "the engine died")


async def test_what_nobody_takes_is_bounded() -> None:
    ends = Ends(max_unsent_bytes=10_000)
    await ends.welcome()
    stream, other = ends.submit("a"), ends.submit("b")
    for _ in range(1000):
        stream.push(ChoiceDelta(0, [1]))
    async with asyncio.timeout(30):
        await stream.closed.wait()
    assert other.closed.is_set()
    assert (await ends.farewell()).kind == Failure.KIND_BUSY


async def test_so_are_failures_that_nobody_takes() -> None:
    """Of requests that are refused as soon as they come."""
    ends = Ends(max_unsent_bytes=10_000)
    await ends.welcome()
    for number in range(20):
        submit = Submit(request_id=f"{number:0200}", local_prefill=77)  # type: ignore[arg-type]
        ends.session.receive(IngressMessage(submit=submit))
    assert len(await ends.news()) == 20
    for number in range(100):
        submit = Submit(request_id=f"{number:0200}", local_prefill=77)  # type: ignore[arg-type]
        ends.session.receive(IngressMessage(submit=submit))
    assert (await ends.farewell()).kind == Failure.KIND_BUSY


async def test_failing_all_requests_at_once_is_bounded_too() -> None:
    ends = Ends(max_unsent_bytes=10_000)
    await ends.welcome()
    streams = [ends.submit(f"r{i}") for i in range(50)]
    ends.session.fail_requests(StepError("x" * 1000))
    assert all(stream.closed.is_set() for stream in streams)
    assert (await ends.farewell()).kind == Failure.KIND_BUSY


async def test_refusals_of_the_answerer_are_the_requests(ends: Ends) -> None:
    for name, error in (("a", RequestError("n", "9")), ("b", QueueFullError("4096 wait"))):
        ends.submit(name).fail(error)
    news = await ends.news()
    assert [(n.request_id, n.failure.kind, n.failure.field) for n in news] == [
        ("a", Failure.KIND_INVALID, "n"),
        ("b", Failure.KIND_BUSY, ""),
    ]


async def test_a_bug_in_the_answerer_is_told(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    ends.submit("a").push("no delta")  # type: ignore[arg-type]
    (news,) = await ends.news()
    assert news.failure.kind == Failure.KIND_INTERNAL
    assert "request a failed" in caplog.text


def test_routes_come_back_as_they_were() -> None:
    route = Route(
        (PrefillCandidate("p1:9000"), PrefillCandidate("[::1]:80", 2**64 - 1)),
        (PrefixSource("d7:1", 3, 4096),),
        LocalPrefill.NEVER,
    )
    request = GenerationRequest(RequestId("r"), [1], SamplingParams())
    for submitted in (SubmittedRequest(request, route), SubmittedRequest(request)):
        sent = encode_submit(submitted).SerializeToString()
        assert decode_submit(Submit.FromString(sent)) == submitted
