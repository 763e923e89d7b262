"""The commit and its verdict: what was held all the time is confirmed, and nothing else."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kv_transfer import holder
from kv_transfer.errors import TransferError
from kv_transfer.tally import NOT_HELD, HolderTally
from protos.generation_pb2 import Failure
from protos.handoff_pb2 import Commit, HolderMessage, PullerMessage
from tests.kv_transfer.handoff_pair import CHUNKS, END, WANTED, Pair, run


async def test_a_lease_released_early_is_not_confirmed() -> None:
    pair = Pair(faults="holder.commit=release")
    await pair.start()

    async def act() -> None:
        pair.source.streams[0].put(*CHUNKS, END)

    with pytest.raises(TransferError, match="let go too early"):
        await run(pair, pair.hand_off(WANTED), act)
    assert pair.tally.ends == {NOT_HELD: 1}
    assert pair.holder.tally == HolderTally(num_leases=1, num_refused_commits=1)
    await pair.stop()


async def test_a_lease_ends_with_the_time_of_its_request(pair: Pair) -> None:
    """Whose puller lives on and never commits."""
    ask = pair.ask(WANTED)
    ask.compute.deadline_ms = 50
    stream = pair.link.open_handoff()
    await stream.write(PullerMessage(ask=ask))
    await pair.source.asked.wait()
    pair.source.streams[0].put(*CHUNKS, END)
    async with asyncio.timeout(30):
        async for message in stream:
            if message.WhichOneof("kind") == "failure":
                break
    assert (message.failure.kind, message.failure.field) == (Failure.KIND_TIMED_OUT, "commit")
    await pair.idle()
    pair.check_all_dropped(21, 22, 23)


async def committed_early(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[HolderMessage]:
    """What a puller hears that has read all, and been heard, before anything is drawn."""
    hear, num_heard = holder._HandOff._hear, 0

    def note(hand_off: holder._HandOff) -> bool:
        nonlocal num_heard
        num_heard += 1
        return hear(hand_off)

    monkeypatch.setattr(holder._HandOff, "_hear", note)
    stream = pair.link.open_handoff()
    await stream.write(PullerMessage(ask=pair.ask(WANTED)))
    await pair.source.asked.wait()
    prompt = pair.source.streams[0]
    prompt.put(*CHUNKS)
    kind, ends = "", [one.held.end for one in CHUNKS]
    while isinstance(message := await stream.read(), HolderMessage):
        kind = message.WhichOneof("kind") or ""
        if kind == "chunk":
            assert message.chunk.end == ends.pop(0)
            if not ends:
                await stream.write(PullerMessage(commit=Commit()))
        elif kind == "waiting":
            assert pair.source.dropped == [], "held while the tokens are drawn"
            if num_heard:
                prompt.put(END)
        else:
            yield message


async def test_a_puller_that_has_read_all_gets_the_verdict_with_the_tokens(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = [message async for message in committed_early(pair, monkeypatch)]
    assert [m.finished.verdict.held for m in heard if m.HasField("finished")] == [True]
    assert not any(m.HasField("verdict") for m in heard)
    await pair.idle()
    pair.check_all_dropped(21, 22, 23)


async def test_what_is_let_go_of_after_an_early_commit_is_not_confirmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = Pair(faults="holder.finished=release")
    await pair.start()
    heard = [message async for message in committed_early(pair, monkeypatch)]
    (verdict,) = [m.finished.verdict for m in heard if m.HasField("finished")]
    assert (verdict.held, verdict.reason) == (False, "a fault let go of it")
    await pair.stop()


async def test_a_prompt_is_committed_before_its_end(pair: Pair) -> None:
    """Seen from the puller: one message is left between the end and the use of its blocks."""
    committed = asyncio.Event()
    reach = pair.puller_faults.reach
    pair.puller_faults.reach = lambda point: (  # type: ignore[method-assign]
        committed.set() if point == "puller.commit" else reach(point)
    )

    async def act() -> None:
        pair.source.streams[0].put(*CHUNKS)
        await committed.wait()
        pair.source.streams[0].put(END)

    pulled = await run(pair, pair.hand_off(WANTED), act)
    assert (pulled.end, list(pulled.tokens)) == (28, list(END.tokens))
