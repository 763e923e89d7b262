"""What a holder makes of what pullers ask: leases, or refusals that name why."""

import asyncio
import gc
import weakref

import grpc
import pytest
from grpc.aio import StreamStreamCall

from kv_transfer import holder
from kv_transfer.errors import Refused, TransferError
from protos.generation_pb2 import Failure
from protos.handoff_pb2 import Commit, HolderMessage, PullerMessage
from protos.rpc import PROTOCOL
from tests.kv_transfer.handoff_pair import CHUNKS, END, WANTED, Pair, run

OPEN = "/kvrelay.v1.HandOff/Open"


async def test_the_holders_refusal_is_the_pullers_error(pair: Pair) -> None:
    async def act() -> None:
        failure = Failure(kind=Failure.KIND_INVALID, field="prompt", message="too long")
        pair.source.streams[0].put(Refused(failure))

    with pytest.raises(Refused, match="prompt: too long") as refused:
        await run(pair, pair.hand_off(WANTED), act)
    assert not refused.value.retryable


@pytest.mark.parametrize(
    "ended",
    [
        asyncio.InvalidStateError("RPC already finished."),
        grpc.aio.AioRpcError(
            grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), "of Core"
        ),
    ],
)
async def test_a_refusal_that_crosses_the_commit_is_the_pullers_error(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, ended: Exception
) -> None:
    """As of a request at whose first token there is nothing to draw: gRPC fails what is written to
    a call that has ended, whatever was said before its end."""
    call = pair.link.open_handoff()

    async def write(message: PullerMessage) -> None:
        if message.WhichOneof("kind") == "commit":
            failure = Failure(kind=Failure.KIND_INVALID, field="stop", message="none is left")
            pair.source.streams[0].put(Refused(failure))
            raise ended
        await send(message)

    async def act() -> None:
        pair.source.streams[0].put(*CHUNKS)

    send = call.write
    monkeypatch.setattr(call, "write", write)
    monkeypatch.setattr(pair.link, "open_handoff", lambda: call)
    with pytest.raises(Refused, match="stop: none is left"):
        await run(pair, pair.hand_off(WANTED), act)


async def test_what_was_refused_does_not_wait_for_the_collector(pair: Pair) -> None:
    hand_off = pair.hand_off(WANTED, pair.ask(WANTED, protocol=PROTOCOL + 1))
    gone = weakref.ref(hand_off)
    gc.disable()
    try:
        with pytest.raises(Refused) as refused:
            await hand_off.run()
        del refused, hand_off
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("changes", "kind", "match"),
    [
        ({"holder_incarnation": 12}, Failure.KIND_STALE, "another process"),
        ({"protocol": PROTOCOL + 1}, Failure.KIND_INCOMPATIBLE, "protocol"),
    ],
)
async def test_an_ask_that_is_meant_for_another_is_refused(
    pair: Pair, changes: dict[str, int], kind: Failure.Kind.ValueType, match: str
) -> None:
    hand_off = pair.hand_off(WANTED, pair.ask(WANTED, **changes))
    with pytest.raises(Refused, match=match) as refused:
        await hand_off.run()
    assert refused.value.failure.kind == kind
    assert pair.source.asks == []
    assert bool(pair.link.lost) == (kind == Failure.KIND_STALE)


async def test_more_leases_than_the_bound_are_refused(pair: Pair) -> None:
    pulling = [asyncio.ensure_future(pair.hand_off(WANTED).run()) for _ in range(3)]
    done, open_ones = await asyncio.wait(pulling, return_when=asyncio.FIRST_COMPLETED, timeout=30)
    (refused,) = done
    assert isinstance(error := refused.exception(), Refused)
    assert error.failure.kind == Failure.KIND_BUSY
    for one in open_ones:
        one.cancel()
    await asyncio.wait(open_ones)
    await pair.idle()


@pytest.mark.parametrize("name", ["x" * 513, "line\nfeed", "bell\a"])
async def test_an_id_that_no_log_should_have_is_refused(pair: Pair, name: str) -> None:
    with pytest.raises(Refused, match="handoff_id: must be printable") as refused:
        await pair.hand_off(WANTED, pair.ask(WANTED, handoff_id=name)).run()
    assert refused.value.failure.kind == Failure.KIND_INVALID
    assert pair.source.asks == []


async def test_an_ask_that_cannot_be_opened_is_no_lease(pair: Pair) -> None:
    """A mistake of ours, but not one that makes the holder refuse everybody after a while."""
    good, pair.source.open = pair.source.open, lambda _: 1 // 0  # type: ignore[method-assign,assignment,return-value]
    for _ in range(2):
        with pytest.raises(TransferError):
            await pair.hand_off(WANTED).run()
    pair.source.open = good  # type: ignore[method-assign]
    assert pair.holder.num_leases == 0

    async def act() -> None:
        pair.source.streams[0].put(*CHUNKS, END)

    assert (await run(pair, pair.hand_off(WANTED), act)).end == 28


async def test_a_draining_holder_finishes_what_it_has(pair: Pair) -> None:
    async def act() -> None:
        pair.holder.drain()
        with pytest.raises(Refused, match="draining"):
            await pair.hand_off(WANTED).run()
        pair.source.streams[0].put(*CHUNKS, END)

    assert (await run(pair, pair.hand_off(WANTED), act)).end == 28


async def test_a_holder_that_has_drained_for_long_enough_says_so(pair: Pair) -> None:
    async def act() -> None:
        pair.holder.end_leases()

    with pytest.raises(Refused, match="drained long enough") as refused:
        await run(pair, pair.hand_off(WANTED), act)
    assert refused.value.failure.kind == Failure.KIND_UNAVAILABLE
    await pair.idle()


async def test_a_stream_that_asks_for_nothing_is_ended(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holder, "ASK_TIMEOUT_S", 0.0)
    answer = await pair.link.open_handoff().read()
    assert isinstance(answer, HolderMessage)
    assert answer.failure.message == "nothing was asked for"


async def test_who_hangs_up_without_a_commit_ends_its_lease(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    stream = pair.link.open_handoff()
    await stream.write(PullerMessage(ask=pair.ask(WANTED)))
    await pair.source.asked.wait()
    pair.source.streams[0].put(*CHUNKS)
    num_told = 0  # whose lease it has when it hangs up: what comes with that may not be taken
    while num_told < len(CHUNKS):
        message = await stream.read()
        assert isinstance(message, HolderMessage)
        num_told += message.WhichOneof("kind") == "chunk"
    await stream.done_writing()
    while isinstance(message := await stream.read(), HolderMessage):
        assert message.WhichOneof("kind") != "failure"
    await pair.idle()
    pair.check_all_dropped(21, 22, 23)
    assert await stream.code() is grpc.StatusCode.OK
    assert not caplog.messages


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (PullerMessage(commit=Commit()), "first message"),
        (PullerMessage(), "first message"),
    ],
)
async def test_a_stream_begins_with_an_ask(pair: Pair, message: PullerMessage, match: str) -> None:
    stream = pair.link.open_handoff()
    await stream.write(message)
    answer = await stream.read()
    assert isinstance(answer, HolderMessage)
    assert match in answer.failure.message


@pytest.mark.parametrize("first", [False, True])
async def test_bytes_that_are_no_message_are_refused(pair: Pair, first: bool) -> None:
    stream: StreamStreamCall[bytes, HolderMessage] = pair.channel.stream_stream(
        OPEN, response_deserializer=HolderMessage.FromString
    )()
    if not first:
        await stream.write(PullerMessage(ask=pair.ask(WANTED)).SerializeToString())
        await pair.source.asked.wait()
    await stream.write(b"\xff")
    while isinstance(message := await stream.read(), HolderMessage):
        failure = message.failure
    assert (failure.kind, failure.field) == (Failure.KIND_INVALID, "message")
    await pair.idle()


async def test_a_commit_before_the_end_is_refused(pair: Pair) -> None:
    stream = pair.link.open_handoff()
    await stream.write(PullerMessage(ask=pair.ask(WANTED)))
    await stream.write(PullerMessage(commit=Commit()))
    async for message in stream:
        if message.WhichOneof("kind") == "failure":
            break
    assert "before the end" in message.failure.message
    await pair.idle()


COMMIT = PullerMessage(commit=Commit())


@pytest.mark.parametrize("again", ["ask", "commit"])
async def test_what_a_puller_says_twice_ends_its_lease(pair: Pair, again: str) -> None:
    ask = PullerMessage(ask=pair.ask(WANTED))
    stream = pair.link.open_handoff()
    await stream.write(ask)
    await pair.source.asked.wait()
    pair.source.streams[0].put(*CHUNKS)
    while isinstance(message := await stream.read(), HolderMessage) and message.chunk.end != 28:
        pass
    await stream.write(COMMIT)
    await stream.write(ask if again == "ask" else COMMIT)
    while isinstance(message := await stream.read(), HolderMessage):
        if message.WhichOneof("kind") == "failure":
            break
    assert isinstance(message, HolderMessage)
    assert message.failure.message == "must follow the ask, once"
    await pair.idle()
    pair.check_all_dropped(21, 22, 23)
    assert len(pair.source.asks) == 1
