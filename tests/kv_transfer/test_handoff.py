"""Holder and puller over a real gRPC stream, with prompts and reads under the test's hand."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from kv_cache.handover import HeldRange
from kv_transfer import holder
from kv_transfer.errors import LinkLost, Refused, TransferError
from kv_transfer.faults import Faults
from kv_transfer.holder import Context, Holder, HolderConfig
from kv_transfer.link import Link
from kv_transfer.probe import LinkFigures
from kv_transfer.puller import HandOff, Pulled, PullerConfig
from kv_transfer.source import ReadyEnd
from protos.generation_pb2 import Failure, SamplingParams, TokenLogprobs
from protos.handoff_pb2 import (
    Ask,
    BlockRun,
    Chunk,
    Commit,
    Compute,
    Finished,
    FirstToken,
    HolderMessage,
    PullerMessage,
    Verdict,
    Waiting,
)
from protos.handoff_pb2_grpc import HandOffServicer, add_HandOffServicer_to_server
from protos.rpc import PROTOCOL, Plane
from protos.worker_pb2 import WorkerDescription
from tests.kv_transfer.fakes import BLOCK, FakePeerPool, FakeSource, Memory, chunk, target
from tests.kv_transfer.serving import serving

HOLDER, PULLER = 11, 22
FIGURES = LinkFigures(0.0, 1.0)
END = ReadyEnd([FirstToken(token_id=5, logprobs=TokenLogprobs(token_id=5, logprob=-0.5))], 3)


class Pair:
    """A holder behind a port, and a puller's link to it."""

    def __init__(self, faults: str = "", puller_faults: str = "") -> None:
        self.source = FakeSource()
        self.ours, self.theirs = Memory(32), Memory(32)
        self.theirs.blocks = [100 + i for i in range(32)]
        self.holder = Holder(
            HolderConfig(HOLDER, max_leases=2),
            self.source,
            self.theirs.checksum,
            Faults(faults),
        )
        self.puller_faults = Faults(puller_faults)
        self.plane = Plane()
        self.pool = FakePeerPool(self.ours, self.theirs)

    async def start(self) -> None:
        self.server = self.plane.server()
        add_HandOffServicer_to_server(self.holder, self.server)
        self.address = self.plane.listen(self.server, "127.0.0.1:0")
        await self.server.start()
        self.channel = self.plane.channel(self.address)
        description = WorkerDescription(incarnation=HOLDER)
        self.link = Link(self.address, self.channel, description, "fake", self.pool, FIGURES)

    async def stop(self) -> None:
        await self.channel.close()
        await self.server.stop(0)

    def by_hand(self) -> None:
        self.pool = self.link.pool = FakePeerPool(self.ours, self.theirs, by_hand=True)

    def ask(self, wanted: HeldRange, **changes: object) -> Ask:
        ask = Ask(
            protocol=PROTOCOL,
            handoff_id="h",
            holder_incarnation=HOLDER,
            puller_incarnation=PULLER,
            token_ids=range(wanted.end),
            first_token=wanted.start,
            compute=Compute(params=SamplingParams(seed=7), draw=True),
        )
        for name, value in changes.items():
            setattr(ask, name, value)
        return ask

    def hand_off(self, wanted: HeldRange, ask: Ask | None = None, **options: float) -> HandOff:
        return HandOff(
            PullerConfig(BLOCK, **options),
            self.link,
            ask or self.ask(wanted),
            wanted,
            self.ours.checksum,
            self.puller_faults,
        )

    async def idle(self) -> None:
        """Until the holder has let go of every lease."""
        async with asyncio.timeout(30):
            while self.holder.num_leases:
                await asyncio.sleep(0)

    def check_all_dropped(self, *blocks: int) -> None:
        assert sorted(b for hold in self.source.dropped for b in hold.blocks) == sorted(blocks)
        assert all(stream.closed for stream in self.source.streams)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    await pair.start()
    yield pair
    await pair.stop()


async def run(pair: Pair, hand_off: HandOff, act: Callable[[], Awaitable[None]]) -> Pulled:
    """The hand-off beside what the holder's engine does."""
    pulling = asyncio.ensure_future(hand_off.run())
    async with asyncio.timeout(30):
        await pair.source.asked.wait()
        await act()
        return await pulling


WANTED = target(8, 28, [3, 4, 5])
CHUNKS = [chunk(8, 16, [21]), chunk(16, 28, [22, 23])]


async def test_blocks_tokens_and_verdict_arrive(pair: Pair) -> None:
    async def act() -> None:
        pair.source.streams[0].put(*CHUNKS, END)

    pulled = await run(pair, pair.hand_off(WANTED), act)
    assert pair.ours.blocks[3:6] == [121, 122, 123]
    assert (pulled.end, list(pulled.tokens), pulled.num_cached_tokens) == (28, list(END.tokens), 3)
    await pair.idle()
    pair.check_all_dropped(21, 22, 23)


async def test_nothing_is_let_go_of_before_every_byte_is_there(pair: Pair) -> None:
    pair.by_hand()

    async def act() -> None:
        pair.source.streams[0].put(*CHUNKS, END)
        while len(pair.pool.reads) < 2:
            await asyncio.sleep(0)
        assert hand_off.backlog == pair.pool.reads
        pair.pool.reads[1].finish()
        await asyncio.sleep(0.1)
        assert hand_off.backlog == pair.pool.reads[:1]
        assert pair.source.dropped == []
        pair.pool.reads[0].finish()

    hand_off = pair.hand_off(WANTED)
    await run(pair, hand_off, act)
    assert hand_off.backlog == []
    await pair.idle()
    pair.check_all_dropped(21, 22, 23)


async def test_a_puller_that_leaves_frees_the_holder(pair: Pair) -> None:
    pair.by_hand()
    hand_off = pair.hand_off(WANTED)
    pulling = asyncio.ensure_future(hand_off.run())
    await pair.source.asked.wait()
    pair.source.streams[0].put(CHUNKS[0])
    while not pair.pool.reads:
        await asyncio.sleep(0)
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    assert not pair.pool.reads[0].wanted
    (left,) = await hand_off.unfinished()
    assert (left.group, left.blocks) == (0, (3,))
    pair.pool.reads[0].fail()
    assert await hand_off.unfinished() == []
    await pair.idle()
    pair.check_all_dropped(21)


async def test_a_failed_read_fails_the_hand_off(pair: Pair) -> None:
    pair.by_hand()

    async def act() -> None:
        pair.source.streams[0].put(*CHUNKS, END)
        while len(pair.pool.reads) < 2:
            await asyncio.sleep(0)
        pair.pool.reads[0].fail()

    hand_off = pair.hand_off(WANTED)
    with pytest.raises(TransferError, match="wire was cut"):
        await run(pair, hand_off, act)
    (left,) = await hand_off.unfinished()
    assert left.blocks == (4, 5)
    await pair.idle()
    pair.check_all_dropped(21, 22, 23)


async def fail_first_read(pair: Pair, error: TransferError) -> None:
    pair.by_hand()

    async def act() -> None:
        pair.source.streams[0].put(*CHUNKS, END)
        while len(pair.pool.reads) < 2:
            await asyncio.sleep(0)
        pair.pool.reads[0].fail(error)

    with pytest.raises(type(error), match=str(error)):
        await run(pair, pair.hand_off(WANTED), act)


async def test_a_read_over_a_broken_connection_loses_the_link(pair: Pair) -> None:
    """Its own stream and the load reports may live on for ever."""
    await fail_first_read(pair, LinkLost("the peer is gone"))
    assert "the peer is gone" in (pair.link.lost or "")
    assert pair.pool.disconnected
    with pytest.raises(TransferError, match="is lost"):
        await pair.hand_off(WANTED).run()


async def test_a_read_that_fails_otherwise_leaves_the_link(pair: Pair) -> None:
    await fail_first_read(pair, TransferError("out of range"))
    assert pair.link.lost is None


async def test_a_damaged_block_is_noticed(pair: Pair) -> None:
    pair.by_hand()

    async def act() -> None:
        pair.source.streams[0].put(*CHUNKS, END)
        while len(pair.pool.reads) < 2:
            await asyncio.sleep(0)
        pair.theirs.blocks[22] = -1
        for read in pair.pool.reads:
            read.finish()

    with pytest.raises(TransferError, match="block 4 of group 0 arrived damaged"):
        await run(pair, pair.hand_off(WANTED), act)


async def test_the_holders_refusal_is_the_pullers_error(pair: Pair) -> None:
    async def act() -> None:
        failure = Failure(kind=Failure.KIND_INVALID, field="prompt", message="too long")
        pair.source.streams[0].put(Refused(failure))

    with pytest.raises(Refused, match="prompt: too long") as refused:
        await run(pair, pair.hand_off(WANTED), act)
    assert not refused.value.retryable


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


async def test_a_lease_released_early_is_not_confirmed() -> None:
    pair = Pair(faults="holder.commit=release")
    await pair.start()

    async def act() -> None:
        pair.source.streams[0].put(*CHUNKS, END)

    with pytest.raises(TransferError, match="let go too early"):
        await run(pair, pair.hand_off(WANTED), act)
    await pair.stop()


async def test_a_holder_that_computed_too_little_is_not_believed(pair: Pair) -> None:
    async def act() -> None:
        pair.source.streams[0].put(CHUNKS[0], END)

    with pytest.raises(TransferError, match="only a part"):
        await run(pair, pair.hand_off(WANTED), act)


async def test_more_logprobs_than_a_message_holds_come_in_order(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holder, "MAX_LOGPROBS", 10)
    entries = [TokenLogprobs(token_id=i) for i in range(27)]

    async def act() -> None:
        first = CHUNKS[0]._replace(prompt_logprobs=entries)
        pair.source.streams[0].put(first, CHUNKS[1], END)

    pulled = await run(pair, pair.hand_off(WANTED), act)
    assert list(pulled.prompt_logprobs) == entries


async def test_more_logprobs_than_the_prompt_has_tokens_are_not_kept(pair: Pair) -> None:
    async def act() -> None:
        entries = [TokenLogprobs(token_id=1)] * (WANTED.end + 1)
        pair.source.streams[0].put(CHUNKS[0]._replace(prompt_logprobs=entries))

    with pytest.raises(TransferError, match="more prompt logprobs"):
        await run(pair, pair.hand_off(WANTED), act)


async def test_what_is_only_handed_out_may_be_less_than_wanted(pair: Pair) -> None:
    async def act() -> None:
        pair.source.streams[0].put(CHUNKS[0], ReadyEnd([], 16))

    ask = pair.ask(WANTED)
    ask.ClearField("compute")
    pulled = await run(pair, pair.hand_off(WANTED, ask), act)
    assert (pulled.end, list(pulled.tokens)) == (16, [])


async def test_an_engine_that_is_stuck_is_left(pair: Pair) -> None:
    pair.source.predict_s = lambda: 0.1  # type: ignore[method-assign]

    async def act() -> None:
        pass

    with pytest.raises(TransferError, match="stuck"):
        await run(pair, pair.hand_off(WANTED, stuck_after_s=0.7), act)
    await pair.idle()


async def test_a_dead_holder_loses_the_link(pair: Pair) -> None:
    async def act() -> None:
        await pair.server.stop(0)

    with pytest.raises(LinkLost, match="stream broke"):
        await run(pair, pair.hand_off(WANTED), act)
    assert pair.link.lost
    assert pair.pool.disconnected


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


async def committed_early(pair: Pair) -> AsyncIterator[HolderMessage]:
    """What a puller hears that has read all before anything is drawn."""
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
        elif kind == "waiting" and not ends:
            assert pair.source.dropped == [], "held while the tokens are drawn"
            prompt.put(END)
        else:
            yield message


async def test_a_puller_that_has_read_all_gets_the_verdict_with_the_tokens(pair: Pair) -> None:
    heard = [message async for message in committed_early(pair)]
    assert [m.finished.verdict.held for m in heard if m.HasField("finished")] == [True]
    assert not any(m.HasField("verdict") for m in heard)
    await pair.idle()
    pair.check_all_dropped(21, 22, 23)


async def test_what_is_let_go_of_after_an_early_commit_is_not_confirmed() -> None:
    pair = Pair(faults="holder.finished=release")
    await pair.start()
    heard = [message async for message in committed_early(pair)]
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
