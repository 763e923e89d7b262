"""A router with a few workers, for tests."""

from dataclasses import replace
from hashlib import blake2b
from random import Random

from kv_cache.events import EventLog, Gap
from kv_cache.names import BlockName
from router.ask import Ask, Placement, key_of
from router.config import RouterConfig
from router.router import Router
from router.workers import CacheShape, Leg, LinkSpeed, Load, StepCosts, Worker

BLOCK = 16
# A step takes 10 ms, a prompt token 1 ms: round figures, so that sums can be done by hand.
COSTS = StepCosts(0.01, 0.001, 0.0, 1e-6, 1e-4)
STEP_TOKENS = 1000
SHAPE = CacheShape(BLOCK, block_bytes=BLOCK * 1000)


def prefill(name: str, fingerprint: str = "f") -> Worker:
    return Worker(f"p-{name}", 1 + sum(name.encode()), fingerprint)


def decode(name: str, fingerprint: str = "f") -> Worker:
    return Worker(f"d-{name}", 1000 + sum(name.encode()), fingerprint)


def names(text: str, num_blocks: int) -> list[BlockName]:
    """Of a prompt that begins with the text; equal texts share their blocks."""
    digests = (blake2b(f"{text} {i}".encode(), digest_size=16) for i in range(num_blocks))
    return [BlockName(digest.digest()) for digest in digests]


def keys(text: str, num_blocks: int) -> list[int]:
    return [key_of(name) for name in names(text, num_blocks)]


class World:
    """Time, and workers that report; nothing is computed."""

    def __init__(
        self,
        num_prefill: int = 2,
        num_decode: int = 2,
        config: RouterConfig | None = None,
        seed: int = 0,
        costs: StepCosts = COSTS,
        shape: CacheShape | None = SHAPE,
    ) -> None:
        self.now = 100.0
        self.random = Random(seed)
        self.router = Router(config or RouterConfig(), self.random)
        if shape is not None:
            self.router.set_shape(shape)
        self.loads: dict[tuple[Leg, Worker], Load] = {}
        self.costs = costs
        self.prefill = [self.come(Leg.PREFILL, prefill(str(i))) for i in range(num_prefill)]
        self.decode = [self.come(Leg.DECODE, decode(str(i))) for i in range(num_decode)]

    def hold(self, worker: Worker, text: str, num_blocks: int) -> None:
        """Its first words are that it has stored them."""
        log = EventLog(1, worker.incarnation, max_events=num_blocks)
        parent = None
        for name in names(text, num_blocks):
            log.stored(name, parent, 0)
            parent = name
        log.flush()
        batches = log.since(0)
        assert not isinstance(batches, Gap)
        for batch in batches:
            self.router.index.of(worker).apply(batch)

    def come(self, leg: Leg, worker: Worker) -> Worker:
        self.router.add(leg, worker)
        self.report(leg, worker)
        return worker

    def report(self, leg: Leg, worker: Worker, **changes: object) -> None:
        """As the last one was, but for the changes, and a step later."""
        usual = Load(
            self.now,
            num_free_tokens=100_000,
            num_total_tokens=100_000,
            max_step_tokens=STEP_TOKENS,
            costs=self.costs,
        )
        last = self.loads.get((leg, worker), usual)
        changes.setdefault("num_steps", last.num_steps + 1)
        load = replace(last, at=self.now, **changes)  # type: ignore[arg-type]
        self.loads[leg, worker] = load
        self.router.note(leg, worker, load)

    def pass_time(self, seconds: float) -> None:
        """Everybody goes on reporting what it reported."""
        self.now += seconds
        for leg, worker in list(self.loads):
            self.report(leg, worker)

    def submit(self, request_id: str, num_tokens: int, **facts: object) -> None:
        facts.setdefault("keys", keys(request_id, num_tokens // BLOCK))
        facts.setdefault("arrived", self.now)
        ask = Ask(request_id, num_tokens, **facts)  # type: ignore[arg-type]
        self.router.submit(ask, self.now)

    def dispatch(self) -> dict[str, Placement]:
        placed = self.router.dispatch(self.now)
        return {ask.request_id: placement for ask, placement in placed}

    def place(self, request_id: str, num_tokens: int, **facts: object) -> Placement:
        self.submit(request_id, num_tokens, **facts)
        return self.dispatch()[request_id]


def busy(num_prefill: int, num_decode: int, config: RouterConfig | None = None) -> World:
    """Where no decode worker computes prompts that a prefill worker could."""
    world = World(num_prefill, num_decode, config)
    for worker in world.decode:
        world.report(Leg.DECODE, worker, num_running=1000)
    return world


def with_link(peer: Worker, bytes_per_s: float, latency_s: float = 0.0) -> dict[int, LinkSpeed]:
    return {peer.incarnation: LinkSpeed(bytes_per_s, latency_s)}
