"""The order in which blocks are given up, against a sorted list."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache.errors import CacheError
from kv_cache.eviction import EVICTION_POLICIES, EvictionQueue, Priority, make_policy

NUM_BLOCKS = 8
operations = st.lists(
    st.tuples(st.sampled_from(["use", "forget", "add", "remove"]), st.integers(1, 7), st.integers())
)


def oracle_bucket(policy: str, uses: list[int]) -> int:
    """`uses` are the priorities of all uses since the block was named."""
    match policy:
        case "lru":
            return 0
        case "frequency":
            return max(b for b in range(16) if len(uses) >= 2**b)
        case _:
            return max(31 - min(31, max(-32, priority)) for priority in uses)


@pytest.mark.parametrize("name", sorted(EVICTION_POLICIES))
@given(operations)
def test_queue_is_sorted_by_bucket_then_by_age(name: str, ops: list[tuple[str, int, int]]) -> None:
    policy = make_policy(name, NUM_BLOCKS)
    queue = EvictionQueue(NUM_BLOCKS, policy)
    uses: dict[int, list[int]] = {block: [] for block in range(NUM_BLOCKS)}
    waiting: list[int] = []
    for op, block, priority in ops:
        if op == "use" and block not in waiting:
            policy.use(block, priority)
            uses[block].append(priority)
        elif op == "forget" and block not in waiting:
            policy.forget(block)
            uses[block] = []
        elif op == "add" and block not in waiting and uses[block]:
            queue.add(block)
            waiting.append(block)
        elif op == "remove" and block in waiting:
            queue.remove(block)
            waiting.remove(block)
        expected = sorted(waiting, key=lambda b: oracle_bucket(name, uses[b]))
        assert list(queue) == expected
        assert queue.first() == (expected[0] if expected else None)
        assert len(queue) == len(expected)
        assert [b for b in range(NUM_BLOCKS) if b in queue] == sorted(expected)
        queue.check_integrity()


def test_frequency_has_a_highest_bucket() -> None:
    policy = make_policy("frequency", 2)
    for _ in range(2**17):
        policy.use(1, 0)
    assert policy.bucket(1) == policy.num_buckets - 1


def test_priority_counts_the_most_urgent_user_until_the_name_goes() -> None:
    policy = Priority(2)
    policy.use(1, 5)
    policy.use(1, -3)
    policy.use(1, 9)
    urgent = policy.bucket(1)
    policy.forget(1)
    policy.use(1, 9)
    assert urgent == 34
    assert policy.bucket(1) == 22


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(CacheError, match="eviction: no policy 'mru'.*lru, priority, frequency"):
        make_policy("mru", 4)
