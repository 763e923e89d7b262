"""Both pools as one ingress process sees them: a session to every decode worker, load reports
of all of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from cluster.membership import Replicas
from cluster.metrics.targets import KEY as METRICS
from cluster.session import SessionBackend
from protos.rpc import Plane
from protos.worker_pb2 import WorkerDescription
from router.least_loaded import for_decode, for_prefill
from router.subscriber import LoadFeed
from router.workers import Leg, Load, Standing, Worker

logger = logging.getLogger("kvrelay.pools")


@dataclass(slots=True, eq=False)
class Member:
    """A worker with all that this process keeps open to it."""

    standing: Standing
    feed: LoadFeed
    close_channel: Callable[[], Coroutine[Any, Any, None]]
    session: SessionBackend | None = None  # of a decode worker

    @property
    def is_idle(self) -> bool:
        return self.session is None or self.session.num_open == 0


class Pools:
    """Used on one event loop. `moved` is called with a session whose worker wants its requests
    taken elsewhere."""

    def __init__(self, plane: Plane, release: str) -> None:
        self._plane = plane
        self._release = release
        self._fingerprint = ""  # of the first decode worker that answers
        self._members: dict[Leg, dict[str, Member]] = {leg: {} for leg in Leg}
        self._gone: set[Member] = set()  # out of the routing, with requests under way
        self._changed = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()
        self.on_move: Callable[[SessionBackend], None] = lambda session: None

    def update(self, leg: Leg, replicas: Replicas) -> None:
        """Who is not named any more gets nothing new; what it has under way goes on."""
        members = self._members[leg]
        for replica in members.keys() - replicas.keys():
            member = members.pop(replica)
            member.standing.leaving = True
            logger.info("%s %s is leaving", leg, member.standing.worker.address)
            self._gone.add(member)
        for replica in replicas.keys() - members.keys():
            published = read_metadata(replicas[replica])
            if published is not None and published.release == self._release:
                logger.info("%s %s has come", leg, published.worker.address)
                members[replica] = self._join(leg, published.worker)
        self._notice()

    def best_decode(self, without: Collection[SessionBackend] = ()) -> Member | None:
        """Whose session is open, who reports, and who has the least to do."""
        usable = {id(one.standing): one for one in self._decode() if one.session not in without}
        ranked = for_decode((one.standing for one in usable.values()), time.monotonic())
        return usable[id(ranked[0])] if ranked else None

    def usable_decode_addresses(self) -> list[str]:
        standings = (one.standing for one in self._decode())
        return [one.worker.address for one in for_decode(standings, time.monotonic())]

    def _decode(self) -> Iterator[Member]:
        for member in self._members[Leg.DECODE].values():
            session, worker = member.session, member.standing.worker
            if session is None or worker.fingerprint != self._fingerprint:
                continue
            if session.is_open and not session.leaving:
                yield member

    def prefill_candidates(self) -> list[Standing]:
        standings = (member.standing for member in self._members[Leg.PREFILL].values())
        return for_prefill(standings, self._fingerprint, time.monotonic())

    async def first_description(self) -> WorkerDescription:
        """Waits for a decode worker; from here on only workers with its weights are used."""
        while True:
            for member in self._members[Leg.DECODE].values():
                if member.session is not None and member.session.description is not None:
                    self._fingerprint = member.standing.worker.fingerprint
                    return member.session.description
            await self._changed.wait()

    async def wait_for_change(self, timeout_s: float) -> None:
        """Returns early when a worker comes, goes, or says something of itself."""
        changed = self._changed
        try:
            async with asyncio.timeout(timeout_s):
                await changed.wait()
        except TimeoutError:
            pass

    def check_gone(self) -> None:
        """Lets go of those that have nothing of ours any more."""
        for member in [one for one in self._gone if one.is_idle]:
            self._gone.discard(member)
            self._close(member)

    async def close(self) -> None:
        for members in self._members.values():
            self._gone.update(members.values())
            members.clear()
        for member in self._gone:
            self._close(member)
        self._gone.clear()
        while self._closing:
            await asyncio.wait(self._closing)

    def _join(self, leg: Leg, worker: Worker) -> Member:
        channel = self._plane.channel(worker.address)
        standing = Standing(worker)

        def note(load: Load) -> None:
            standing.load = load
            self._notice()

        member = Member(standing, LoadFeed(channel, note), channel.close)
        if leg is Leg.DECODE:
            member.session = SessionBackend(
                worker.address,
                self._plane,
                worker.fingerprint,
                changed=lambda: self._session_changed(member),
            )
            member.session.open()
        return member

    def _session_changed(self, member: Member) -> None:
        self._notice()
        if member.session is not None and member.session.wants_move:
            self.on_move(member.session)

    def _notice(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self.check_gone()

    def _close(self, member: Member) -> None:
        task = asyncio.create_task(_close(member))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class Published(NamedTuple):
    worker: Worker
    release: str


def read_metadata(metadata: Mapping[str, Any]) -> Published | None:
    """None for a replica that has not said who it is."""
    try:
        incarnation = int(metadata["incarnation"], 16)
        worker = Worker(metadata["address"], incarnation, metadata["fingerprint"])
        return Published(worker, metadata["release"])
    except (KeyError, TypeError, ValueError):
        return None


def metadata_of(worker: Worker, release: str, metrics: str = "") -> dict[str, str]:
    """What `read_metadata` reads, and where its metrics are; of simple types, since Serve carries
    it as JSON."""
    return {
        "address": worker.address,
        "incarnation": f"{worker.incarnation:x}",
        "fingerprint": worker.fingerprint,
        "release": release,
        METRICS: metrics,
    }


async def _close(member: Member) -> None:
    await member.feed.close()
    if member.session is not None:
        await member.session.stop()
    await member.close_channel()
