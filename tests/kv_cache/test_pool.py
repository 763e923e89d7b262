"""The block pool, against plain dicts and lists."""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kv_cache.errors import CacheError
from kv_cache.eviction import EVICTION_POLICIES, Frequency, make_policy
from kv_cache.pool import BlockPool, BlockState


@dataclass
class Known:
    """What the oracle knows of a block."""

    requests: int = 0
    transfers: int = 0
    reads: int = 0
    label: str | None = None

    @property
    def owned(self) -> bool:
        return self.requests + self.transfers + self.reads > 0

    @property
    def state(self) -> BlockState:
        if self.reads:
            return BlockState.QUARANTINED
        if self.owned:
            return BlockState.HELD
        return BlockState.CACHED if self.label else BlockState.FREE


@dataclass
class Oracle:
    blocks: dict[int, Known]
    waiting: list[int] = field(default_factory=list)  # cached, first to be evicted first

    def settle(self) -> None:
        """Whatever is cached and was not before queues up; one at a time changes."""
        cached = [b for b, known in self.blocks.items() if known.state is BlockState.CACHED]
        self.waiting = [b for b in self.waiting if b in cached]
        self.waiting += [b for b in cached if b not in self.waiting]

    def having(self, **counts: int) -> list[int]:
        """Blocks that have at least so many of each."""
        return [
            b for b, k in self.blocks.items() if all(getattr(k, n) >= c for n, c in counts.items())
        ]


class PoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(2, 9))
    def set_up(self, num_blocks: int) -> None:
        self.pool: BlockPool[str] = BlockPool(num_blocks)
        self.oracle = Oracle({block: Known() for block in range(1, num_blocks)})

    def choose(self, data: st.DataObject, blocks: list[int]) -> list[int]:
        """One of the blocks, or none if there is none."""
        return [data.draw(st.sampled_from(blocks))] if blocks else []

    @rule()
    def take(self) -> None:
        free = [b for b, k in self.oracle.blocks.items() if k.state is BlockState.FREE]
        if not free:
            with pytest.raises(IndexError):
                self.pool.take()
            return
        block = self.pool.take()
        assert block in free
        self.oracle.blocks[block].requests = 1

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        there = self.oracle.having(requests=1) + self.oracle.having(transfers=1)
        for block in self.choose(data, there + self.oracle.waiting):
            self.pool.touch(block)
            self.oracle.blocks[block].requests += 1

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        for block in self.choose(data, self.oracle.having(requests=1)):
            self.pool.release(block)
            self.oracle.blocks[block].requests -= 1

    @rule(data=st.data())
    def label(self, data: st.DataObject) -> None:
        blocks = self.oracle.blocks
        fit = [b for b in self.oracle.having(requests=1) if not blocks[b].reads]
        for block in self.choose(data, [b for b in fit if blocks[b].label is None]):
            self.pool.label(block, f"label {block}")
            blocks[block].label = f"label {block}"

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        named = [b for b, known in self.oracle.blocks.items() if known.label]
        for block in self.choose(data, named):
            self.pool.remove(block)
            self.oracle.blocks[block].label = None

    @rule()
    def evict(self) -> None:
        victim = self.pool.victim()
        assert victim == (self.oracle.waiting[0] if self.oracle.waiting else None)
        if victim is not None:
            self.pool.remove(victim)
            self.oracle.blocks[victim].label = None

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        there = self.oracle.having(requests=1) + self.oracle.having(transfers=1)
        for block in self.choose(data, there + self.oracle.waiting):
            self.pool.hold([block])
            self.oracle.blocks[block].transfers += 1

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        for block in self.choose(data, self.oracle.having(transfers=1)):
            self.pool.drop([block])
            self.oracle.blocks[block].transfers -= 1

    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        reading = self.oracle.having(transfers=1)
        unnamed = [b for b in reading if self.oracle.blocks[b].label is None]
        for block in self.choose(data, unnamed):
            self.pool.quarantine([block])
            self.oracle.blocks[block].transfers -= 1
            self.oracle.blocks[block].reads += 1

    @rule(data=st.data())
    def end_quarantine(self, data: st.DataObject) -> None:
        for block in self.choose(data, self.oracle.having(reads=1)):
            self.pool.end_quarantine([block])
            self.oracle.blocks[block].reads -= 1

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.oracle.settle()
        pool, blocks = self.pool, self.oracle.blocks
        pool.check_integrity()
        states = [known.state for known in blocks.values()]
        assert [pool.state(b) for b in blocks] == states
        assert pool.num_free == states.count(BlockState.FREE)
        assert pool.num_cached == states.count(BlockState.CACHED)
        assert pool.num_held == states.count(BlockState.HELD)
        assert pool.num_quarantined == states.count(BlockState.QUARANTINED)
        assert pool.num_in_transfer == len(self.oracle.having(transfers=1))
        for block, known in blocks.items():
            assert pool.owners(block) == (known.requests, known.transfers, known.reads)
            assert pool.labels[block] == known.label
            assert pool.is_writable(block) == (known.requests == 1 and known.label is None)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40)


def test_the_last_owner_of_either_kind_frees_a_block() -> None:
    pool: BlockPool[str] = BlockPool(3)
    block = pool.take()
    pool.hold([block])
    pool.release(block)
    assert pool.num_free == 1, "an aborted request must not free what a transfer reads"
    pool.drop([block])
    assert pool.num_free == 2


def test_only_the_end_of_its_quarantine_frees_a_block() -> None:
    pool: BlockPool[str] = BlockPool(2)
    block = pool.take()
    pool.hold([block])
    pool.quarantine([block])
    pool.release(block)
    assert (pool.num_free, pool.num_held, pool.num_quarantined) == (0, 0, 1)
    pool.end_quarantine([block])
    assert pool.num_free == 1


def test_a_new_name_does_not_inherit_the_rank_of_the_old_one() -> None:
    pool: BlockPool[str] = BlockPool(3, Frequency(3))
    often, once = pool.take(), pool.take()
    pool.label(often, "often")
    for _ in range(4):
        pool.touch(often)
        pool.release(often)
    pool.remove(often)
    pool.label(often, "new")
    pool.label(once, "twice")
    pool.touch(once)
    for block in (once, once, often):
        pool.release(block)
    assert pool.victim() == often


@pytest.mark.parametrize(
    "misuse",
    [
        lambda pool, held, free: pool.release(free),
        lambda pool, held, free: pool.drop([held]),
        lambda pool, held, free: pool.quarantine([held]),
        lambda pool, held, free: pool.end_quarantine([held]),
        lambda pool, held, free: pool.touch(free),
        lambda pool, held, free: pool.hold([free]),
        lambda pool, held, free: pool.label(free, "early"),
        lambda pool, held, free: pool.remove(held),
        lambda pool, held, free: (pool.label(held, "a"), pool.label(held, "b")),
        lambda pool, held, free: (
            pool.hold([held]),
            pool.label(held, "a"),
            pool.quarantine([held]),
        ),
        lambda pool, held, free: (
            pool.hold([held]),
            pool.quarantine([held]),
            pool.label(held, "a"),
        ),
    ],
)
def test_misuse_is_an_assertion(misuse: Any) -> None:
    pool: BlockPool[str] = BlockPool(3)
    held = pool.take()
    with pytest.raises(AssertionError):
        misuse(pool, held, 3 - held)


def test_a_pool_of_nothing_but_the_null_block_is_refused() -> None:
    with pytest.raises(CacheError, match="num_blocks: 1, must be at least 2"):
        BlockPool(1)


def test_memory_is_first_used_in_ascending_order_and_then_while_warm() -> None:
    pool: BlockPool[str] = BlockPool(5)
    assert [pool.take() for _ in range(3)] == [1, 2, 3]
    pool.release(2)
    assert pool.take() == 2


class CountingList(list[Any]):
    """Counts the elements that are looked at or moved."""

    steps = 0

    def __getitem__(self, index: Any) -> Any:
        CountingList.steps += 1
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        CountingList.steps += 1
        super().__setitem__(index, value)

    def append(self, value: Any) -> None:
        CountingList.steps += 1
        super().append(value)

    def pop(self, index: Any = -1) -> Any:
        CountingList.steps += 1 if index == -1 else len(self)
        return super().pop(index)

    def __iter__(self) -> Any:
        CountingList.steps += len(self)
        return super().__iter__()

    def __contains__(self, value: object) -> bool:
        CountingList.steps += len(self)
        return super().__contains__(value)

    def remove(self, value: Any) -> None:
        CountingList.steps += len(self)
        super().remove(value)

    def insert(self, index: Any, value: Any) -> None:
        CountingList.steps += len(self)
        super().insert(index, value)


def count_pool_steps(policy: str, num_blocks: int) -> int:
    """Steps of a pool of which half is cached and half free, as its blocks pass through all that
    can become of them."""
    pool: BlockPool[int] = BlockPool(num_blocks, make_policy(policy, num_blocks))
    rng = random.Random(1)
    for block in [pool.take() for _ in range(num_blocks // 2)]:
        pool.label(block, block, priority=rng.randint(-40, 40))
        for _ in range(rng.randrange(4)):
            pool.touch(block)
            pool.release(block)
        pool.release(block)
    for owner in (pool, pool._queue, pool._policy):
        for name, value in vars(owner).items():
            if isinstance(value, list):
                setattr(owner, name, CountingList(value))
    CountingList.steps = 0
    for _ in range(40):
        for _ in range(50):
            victim = pool.victim()
            assert victim is not None
            pool.remove(victim)
        for block in [pool.take() for _ in range(50)]:
            pool.hold([block])
            pool.quarantine([block])
            pool.end_quarantine([block])
            pool.label(block, block, priority=rng.randint(-40, 40))
            pool.release(block)
            pool.touch(block)
            pool.hold([block])
            pool.release(block)
            pool.drop([block])
            pool.hold([block])
            pool.drop([block])
    assert pool.num_cached == num_blocks // 2
    return CountingList.steps


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_operations_on_100_000_blocks_take_the_steps_of_a_small_pool(policy: str) -> None:
    small, large = count_pool_steps(policy, 1_000), count_pool_steps(policy, 100_000)
    assert large <= small * 1.05
    assert large < 40 * 50 * 13 * 20
