"""Both pools as one ingress process sees them: a session to every decode worker, and the load
reports and cache events of all of them."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from cluster.membership import Replicas
from cluster.published import read_metadata
from cluster.session import SessionBackend
from protos.rpc import Plane
from protos.worker_pb2 import CacheFormat, WorkerDescription
from router.router import Router
from router.subscriber import WorkerFeed
from router.workers import CacheShape, Leg, Load, Worker

logger = logging.getLogger("kvrelay.pools")


@dataclass(slots=True, eq=False)
class Member:
    """A worker with all that this process keeps open to it."""

    leg: Leg
    worker: Worker
    feed: WorkerFeed
    close_channel: Callable[[], Coroutine[Any, Any, None]]
    session: SessionBackend | None = None  # of a decode worker

    @property
    def is_idle(self) -> bool:
        return self.session is None or self.session.num_open == 0

    @property
    def takes_requests(self) -> bool:
        return self.session is None or (self.session.is_open and not self.session.leaving)


class Pools:
    """Tells the router who is there and what they say of themselves. Used on one event loop.

    `on_change` is called when a worker came, went, or said something.
    """

    def __init__(self, plane: Plane, release: str, router: Router) -> None:
        self.router = router
        self._plane = plane
        self._release = release
        self.cache: CacheFormat | None = None  # of the first decode worker that answers
        self._fingerprint = ""  # its
        self._members: dict[Leg, dict[str, Member]] = {leg: {} for leg in Leg}
        self._gone: set[Member] = set()  # out of the routing, with requests under way
        self._changed = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()
        self.on_change: Callable[[], None] = lambda: None

    def update(self, leg: Leg, replicas: Replicas) -> None:
        """Who is not named any more gets nothing new; what it has under way goes on. It may be
        named again: Serve leaves out a replica for the moment in which it changes its settings."""
        members = self._members[leg]
        for replica in members.keys() - replicas.keys():
            member = members.pop(replica)
            logger.info("%s %s is leaving", leg, member.worker.address)
            self.router.leave(leg, member.worker)
            self._gone.add(member)
        for replica in replicas.keys() - members.keys():
            published = read_metadata(replicas[replica])
            if published is not None and published.release == self._release:
                logger.info("%s %s has come", leg, published.worker.address)
                came = self._take_back(leg, published.worker)
                members[replica] = came or self._join(leg, published.worker)
        self._notice()

    def usable(self, leg: Leg) -> list[Worker]:
        """Who takes requests now: those with our weights that answer."""
        return list(self._usable(leg))

    def has_decode(self, without: Collection[Worker] = ()) -> bool:
        return any(worker not in without for worker in self._usable(Leg.DECODE))

    def names_decode(self, without: Collection[Worker] = ()) -> bool:
        """Whether Serve names one with our weights, though it may not answer now."""
        named = (one.worker for one in self._members[Leg.DECODE].values())
        return any(one.fingerprint == self._fingerprint and one not in without for one in named)

    def problem(self) -> str | None:
        """Why this process should be replaced: all decode workers that are left have other weights
        than those that it has told its clients of."""
        if not self._fingerprint or self._gone or self.names_decode():
            return None
        members = self._members[Leg.DECODE].values()
        others = [one.worker.address for one in members if one.takes_requests]
        return f"{', '.join(others)}: other weights than it began with" if others else None

    def missing(self, without: Collection[Worker] = (), may_stay: bool = True) -> Leg | None:
        """The pool of which nobody is there and somebody has to be. `may_stay`: a decode worker
        may compute the prompt, where the router's own says so too."""
        if not self.has_decode(without):
            return Leg.DECODE
        may_stay = may_stay and self.router.config.may_stay
        return None if may_stay or any(self._usable(Leg.PREFILL)) else Leg.PREFILL

    def staying(self) -> set[SessionBackend]:
        """Of the usable decode workers, those that keep what they have."""
        sessions = map(self.session_of, self.usable(Leg.DECODE))
        return {one for one in sessions if one is not None and not one.is_left}

    def to_be_moved(self) -> list[SessionBackend]:
        """Those with requests which their workers want taken elsewhere."""
        members = *self._members[Leg.DECODE].values(), *self._gone
        sessions = (one.session for one in members if not one.is_idle)
        return [one for one in sessions if one is not None and one.wants_move]

    def session_of(self, worker: Worker) -> SessionBackend | None:
        """Also of one that is out of the routing and has requests still."""
        for member in (*self._members[Leg.DECODE].values(), *self._gone):
            if member.worker == worker:
                return member.session
        return None

    async def first_description(self) -> WorkerDescription:
        """Waits for a decode worker; from here on only workers with its weights are used."""
        while True:
            for member in self._members[Leg.DECODE].values():
                if member.session is not None and member.session.description is not None:
                    if not self._fingerprint:
                        self._choose(member.worker, member.session.description)
                    return member.session.description
            await self._changed.wait()

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

    def _usable(self, leg: Leg) -> Iterator[Worker]:
        return self.router.usable(leg, time.monotonic())

    def _take_back(self, leg: Leg, worker: Worker) -> Member | None:
        """One that has requests under way and has been let go of by nobody yet."""
        for member in self._gone:
            if member.leg is leg and member.worker == worker:
                self._gone.discard(member)
                self._route_to(member)
                return member
        return None

    def _join(self, leg: Leg, worker: Worker) -> Member:
        channel = self._plane.channel(worker.address)

        def note(load: Load) -> None:
            self.router.note(leg, worker, load)
            self._notice()

        feed = WorkerFeed(worker.address, channel, note, incarnation=worker.incarnation)
        member = Member(leg, worker, feed, channel.close)
        if leg is Leg.DECODE:
            member.session = SessionBackend(
                worker.address,
                self._plane,
                worker.fingerprint,
                changed=lambda: self._session_changed(member),
            )
            member.session.open()
        self._route_to(member)
        return member

    def _choose(self, worker: Worker, description: WorkerDescription) -> None:
        self._fingerprint = worker.fingerprint
        self.cache = description.format
        self.router.set_shape(cache_shape(description.format))
        for members in self._members.values():
            for member in members.values():
                self._route_to(member)
        self._notice()

    def _route_to(self, member: Member) -> None:
        """Once the weights are known that all of ours have."""
        if not self._fingerprint:
            return
        if member.worker.fingerprint != self._fingerprint:
            told = member.leg, member.worker.address
            logger.warning("%s %s has other weights than are served, and gets no requests", *told)
            return
        self.router.add(member.leg, member.worker)
        self.router.reach(member.leg, member.worker, member.takes_requests)
        member.feed.follow(self.router.index.of(member.worker))

    def _session_changed(self, member: Member) -> None:
        self.router.reach(member.leg, member.worker, member.takes_requests)
        self._notice()

    def _notice(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self.check_gone()
        self.on_change()

    def _close(self, member: Member) -> None:
        self.router.remove(member.leg, member.worker)
        task = asyncio.create_task(_close(member))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def cache_shape(cache: CacheFormat) -> CacheShape:
    """The full-attention group is followed, or else the one that looks back the farthest."""

    def reach(group: int) -> float:
        return cache.groups[group].window if cache.groups[group].HasField("window") else math.inf

    followed = max(range(len(cache.groups)), key=reach)
    one = cache.groups[followed]
    return CacheShape(
        cache.block_size,
        sum(group.blob_bytes for group in cache.groups),
        followed,
        one.window if one.HasField("window") else None,
    )


async def _close(member: Member) -> None:
    await member.feed.close()
    if member.session is not None:
        await member.session.stop()
    await member.close_channel()
