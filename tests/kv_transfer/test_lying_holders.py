"""A puller believes no holder that says what cannot be."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kv_transfer.errors import TransferError
from kv_transfer.holder import Context
from kv_transfer.link import Link
from kv_transfer.tally import FAILED
from protos.generation_pb2 import Failure, TokenLogprobs
from protos.handoff_pb2 import (
    BlockRun,
    Chunk,
    Finished,
    HolderMessage,
    PullerMessage,
    Verdict,
    Waiting,
)
from protos.handoff_pb2_grpc import HandOffServicer, add_HandOffServicer_to_server
from protos.worker_pb2 import WorkerDescription
from tests.kv_transfer.fakes import BLOCK
from tests.kv_transfer.handoff_pair import CHUNKS, END, FIGURES, WANTED, Pair, run
from tests.kv_transfer.serving import serving


class Scripted(HandOffServicer):
    """Says what it is told to, whatever the puller says."""

    def __init__(self, *script: HolderMessage) -> None:
        self._script = script

    async def Open(  # type: ignore[override]  # noqa: N802 - the service's own name
        self, requests: AsyncIterator[PullerMessage], context: Context
    ) -> None:
        await anext(requests)
        for message in self._script:
            await context.write(message)
        async for _ in requests:
            pass


def said(start: int, end: int, blocks: list[int]) -> HolderMessage:
    run = BlockRun(group=0, first_entry=start // BLOCK, blocks=blocks)
    return HolderMessage(chunk=Chunk(start=start, end=end, blocks=[run], next_s=5.0))


FIRST, SECOND = said(8, 16, [21]), said(16, 28, [22, 23])
WAITING = HolderMessage(waiting=Waiting(wait_s=1.0, num_turns=1))
FINISHED = HolderMessage(finished=Finished(tokens=END.tokens))
HELD = HolderMessage(verdict=Verdict(held=True))
NOT_HELD = HolderMessage(verdict=Verdict(held=False))


@pytest.mark.parametrize(
    ("script", "match"),
    [
        ((FIRST, FIRST), "tokens 8..16 were announced, 16..28 are missing"),
        ((FIRST, SECOND, SECOND), "28..28 are missing"),
        ((FIRST, HELD), "a verdict while READING"),
        ((FIRST, SECOND, FINISHED, FINISHED), "'finished' while ARRIVING"),
        ((FIRST, SECOND, FINISHED, WAITING), "'waiting' while ARRIVING"),
        ((FIRST, SECOND, FINISHED, FIRST), "a chunk while ARRIVING"),
        ((FIRST, SECOND, FINISHED, HELD), "a verdict while ARRIVING"),
        ((FIRST, SECOND, FINISHED, NOT_HELD), "a verdict while ARRIVING"),
    ],
)
async def test_what_a_holder_says_twice_or_late_fails_the_hand_off(
    pair: Pair, script: tuple[HolderMessage, ...], match: str
) -> None:
    """Its reads have not ended: they are given up."""
    pair.by_hand()
    async with serving(lambda server: add_HandOffServicer_to_server(Scripted(*script), server)) as (
        channel
    ):
        pair.link = Link("x", channel, WorkerDescription(), "fake", pair.pool, FIGURES)
        hand_off = pair.hand_off(WANTED)
        with pytest.raises(TransferError, match=match):
            await asyncio.wait_for(hand_off.run(), 30)
        assert not any(read.wanted for read in pair.pool.reads)
        assert len(await hand_off.unfinished()) == len(pair.pool.reads) > 0
    assert pair.tally.ends == {FAILED: 1}, "no commit was refused: there was none"


@pytest.mark.parametrize("field", ["", "holder_incarnation", "f" * (1 << 20)])
async def test_no_more_is_kept_of_what_a_holder_says_than_a_reader_wants(
    pair: Pair, field: str
) -> None:
    failure = Failure(field=field, message="m" * (1 << 20))
    scripted = Scripted(HolderMessage(failure=failure))
    async with serving(lambda server: add_HandOffServicer_to_server(scripted, server)) as channel:
        pair.link = Link("x", channel, WorkerDescription(), "fake", pair.pool, FIGURES)
        with pytest.raises(TransferError, match="mmm") as caught:
            await asyncio.wait_for(pair.hand_off(WANTED).run(), 30)
        assert len(str(caught.value)) < 2100
        assert len(pair.link.lost or "") < 2100


async def test_a_holder_that_computed_too_little_is_not_believed(pair: Pair) -> None:
    async def act() -> None:
        pair.source.streams[0].put(CHUNKS[0], END)

    with pytest.raises(TransferError, match="only a part"):
        await run(pair, pair.hand_off(WANTED), act)


ONE = TokenLogprobs(token_id=1, top_token_ids=[1], top_logprobs=[-0.5])
WIDE = TokenLogprobs(token_id=1, top_token_ids=range(100_000))
DEEP = TokenLogprobs(token_id=1, top_logprobs=[-0.5] * 2)


@pytest.mark.parametrize(
    ("entries", "wants_any", "match"),
    [
        ([ONE] * (WANTED.end + 1), True, "more prompt logprobs"),
        ([ONE], False, "more prompt logprobs"),
        ([ONE, WIDE], True, "100000 alternatives"),
        ([DEEP], True, "2 alternatives"),
    ],
)
async def test_more_logprobs_than_were_asked_for_are_not_kept(
    pair: Pair, entries: list[TokenLogprobs], wants_any: bool, match: str
) -> None:
    async def act() -> None:
        pair.source.streams[0].put(CHUNKS[0]._replace(prompt_logprobs=entries))

    ask = pair.ask(WANTED)
    if not wants_any:
        ask.compute.params.ClearField("prompt_logprobs")
    with pytest.raises(TransferError, match=match):
        await run(pair, pair.hand_off(WANTED, ask), act)
