"""How many cache blocks fit into a memory, and what fits into those blocks."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import ConfigError
from kv_cache.config import blocks_needed
from kv_cache.layout import BlockLayout, KvFormat, KvGroup

NULL_BLOCKS = 1  # block 0 of every pool is never handed out
KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


def format_bytes(num_bytes: float) -> str:
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    if num_bytes >= MIB:
        return f"{num_bytes / MIB:.1f} MiB"
    return f"{num_bytes / KIB:.1f} KiB" if num_bytes >= KIB else f"{num_bytes:.0f} bytes"


@dataclass(frozen=True)
class CachePlan:
    """Blocks for each group, and what they hold; `chunk_tokens` is the longest prefill chunk."""

    layouts: tuple[BlockLayout, ...]
    num_blocks: tuple[int, ...]  # the null block included
    chunk_tokens: int

    @property
    def num_bytes(self) -> int:
        return sum(
            n * layout.blob_bytes for n, layout in zip(self.num_blocks, self.layouts, strict=True)
        )

    def num_sequences(self, num_tokens: int) -> int:
        """How many unrelated sequences of this length fit at once."""
        return min(
            (n - NULL_BLOCKS) // _needed(layout, num_tokens, self.chunk_tokens)
            for n, layout in zip(self.num_blocks, self.layouts, strict=True)
        )

    @property
    def num_tokens(self) -> int:
        """Tokens that all layers which see everything hold; all layers, where none does."""
        pools = list(zip(self.num_blocks, self.layouts, strict=True))
        whole = [(n, layout) for n, layout in pools if layout.group.window is None]
        return min((n - NULL_BLOCKS) * layout.block_size for n, layout in whole or pools)


def bytes_needed(layouts: Sequence[BlockLayout], num_tokens: int, chunk_tokens: int) -> int:
    """Bytes of cache for one sequence alone, the null blocks included."""
    return sum(
        (_needed(layout, num_tokens, chunk_tokens) + NULL_BLOCKS) * layout.blob_bytes
        for layout in layouts
    )


def plan_cache(
    groups: Sequence[KvGroup],
    kv_format: KvFormat,
    block_size: int,
    budget_bytes: int,
    max_model_len: int,
    chunk_tokens: int,
    most_bytes: int | None = None,
) -> CachePlan:
    """Every group gets the need of one sequence of `max_model_len`; the rest is divided in the
    ratio in which a sequence of a few windows needs the groups. `most_bytes`: what a budget could
    be, where that is known, so that nobody is advised to ask for more."""
    layouts = tuple(BlockLayout(group, block_size, kv_format) for group in groups)
    minimum = bytes_needed(layouts, max_model_len, chunk_tokens)
    if minimum > budget_bytes:
        problem = _does_not_fit(layouts, budget_bytes, max_model_len, chunk_tokens, most_bytes)
        raise ConfigError("max_model_len", problem)
    windows = [g.window for g in groups if g.window is not None]
    typical = min(max_model_len, 4 * max(windows, default=max_model_len))
    needs = [_needed(layout, typical, chunk_tokens) for layout in layouts]
    unit = sum(n * layout.blob_bytes for n, layout in zip(needs, layouts, strict=True))
    rest = budget_bytes - minimum
    num_blocks = tuple(
        _needed(layout, max_model_len, chunk_tokens) + NULL_BLOCKS + rest * need // unit
        for need, layout in zip(needs, layouts, strict=True)
    )
    return CachePlan(layouts, num_blocks, chunk_tokens)


def _does_not_fit(
    layouts: Sequence[BlockLayout],
    budget_bytes: int,
    max_model_len: int,
    chunk_tokens: int,
    most_bytes: int | None,
) -> str:
    need = bytes_needed(layouts, max_model_len, chunk_tokens)
    fitting = largest_model_len(layouts, budget_bytes, max_model_len, chunk_tokens)
    advice = [f"max_model_len to at most {fitting}"] if fitting > 0 else []
    if most_bytes is None or need <= most_bytes:
        advice.append(f"kv_cache_memory_bytes to at least {need} ({format_bytes(need)})")
    problem = (
        f"a sequence of {max_model_len} tokens needs {format_bytes(need)} of cache and "
        f"{format_bytes(budget_bytes)} are there"
    )
    return f"{problem}; set {', or '.join(advice)}" if advice else problem


def largest_model_len(
    layouts: Sequence[BlockLayout], budget_bytes: int, limit: int, chunk_tokens: int
) -> int:
    """The longest sequence, at most `limit`, whose cache fits."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if bytes_needed(layouts, middle, chunk_tokens) <= budget_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def _needed(layout: BlockLayout, num_tokens: int, chunk_tokens: int) -> int:
    return blocks_needed(layout.group, layout.block_size, num_tokens, chunk_tokens)
