"""Holder and puller over a real gRPC stream: what arrives, and what fails a hand-off."""

import asyncio

import pytest

from kv_transfer import holder, link
from kv_transfer.errors import LinkLost, TransferError
from kv_transfer.link import Link
from kv_transfer.probe import LinkFigures
from kv_transfer.pull import PullState
from kv_transfer.source import ReadyEnd
from kv_transfer.tally import CANCELLED, FAILED, HolderTally
from protos.generation_pb2 import TokenLogprobs
from tests.kv_transfer.fakes import FakePeerPool, Memory, chunk
from tests.kv_transfer.handoff_pair import CHUNKS, END, WANTED, Pair, run


async def test_blocks_tokens_and_verdict_arrive(pair: Pair) -> None:
    async def act() -> None:
        pair.source.streams[0].put(*CHUNKS, END)

    pulled = await run(pair, pair.hand_off(WANTED), act)
    assert pair.ours.blocks[3:6] == [121, 122, 123]
    assert (pulled.end, list(pulled.tokens), pulled.num_cached_tokens) == (28, list(END.tokens), 3)
    await pair.idle()
    pair.check_all_dropped(21, 22, 23)
    assert pair.holder.tally == HolderTally(num_leases=1, num_commits=1)


async def test_nothing_is_let_go_of_before_every_byte_is_there(pair: Pair) -> None:
    pair.by_hand()

    async def act() -> None:
        pair.source.streams[0].put(*CHUNKS, END)
        while len(pair.pool.reads) < 2:
            await asyncio.sleep(0)
        assert hand_off.backlog == pair.pool.reads
        pair.pool.reads[1].finish()
        await another()  # as many messages as this one has left, and they begin later
        assert hand_off.backlog == pair.pool.reads[:1]
        assert dropped() == [24, 25, 26]
        pair.pool.reads[0].finish()

    async def another() -> None:
        other = asyncio.ensure_future(pair.hand_off(WANTED, pair.ask(WANTED, handoff_id="o")).run())
        while len(pair.source.streams) < 2:
            await asyncio.sleep(0)
        pair.source.streams[1].put(chunk(8, 16, [24]), chunk(16, 28, [25, 26]), END)
        while len(pair.pool.reads) < 4:
            await asyncio.sleep(0)
        for read in pair.pool.reads[2:]:
            read.finish()
        await other
        while 24 not in dropped():
            await asyncio.sleep(0)

    def dropped() -> list[int]:
        return sorted(block for hold in pair.source.dropped for block in hold.blocks)

    hand_off = pair.hand_off(WANTED)
    await run(pair, hand_off, act)
    assert hand_off.backlog == []
    await pair.idle()
    pair.check_all_dropped(*range(21, 27))


async def test_bytes_are_hidden_up_to_the_prompts_end(pair: Pair) -> None:
    pair.by_hand()

    async def act() -> None:
        pair.source.streams[0].put(CHUNKS[0])
        while not pair.pool.reads:
            await asyncio.sleep(0)
        pair.pool.reads[0].finish()
        while hand_off.backlog:
            await asyncio.sleep(0)
        pair.source.streams[0].put(CHUNKS[1], END)
        while hand_off._pull.state is not PullState.ARRIVING:
            await asyncio.sleep(0)
        pair.pool.reads[1].finish()

    hand_off = pair.hand_off(WANTED)
    await run(pair, hand_off, act)
    first, second = (read.num_bytes for read in pair.pool.reads)
    assert (pair.tally.num_hidden_bytes, pair.tally.num_bytes) == (first, first + second)


async def test_a_stream_that_ends_before_it_is_asked_is_a_failure(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = pair.link.open_handoff()
    call.cancel()
    monkeypatch.setattr(pair.link, "open_handoff", lambda: call)
    with pytest.raises(TransferError, match="the holder's stream has ended"):
        await pair.hand_off(WANTED).run()
    assert pair.tally.ends == {FAILED: 1}


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
    assert pair.tally.ends == {CANCELLED: 1}
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


async def test_a_read_that_hangs_loses_the_link(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a hand-off without a deadline, whose holder lives and has said all."""
    monkeypatch.setattr(link, "READ_PATIENCE_S", 0.1)
    pair.by_hand()
    pair.link.figures = LinkFigures(0.0, 1e9)

    async def act() -> None:
        pair.source.streams[0].put(*CHUNKS, END)
        while not pair.pool.reads:
            await asyncio.sleep(0)
        pair.pool.reads[0].finish()  # at once: it has no more time than the one that hangs

    hand_off = pair.hand_off(WANTED)
    with pytest.raises(LinkLost, match="did not end in time"):
        await run(pair, hand_off, act)
    assert "did not end" in (pair.link.lost or "")
    (left,) = await hand_off.unfinished()
    assert left.blocks == (4, 5)
    assert not pair.pool.reads[1].wanted
    await pair.idle()
    pair.check_all_dropped(21, 22, 23)


async def test_a_read_has_the_time_of_all_that_are_under_way(pair: Pair) -> None:
    def patience_s() -> float:
        return pair.link.patience_s - link.READ_PATIENCE_S

    pair.by_hand()
    pair.link.figures = LinkFigures(0.0, 2.0)
    pair.link.begin_read(0, [1, 2], [1, 2])
    assert patience_s() == 3 * 1.0, "two bytes at two a second"
    pair.link.begin_read(0, [3, 4], [3, 4])
    first, second = pair.pool.reads
    second.finish()
    await asyncio.sleep(0)
    assert patience_s() == 3 * 2.0, "the first one waited for the second one's turns"
    first.finish()
    await asyncio.sleep(0)
    pair.link.begin_read(0, [5], [5])
    assert patience_s() == 3 * 0.5


async def test_a_read_that_began_another_way_is_no_quicker_for_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does its end say anything of the way that the others take."""
    monkeypatch.setattr(link, "TELLING_BYTES", 1)
    pair.by_hand()
    pair.link.figures = slow = LinkFigures(0.0, 0.5)
    fast = LinkFigures(0.0, 2.0**40)
    pair.link.begin_read(0, [1, 2], [1, 2])
    patience_s = pair.link.patience_s
    pair.link.read_by("fast", FakePeerPool(Memory(8), Memory(8)), fast)
    assert pair.link.patience_s == patience_s
    pair.pool.reads[0].finish()
    await asyncio.sleep(0)
    assert slow.bytes_per_s != 0.5
    assert fast.bytes_per_s == 2.0**40
    assert pair.link.patience_s == link.READ_PATIENCE_S


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


async def test_reads_that_share_a_link_say_how_fast_it_is(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(link, "time", clock)
    monkeypatch.setattr(link, "TELLING_BYTES", 2)
    shared = Link("", pair.channel, pair.link.description, "fake", pair.pool, LinkFigures(0.0, 5.0))
    pair.by_hand()
    shared.pool = pair.pool

    async def end(number: int) -> float:
        pair.pool.reads[number].finish()
        await asyncio.sleep(0)
        return shared.figures.bytes_per_s

    clock.now += 7.0  # idle
    shared.begin_read(0, range(1, 11), range(1, 11))
    clock.now += 1.0
    for _ in range(4):
        shared.begin_read(0, range(11, 17), range(11, 17))  # six bytes, of 24
    clock.now += 5.0
    assert await end(1) == pytest.approx(5 + link.SMOOTHING * (6 / 1.0 - 5))
    before = shared.figures.bytes_per_s
    pair.pool.reads[2].fail()
    await asyncio.sleep(0)
    clock.now += 3.0
    assert await end(0) == pytest.approx(before + link.SMOOTHING * (10 / (1 + 1 + 1) - before))


async def test_a_read_that_others_hold_up_does_not_hang(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were begun after it, and take turns with it."""
    monkeypatch.setattr(link, "READ_PATIENCE_S", 0.2)
    pair.by_hand()
    pair.link.figures = LinkFigures(0.0, 100.0)

    async def act() -> None:
        pair.source.streams[0].put(*CHUNKS, END)
        while len(pair.pool.reads) < 2:
            await asyncio.sleep(0)
        for _ in range(100):
            pair.link.begin_read(0, range(10, 20), range(10, 20))  # half a minute's bytes
        await asyncio.sleep(0.5)
        for read in pair.pool.reads:
            read.finish()

    await run(pair, pair.hand_off(WANTED), act)
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


async def test_what_is_only_handed_out_may_be_less_than_wanted(pair: Pair) -> None:
    async def act() -> None:
        pair.source.streams[0].put(CHUNKS[0], ReadyEnd([], 16))

    ask = pair.ask(WANTED)
    ask.ClearField("compute")
    pulled = await run(pair, pair.hand_off(WANTED, ask), act)
    assert (pulled.end, list(pulled.tokens)) == (16, [])


async def test_an_engine_that_is_stuck_is_left(pair: Pair) -> None:
    pair.source.next_turn = lambda: 7  # type: ignore[method-assign]

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
