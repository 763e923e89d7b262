import pytest

from engine.kernels.triton.tiles import AttentionTiles, decode_tiles, padded, prefill_tiles

HALF_OF_SHARED = 227 * 1024 // 2


def assert_powers_of_two(tiles: AttentionTiles) -> None:
    for value in (tiles.rows, tiles.tokens, tiles.num_warps):
        assert value & (value - 1) == 0
    assert tiles.rows >= 16
    assert tiles.tokens >= 16


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("value_dim", [16, 80, 128, 256])
@pytest.mark.parametrize("head_dim", [16, 48, 64, 96, 192, 256])
def test_two_programs_of_decode_fit(head_dim: int, value_dim: int, itemsize: int) -> None:
    for heads_per_kv in (1, 3, 4, 16, 71, 128):
        tiles = decode_tiles(heads_per_kv, head_dim, value_dim, itemsize)
        assert_powers_of_two(tiles)
        assert tiles.rows >= min(heads_per_kv, 64)
        buffers = tiles.num_stages * tiles.tokens * itemsize
        assert buffers * (padded(head_dim) + padded(value_dim)) <= HALF_OF_SHARED


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_dim", [16, 80, 128, 256])
def test_prefill_of_few_tokens_takes_small_tiles(head_dim: int, itemsize: int) -> None:
    sizes = [prefill_tiles(n, head_dim, head_dim, itemsize) for n in (1, 16, 17, 64, 65, 8192)]
    for tiles in sizes:
        assert_powers_of_two(tiles)
    rows = [tiles.rows for tiles in sizes]
    assert rows == sorted(rows)
