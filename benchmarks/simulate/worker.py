"""What prefill and decode workers have in common: a cache, a voice, and prefixes from others."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.simulate.clock import Clock
from benchmarks.simulate.device import Device
from benchmarks.simulate.network import Network
from kv_cache.cache import KvCache
from kv_cache.config import CacheConfig, blocks_of
from kv_cache.layout import KvGroup
from kv_cache.names import BlockName
from kv_cache.sequence import SequenceBlocks
from router.workers import Leg, Load, StepCosts, Worker

if TYPE_CHECKING:
    from benchmarks.simulate.feed import Feed

# Of any model: the caches here have no bytes.
_GROUP = KvGroup(layers=(0,), num_kv_heads=1, widths=(8, 8))


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """`step_tokens`: the most in one step; None computes one whole prompt in each step. One that
    does not cache names no block."""

    step_tokens: int | None
    max_sequences: int
    num_blocks: int
    costs: StepCosts  # as it reports them
    caches: bool = True


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all workers of a run share."""

    clock: Clock
    device: Device
    network: Network
    feed: "Feed"


class SimulatedWorker(ABC):
    """Computes nothing and holds no bytes; its cache and what it gives up are the real ones.

    A dead one does nothing any more, and nobody is told but by the front.
    """

    leg: Leg

    def __init__(self, around: Surroundings, identity: Worker, limits: WorkerLimits) -> None:
        self.identity = identity
        self.limits = limits
        self.alive = True
        self.known_dead = False
        self.busy_s = 0.0
        self.num_steps = 0
        self.num_fetching = 0
        self.born_at = around.clock.now
        self.died_at: float | None = None
        self.cache = KvCache(
            CacheConfig(
                groups=(_GROUP,),
                num_blocks=(limits.num_blocks + 1,),
                block_size=around.device.block_tokens,
                max_chunk_tokens=1 << 30,
                incarnation=identity.incarnation,
                max_events=4096,
            )
        )
        self._around = around
        self._clock = around.clock
        self._device = around.device
        self._told = 0  # number of the last batch of events

    @abstractmethod
    def load(self) -> Load:
        """What it would say of itself now; the time is the listener's to fill in."""

    def die(self) -> None:
        self.alive = False
        self.died_at = self._clock.now

    @abstractmethod
    def look_for_room(self) -> None:
        """Blocks were given back: what waits for some may begin."""

    def check_idle(self) -> None:
        """Asserts that nothing is left of any request."""
        self.cache.check_integrity([])

    @property
    def num_free_tokens(self) -> int:
        group = self.cache.stats().groups[0]
        return (group.free + group.cached) * self._device.block_tokens

    def _tell(self) -> None:
        """The events of the step go out, and the load where it is known at once."""
        latest = self.cache.events.flush()
        if latest != self._told:
            batches = self.cache.events.since(self._told)
            assert isinstance(batches, list), "a step had more events than are kept"
            self._told = latest
            self._around.feed.batches(self, batches)
        self._around.feed.changed(self)

    def _open(
        self, names: Sequence[BlockName], num_tokens: int, spare_blocks: int = 0
    ) -> SequenceBlocks | None:
        """Room for all of a prompt and so many blocks more, its hit included; None: not now."""
        match = self.cache.match(names if self.limits.caches else (), num_tokens)
        if not self.cache.fits(match, num_tokens):
            return None
        blocks = self.cache.open(match)
        whole = blocks_of(num_tokens, self._device.block_tokens) + spare_blocks
        grown = self.cache.extend(blocks, whole * self._device.block_tokens)
        assert grown is not None, "what fits has no room"
        return blocks

    def num_cached(self, names: Sequence[BlockName], num_tokens: int) -> int:
        """Tokens of a prompt that need not be computed here."""
        return self.cache.match(names if self.limits.caches else (), num_tokens).num_tokens

    def _advance(
        self, blocks: SequenceBlocks, names: Sequence[BlockName], num_computed: int
    ) -> None:
        self.cache.advance(blocks, names if self.limits.caches else (), num_computed)

    def _fetch(
        self,
        holder: "SimulatedWorker",
        names: Sequence[BlockName],
        num_tokens: int,
        then: Callable[[int], None],
    ) -> None:
        """Reads of a prompt what the holder has beyond our own cache. It is cached then, and
        nobody holds it; `then` gets the number of tokens gained."""
        own = self.cache.match(names, num_tokens)
        theirs = holder.cache.match(names, num_tokens) if holder.alive else own
        if theirs.num_tokens <= own.num_tokens or not self.cache.fits(own, num_tokens):
            return then(0)
        blocks = self.cache.open(own)
        self.cache.extend(blocks, theirs.num_cached)
        held = holder.cache.open(theirs)
        self.num_fetching += 1
        self._tell()
        there_at = self._around.network.send(
            holder.identity.incarnation,
            self.identity.incarnation,
            (theirs.num_blocks - own.num_blocks) * self._device.block_bytes,
            self._clock.now,
        )
        gained = theirs.num_tokens - own.num_tokens
        fetched = partial(self._fetched, holder, held, blocks, names[: theirs.num_blocks])
        self._clock.at(there_at, partial(fetched, gained, then))
        return None

    def _fetched(
        self,
        holder: "SimulatedWorker",
        held: SequenceBlocks,
        blocks: SequenceBlocks,
        names: Sequence[BlockName],
        gained: int,
        then: Callable[[int], None],
    ) -> None:
        holder.cache.release(held)
        if holder.alive:
            holder.look_for_room()
        if not self.alive:
            self.cache.release(blocks)
            return
        self.num_fetching -= 1
        if holder.alive:
            self.cache.advance(blocks, names, len(names) * self._device.block_tokens)
        self.cache.release(blocks)
        self._tell()
        then(gained if holder.alive else 0)
        self.look_for_room()
