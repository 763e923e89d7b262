"""Offsets of a blob, against a walk over its elements and against numpy's own strides."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache.layout import KV_FORMATS, BlockLayout, KvGroup, LayoutError

formats = st.sampled_from(list(KV_FORMATS.values()))
layouts = st.builds(
    BlockLayout,
    group=st.builds(
        KvGroup,
        layers=st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple),
        num_kv_heads=st.integers(1, 4),
        widths=st.lists(st.sampled_from([2, 6, 16, 64]), min_size=1, max_size=3).map(tuple),
    ),
    block_size=st.sampled_from([8, 16]),
    format=formats,
)


Places = dict[tuple[int, int, int, int], int]  # head, layer, plane, token


def walk(layout: BlockLayout) -> tuple[Places, Places, int]:
    """Lays a blob out as the description says: offset of every row, of its scale, and the size
    of the whole."""
    rows, scales, cursor = {}, {}, 0
    group, format = layout.group, layout.format
    for head in range(group.num_kv_heads):
        for layer in range(len(group.layers)):
            for plane, width in enumerate(group.widths):
                for token in range(layout.block_size):
                    rows[head, layer, plane, token] = cursor
                    cursor += width * format.element_bits // 8
        for layer in range(len(group.layers)):
            for plane in range(len(group.widths)):
                for token in range(layout.block_size):
                    scales[head, layer, plane, token] = cursor
                    cursor += format.scale_bytes
        cursor += -cursor % 128
    return rows, scales, cursor + -cursor % 4096


@given(layouts)
def test_offsets_are_those_of_the_description(layout: BlockLayout) -> None:
    rows, scales, size = walk(layout)
    assert {key: layout.offset(*key) for key in rows} == rows
    assert {key: layout.scale_offset(*key) for key in scales} == scales
    assert layout.blob_bytes == size
    assert layout.token_bytes * layout.block_size == size


@pytest.mark.parametrize(("format", "dtype"), [("fp32", np.float32), ("fp16", np.float16)])
@pytest.mark.parametrize("widths", [(16, 16), (24,), (8, 32)])
def test_offsets_are_those_of_a_strided_view(
    format: str, dtype: type, widths: tuple[int, ...]
) -> None:
    group = KvGroup(layers=(3, 5, 6), num_kv_heads=2, widths=widths)
    layout = BlockLayout(group, 16, KV_FORMATS[format])
    blob = np.zeros(layout.blob_bytes, np.uint8)
    size = np.dtype(dtype).itemsize
    plane_offset = 0
    for plane, width in enumerate(widths):
        view = np.ndarray(
            (2, 3, 16, width),
            dtype,
            blob,
            plane_offset,
            (layout.head_bytes, sum(widths) * 16 * size, width * size, size),
        )
        view[:] = np.arange(view.size).reshape(view.shape)
        for head, layer, token in np.ndindex(2, 3, 16):
            start = layout.offset(head, layer, plane, token)
            row: np.ndarray = blob[start : start + width * size].view(dtype)
            assert (row == view[head, layer, token]).all()
        plane_offset += width * 16 * size


@given(layouts)
def test_a_ranks_heads_are_one_run_and_the_runs_are_all_heads(layout: BlockLayout) -> None:
    heads = layout.group.num_kv_heads
    for num_ranks in (n for n in range(1, heads + 1) if heads % n == 0):
        runs = [layout.rank_run(rank, num_ranks) for rank in range(num_ranks)]
        per_rank = heads // num_ranks
        for rank, (offset, size) in enumerate(runs):
            assert offset == layout.offset(rank * per_rank, 0, 0, 0)
            assert size == per_rank * layout.head_bytes
        assert sum(size for _, size in runs) == heads * layout.head_bytes <= layout.blob_bytes


@pytest.mark.parametrize(
    ("window", "blocks"), [(None, None), (1, 0), (2, 1), (16, 1), (17, 1), (18, 2), (33, 2)]
)
def test_window_blocks_are_what_a_query_after_the_hit_sees(
    window: int | None, blocks: int | None
) -> None:
    group = KvGroup(layers=(0,), num_kv_heads=1, widths=(8,), window=window)
    assert group.window_blocks(16) == blocks


def make_group(**changes: object) -> KvGroup:
    good: dict[str, object] = {"layers": (0,), "num_kv_heads": 3, "widths": (8, 8)}
    return KvGroup(**{**good, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": ()}, "layers: a group needs at least one"),
        ({"num_kv_heads": 0}, "num_kv_heads: 0, must be at least 1"),
        ({"widths": ()}, r"widths: \(\), every plane"),
        ({"widths": (8, 0)}, r"widths: \(8, 0\), every plane"),
        ({"window": 0}, "window: 0, must be at least 1"),
    ],
)
def test_a_group_that_cannot_be_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make_group(**changes)


@pytest.mark.parametrize("block_size", [0, 4, 24, -16])
def test_block_sizes_are_powers_of_two(block_size: int) -> None:
    with pytest.raises(LayoutError, match=f"block_size: {block_size}, must be a power of two"):
        BlockLayout(make_group(), block_size, KV_FORMATS["bf16"])


def test_ranks_share_heads_evenly_or_not_at_all() -> None:
    layout = BlockLayout(make_group(), 16, KV_FORMATS["bf16"])
    with pytest.raises(LayoutError, match="num_ranks: 2 does not divide 3 KV heads"):
        layout.rank_run(0, 2)
