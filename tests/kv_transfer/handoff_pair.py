"""A holder behind a port and a puller's link to it; a test plays prompts and reads by hand."""

import asyncio
from collections.abc import Awaitable, Callable

from kv_cache.handover import HeldRange
from kv_transfer.faults import Faults
from kv_transfer.holder import Holder, HolderConfig
from kv_transfer.link import Link
from kv_transfer.probe import LinkFigures
from kv_transfer.puller import HandOff, Pulled, PullerConfig
from kv_transfer.source import ReadyEnd
from kv_transfer.tally import PullTally
from protos.generation_pb2 import SamplingParams, TokenLogprobs
from protos.handoff_pb2 import Ask, Compute, FirstToken
from protos.handoff_pb2_grpc import add_HandOffServicer_to_server
from protos.rpc import PROTOCOL, Plane
from protos.worker_pb2 import WorkerDescription
from tests.kv_transfer.fakes import BLOCK, FakePeerPool, FakeSource, Memory, chunk, target

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
        self.tally = PullTally()  # of what is pulled

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
            compute=Compute(params=SamplingParams(seed=7, prompt_logprobs=1), draw=True),
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
            tally=self.tally,
        )

    async def idle(self) -> None:
        """Until the holder has let go of every lease."""
        async with asyncio.timeout(30):
            while self.holder.num_leases:
                await asyncio.sleep(0)

    def check_all_dropped(self, *blocks: int) -> None:
        assert sorted(b for hold in self.source.dropped for b in hold.blocks) == sorted(blocks)
        assert all(stream.closed for stream in self.source.streams)


async def run(pair: Pair, hand_off: HandOff, act: Callable[[], Awaitable[None]]) -> Pulled:
    """The hand-off beside what the holder's engine does."""
    pulling = asyncio.ensure_future(hand_off.run())
    async with asyncio.timeout(30):
        await pair.source.asked.wait()
        await act()
        return await pulling


WANTED = target(8, 28, [3, 4, 5])
CHUNKS = [chunk(8, 16, [21]), chunk(16, 28, [22, 23])]
