"""The searches against counting, and against the worker's own tree."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache.events import EventLog
from kv_cache.layout import KvGroup
from kv_cache.names import BlockName
from kv_cache.pool import BlockPool
from kv_cache.tree import Node, PrefixTree
from router.depth import closed_depth, window_depth, window_reach

keys_held = st.lists(st.booleans(), max_size=70)


class Counted(set[int]):
    """Counts how often each key is looked up."""

    def __init__(self, keys: Sequence[int]) -> None:
        super().__init__(keys)
        self.looks: list[int] = []

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, int)
        self.looks.append(key)
        return super().__contains__(key)


@given(st.integers(0, 300), st.integers(0, 300))
def test_what_is_prefix_closed_is_found_whole(length: int, num_held: int) -> None:
    num_held = min(num_held, length)
    held = Counted(range(num_held))
    assert closed_depth(range(length), held) == num_held
    assert len(held.looks) <= 2 * max(1, num_held).bit_length() + 2


@given(keys_held)
def test_whatever_is_held_the_end_is_one(is_held: list[bool]) -> None:
    """Of a set that is not prefix-closed: a prediction whose beginning was evicted."""
    held = {key for key, one in enumerate(is_held) if one}
    depth = closed_depth(range(len(is_held)), held)
    assert depth == 0 or depth - 1 in held
    assert depth not in held


def slow_window_depth(keys: Sequence[int], held: set[int], reach: int) -> int:
    return max(
        depth
        for depth in range(len(keys) + 1)
        if all(key in held for key in keys[max(0, depth - reach) : depth])
    )


@given(keys_held, st.integers(0, 12))
def test_the_deepest_point_before_which_the_window_is_held(is_held: list[bool], reach: int) -> None:
    keys = range(len(is_held))
    held = Counted([key for key in keys if is_held[key]])
    assert window_depth(keys, held, reach) == slow_window_depth(keys, set(held), reach)
    assert len(held.looks) == len(set(held.looks)), "nothing is looked up twice"


def test_a_reach_that_is_gone_takes_one_look() -> None:
    held = Counted([])
    assert window_depth(range(8192), held, 256) == 0
    assert len(held.looks) == 8192 // 256


@pytest.mark.parametrize("window", [1, 2, 16, 17, 18, 33, 64, 100])
@given(st.lists(st.booleans(), max_size=12))
def test_a_worker_with_a_window_comes_to_the_same(window: int, is_held: list[bool]) -> None:
    """`kv_cache.tree` of a model whose layers all have the window; one token follows, so that
    the whole prompt may be a hit."""
    size = 16
    names = [BlockName(bytes([number]) * 16) for number in range(len(is_held))]
    pool: BlockPool[Node] = BlockPool(len(names) + 2)
    tree = PrefixTree(
        [KvGroup((0,), 1, (8,), window)], size, [pool], EventLog(1, incarnation=1, max_events=100)
    )
    for number, name in enumerate(names):
        if is_held[number]:
            parent = names[number - 1] if number else None
            tree.insert(name, parent, [pool.take()], 0)
    held = {number for number, one in enumerate(is_held) if one}
    num_tokens = len(names) * size + 1
    expected = tree.match(names, num_tokens).num_blocks
    assert window_depth(range(len(names)), held, window_reach(window, size)) == expected
