"""The router alone: how fast its index hears, how large that is, how long a decision takes.

    python -m benchmarks.router [--operations 10000000] [--workers 64]

Caches are full and of an H200's size for an 8 B model: 870,000 tokens. What happens in them is
told as their workers tell it, in messages of one step; making these is not counted. Times of a
look-up and of a decision are of all workers together, half of them of either leg; the prompt's
blocks are named before. `cpu` leaves out what other processes took; load is the
machine's load average while it was measured.
"""

import argparse
import os
import random
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import chain
from typing import Any, NamedTuple

from benchmarks.machine import describe
from kv_cache.events import DIGEST_MODULUS, EventBatch, EventLog, Gap, Snapshot, Stored, name_digest
from kv_cache.names import NAME_BYTES, BlockName
from kv_transfer.event_messages import decode_batch, encode_batch
from protos.events_pb2 import CacheBatch
from router.ask import Ask, Placement, Terms, keys_of
from router.config import RouterConfig
from router.costs import prefill_s
from router.prefix_index import PrefixIndex
from router.router import Router
from router.worker_index import Outcome
from router.workers import CacheShape, Leg, Load, StepCosts, Worker

CACHE_TOKENS = 870_000
STEP_BLOCKS = 32  # that a step stores, and has evicted as many
NUM_ASKED = 5000
BLOCK_BYTES = 131_072  # a token's keys and values
STEP_TOKENS = 8192
COSTS = StepCosts(0.004, 2.5e-5, 1e-9, 3e-8, 1e-5)
REPORT_S = 0.25
REPORT: dict[str, Any] = {
    "num_free_tokens": CACHE_TOKENS,
    "num_total_tokens": CACHE_TOKENS,
    "max_sequences": 256,
    "max_step_tokens": STEP_TOKENS,
    "costs": COSTS,
}


class Told:
    """One worker's events; the oldest blocks are evicted first. Keeps no names."""

    def __init__(self, number: int, num_blocks: int) -> None:
        self._log = EventLog(1, number + 1, max_events=4 * STEP_BLOCKS)
        self._number = number.to_bytes(4, "little")
        self._num_blocks = num_blocks
        self._next = 0

    def step(self) -> EventBatch:
        for _ in range(STEP_BLOCKS):
            if self._next >= self._num_blocks:
                self._log.removed(self._name(self._next - self._num_blocks), 0)
            parent = self._name(self._next - 1) if self._next else None
            self._log.stored(self._name(self._next), parent, 0)
            self._next += 1
        self._log.flush()
        batches = self._log.since(self._log.latest - 1)
        assert not isinstance(batches, Gap)
        return batches[0]

    def _name(self, serial: int) -> BlockName:
        data = serial.to_bytes(8, "little")
        return BlockName(blake2b(data, digest_size=NAME_BYTES, key=self._number).digest())


class Clocks(NamedTuple):
    """Seconds on the wall, and of this thread's own work."""

    wall_s: float = 0.0
    cpu_s: float = 0.0

    @classmethod
    def now(cls) -> "Clocks":
        return cls(time.perf_counter(), time.thread_time())

    def plus(self, start: "Clocks", end: "Clocks") -> "Clocks":
        return Clocks(*[a + c - b for a, b, c in zip(self, start, end, strict=True)])


class Heard(NamedTuple):
    num_operations: int
    applying: Clocks
    all_of_it: Clocks  # with decoding

    def __str__(self) -> str:
        alone, both = (self._rate(clocks) for clocks in (self.applying, self.all_of_it))
        return f"applied: {alone}; decoded and applied: {both}"

    def _rate(self, clocks: Clocks) -> str:
        wall, cpu = (self.num_operations / seconds for seconds in clocks)
        return f"{wall:,.0f}/s, of cpu {cpu:,.0f}/s"


def hear(index: PrefixIndex, told: list[Told], num_operations: int) -> Heard:
    """The workers' steps in turn."""
    done, applying, all_of_it = 0, Clocks(), Clocks()
    while done < num_operations:
        for number, worker in enumerate(told):
            message = encode_batch(worker.step()).SerializeToString()
            started = Clocks.now()
            batch = decode_batch(CacheBatch.FromString(message))
            decoded = Clocks.now()
            outcome = index.of(_worker(number)).apply(batch)
            ended = Clocks.now()
            assert outcome is Outcome.APPLIED
            applying = applying.plus(decoded, ended)
            all_of_it = all_of_it.plus(started, ended)
            done += len(batch.events)
    return Heard(done, applying, all_of_it)


def measure_events(block_size: int, num_workers: int, num_operations: int) -> None:
    num_blocks = CACHE_TOKENS // block_size
    index = PrefixIndex(CacheShape(block_size, 1))
    told = [Told(number, num_blocks) for number in range(num_workers)]
    empty = resident_bytes()
    hear(index, told, num_workers * num_blocks)
    full = resident_bytes() - empty
    heard = hear(index, told, num_operations)
    after = resident_bytes() - empty
    load = os.getloadavg()[0]
    print(f"blocks of {block_size}, {len(index):,} entries: {heard}; load {load:.1f}")
    print(
        f"  resident bytes an entry: {full / len(index):.0f} when full,"
        f" {after / len(index):.0f} after {heard.num_operations:,} more operations"
    )


def resident_bytes() -> int:
    with open("/proc/self/statm") as figures:
        return int(figures.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def families(num_blocks: int, length: int, draw: random.Random) -> list[list[Stored]]:
    """Prompts of `length` blocks; twice as many as a cache holds of them at half their length."""
    return [_family(length, draw) for _ in range(max(2, 4 * num_blocks // length))]


def _family(length: int, draw: random.Random) -> list[Stored]:
    names = [BlockName(draw.randbytes(NAME_BYTES)) for _ in range(length)]
    return [Stored(name, parent, 0) for name, parent in zip(names, [None, *names], strict=False)]


def fill(
    index: PrefixIndex,
    block_size: int,
    num_workers: int,
    prompts: list[list[Stored]],
    draw: random.Random,
) -> None:
    """Every cache has the beginnings of some prompts, drawn at random."""
    num_blocks = CACHE_TOKENS // block_size
    for number in range(num_workers):
        stored = list(chain.from_iterable(_beginnings(prompts, num_blocks, draw)))
        digest = sum(name_digest(one.name) for one in stored) % DIGEST_MODULUS
        snapshot = Snapshot(number + 1, 1, tuple(stored), (digest,))
        assert index.of(_worker(number)).apply_part(snapshot, complete=True) is Outcome.APPLIED


def _beginnings(
    prompts: list[list[Stored]], num_blocks: int, draw: random.Random
) -> Iterator[list[Stored]]:
    for prompt in draw.sample(prompts, len(prompts)):
        beginning = prompt[: min(num_blocks, draw.randint(1, len(prompt)))]
        num_blocks -= len(beginning)
        yield beginning


def measure_choices(block_size: int, num_workers: int, num_tokens: int) -> None:
    """Look-ups alone, then whole decisions, on the same caches."""
    draw = random.Random(1)
    prompts = families(CACHE_TOKENS // block_size, num_tokens // block_size, draw)
    router = Router(RouterConfig(), draw)
    router.set_shape(CacheShape(block_size, BLOCK_BYTES * block_size))
    workers = [_worker(number) for number in range(num_workers)]
    for worker in workers:
        router.add(_leg(worker), worker)
    fill(router.index, block_size, num_workers, prompts, draw)
    looks = []
    for keys in asked(prompts, draw):
        began = Clocks.now()
        router.index.matches(workers, keys, 0.0)
        looks.append(Clocks().plus(began, Clocks.now()))
    what = f"prompt of {num_tokens} tokens, blocks of {block_size}"
    print(f"{what}, {len(router.index):,} entries: look-up {_told(looks)}")
    print(decide(router, workers, asked(prompts, draw), num_tokens))


class Decided(NamedTuple):
    """`at_once`: from a prompt that comes to its placement; `began`: its first token has come. Each
    predicts what a worker will hold. `num_waited`: prompts that were not placed at once."""

    at_once: list[Clocks]
    began: list[Clocks]
    num_waited: int

    def __str__(self) -> str:
        num_asked = len(self.at_once) + self.num_waited
        return (
            f"  decision {_told(self.at_once)}; {self.num_waited} of {num_asked} had to wait\n"
            f"  first token {_told(self.began)}"
        )


def decide(
    router: Router, workers: list[Worker], prompts: Iterable[Sequence[int]], num_tokens: int
) -> Decided:
    """One prompt after the other, half of what they could compute were nothing cached. Each takes
    as long as the router expects. Reports come as they would; of what is stored nobody tells, so
    that every prediction stands until its time is over."""
    interval_s = prefill_s(COSTS, STEP_TOKENS, num_tokens, 0) / 0.5 / (len(workers) / 2)
    decided, fleet = Decided([], [], 0), Fleet(router, workers)
    for number, keys in enumerate(prompts):
        now = number * interval_s
        decided.began.extend(fleet.go_on(now))
        ask = Ask(str(number), num_tokens, keys, num_new=200, arrived=now)
        started = Clocks.now()
        router.submit(ask, now)
        placed = router.dispatch(now)
        taken = Clocks().plus(started, Clocks.now())
        fleet.take(placed, now)
        if any(one is ask for one, _ in placed):
            decided.at_once.append(taken)
    return decided._replace(num_waited=router.stats.num_submitted - len(decided.at_once))


class Fleet:
    """Does what the router expects of it."""

    def __init__(self, router: Router, workers: list[Worker]) -> None:
        self._router = router
        self._workers = workers
        self._reported = float("-inf")
        self._num_reports = 0
        self._ahead: list[tuple[float, str, Terms | None]] = []  # first tokens, and ends: no terms

    def take(self, placed: Iterable[tuple[Ask, Placement]], now: float) -> None:
        for ask, placement in placed:
            terms = placement.considered[0]
            heappush(self._ahead, (now + terms.first_token_s, ask.request_id, terms))

    def go_on(self, until: float) -> Iterator[Clocks]:
        """Of each first token. Who waits is looked at again after each of them."""
        while self._ahead and self._ahead[0][0] <= until:
            now, request_id, terms = heappop(self._ahead)
            self._report(now)
            if terms is None:
                self._router.ended(request_id, now)
            else:
                started = Clocks.now()
                self._router.began(request_id, now)
                yield Clocks().plus(started, Clocks.now())
                heappush(self._ahead, (now + terms.decode_s, request_id, None))
            self.take(self._router.dispatch(now), now)
        self._report(until)

    def _report(self, now: float) -> None:
        if now - self._reported >= REPORT_S:
            self._reported = now
            self._num_reports += 1
            for worker in self._workers:
                self._router.note(_leg(worker), worker, Load(now, self._num_reports, **REPORT))


def asked(prompts: list[list[Stored]], draw: random.Random) -> Iterator[Sequence[int]]:
    """Each made when it is asked for, as prompts come."""
    for _ in range(NUM_ASKED):
        prompt = draw.choice(prompts)
        num_known = draw.randint(0, len(prompt))
        new = (BlockName(draw.randbytes(NAME_BYTES)) for _ in range(len(prompt) - num_known))
        yield keys_of(chain((one.name for one in prompt[:num_known]), new))


def _leg(worker: Worker) -> Leg:
    return Leg.PREFILL if worker.incarnation % 2 else Leg.DECODE


def _told(clocks: list[Clocks]) -> str:
    wall_s, cpu_s = ([one[i] for one in clocks] for i in (0, 1))
    load = os.getloadavg()[0]
    return f"{_quantiles(wall_s)}; cpu {_quantiles(cpu_s)}; load {load:.1f}"


def _quantiles(seconds: list[float]) -> str:
    ranked = sorted(seconds)
    p50, p99 = ranked[len(ranked) // 2], ranked[len(ranked) * 99 // 100]
    return f"p50 {p50 * 1e3:.3f} ms, p99 {p99 * 1e3:.3f} ms"


def _worker(number: int) -> Worker:
    return Worker(f"10.0.0.{number}:9000", number + 1, "f" * 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=10_000_000)
    parser.add_argument("--workers", type=int, default=64)
    args = parser.parse_args()
    print(f"python -m benchmarks.router {shlex.join(sys.argv[1:])}")
    print(describe(), f"load {os.getloadavg()[0]:.1f}")
    for block_size in (64, 16):
        measure_events(block_size, args.workers, args.operations)
    for num_tokens in (8192, 131_072):
        for block_size in (64, 16):
            measure_choices(block_size, args.workers, num_tokens)


if __name__ == "__main__":
    main()
