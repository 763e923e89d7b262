"""How much of a prompt's beginning is held: searches over the keys of its blocks. Pure."""

from collections.abc import Container, Sequence


def closed_depth(keys: Sequence[int], held: Container[int]) -> int:
    """How many leading keys are held, where a block is held only with all before it. Gallops: a
    miss on the first block costs one look."""
    low, limit, step = 0, len(keys), 1
    while low + step <= limit and keys[low + step - 1] in held:
        low += step
        step *= 4  # a tenth less than with 2, of what 64 workers take
    high = min(low + step, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if keys[middle - 1] in held:
            low = middle
        else:
            high = middle
    return low


def window_reach(window: int, block_size: int) -> int:
    """How many blocks before a token at a block's start it can see."""
    return -(-(window - 1) // block_size)


def window_depth(keys: Sequence[int], held: Container[int], reach: int) -> int:
    """The deepest point before which the last `reach` blocks are held, or all there are.

    A missing block rules out every point that sees it. So each point is asked from its left
    end on, which takes one look for a whole reach that is gone; what was found on the way down
    stays valid, and nothing is looked up twice.
    """
    depth = known_from = len(keys)
    while depth:
        index = first = max(0, depth - reach)
        while index < known_from and keys[index] in held:
            index += 1
        if index >= known_from:
            return depth
        known_from, depth = first, index
    return 0
