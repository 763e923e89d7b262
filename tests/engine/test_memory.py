"""The cache plan against what the blocks really take."""

import re
from dataclasses import replace

import pytest

from engine.errors import ConfigError
from engine.memory import format_bytes, plan_cache
from kv_cache.cache import KvCache
from kv_cache.config import CacheConfig, blocks_needed
from kv_cache.layout import KV_FORMATS, KvGroup

BF16 = KV_FORMATS["bf16"]
FULL = KvGroup(tuple(range(4)), 2, (64, 64))
LOCAL = KvGroup(tuple(range(4, 24)), 2, (64, 64), window=512)
MIB = 1 << 20


def test_a_size_is_told_in_a_unit_that_shows_it() -> None:
    sizes = [0, 1023, 1024, MIB - 1, MIB, 1024 * MIB - 1, 1024 * MIB]
    told = ["0 bytes", "1023 bytes", "1.0 KiB", "1024.0 KiB", "1.0 MiB", "1024.0 MiB", "1.00 GiB"]
    assert [format_bytes(size) for size in sizes] == told


def test_a_plan_uses_its_budget_and_holds_what_it_says() -> None:
    plan = plan_cache([FULL], BF16, 16, 100 * MIB, 4096, 2048)
    layout = plan.layouts[0]
    assert plan.num_bytes <= 100 * MIB < plan.num_bytes + layout.blob_bytes
    # two planes of 64 elements of 2 bytes, in two heads of four layers
    assert layout.blob_bytes == 16 * 2 * 64 * 2 * 2 * 4
    assert plan.num_tokens == (100 * MIB // layout.blob_bytes - 1) * 16


@pytest.mark.parametrize("groups", [(FULL,), (LOCAL,), (FULL, LOCAL)])
@pytest.mark.parametrize("max_model_len", [256, 5000])
def test_the_smallest_budget_serves_the_longest_sequence(
    groups: tuple[KvGroup, ...], max_model_len: int
) -> None:
    """The error names the least budget; a cache of that size takes the sequence to its end."""
    with pytest.raises(ConfigError) as caught:
        plan_cache(groups, BF16, 16, MIB // 2, max_model_len, 256)
    assert caught.value.field == "max_model_len"
    least = int(str(caught.value).split("at least ")[1].split()[0])
    with pytest.raises(ConfigError):
        plan_cache(groups, BF16, 16, least - 1, max_model_len, 256)
    plan = plan_cache(groups, BF16, 16, least, max_model_len, 256)
    cache = KvCache(CacheConfig(groups, plan.num_blocks, 16, max_chunk_tokens=256))
    assert cache.ever_fits(max_model_len - 1)
    blocks = cache.open(cache.match([], max_model_len - 1))
    for end in [*range(256, max_model_len, 256), max_model_len]:
        assert cache.extend(blocks, end, reserve_tokens=max_model_len - 1) is not None
        cache.advance(blocks, (), end)


def test_the_error_names_a_length_that_fits() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_cache([FULL], BF16, 16, 8 * MIB, 100_000, 256)
    fitting = int(str(caught.value).split("at most ")[1].split(",")[0])
    plan_cache([FULL], BF16, 16, 8 * MIB, fitting, 256)
    with pytest.raises(ConfigError):
        plan_cache([FULL], BF16, 16, 8 * MIB, fitting + 1, 256)


def test_nothing_is_advised_that_does_not_do() -> None:
    def advice(budget: int, most: int) -> str:
        with pytest.raises(ConfigError) as caught:
            plan_cache([FULL], BF16, 16, budget, 100_000, 256, most)
        return str(caught.value)

    (told,) = re.findall("kv_cache_memory_bytes to at least ([0-9]+)", advice(8 * MIB, 1 << 40))
    least = int(told)
    assert "kv_cache_memory_bytes to" in advice(8 * MIB, least)
    assert "kv_cache_memory_bytes" not in advice(8 * MIB, least - 1)
    assert "max_model_len to" in advice(8 * MIB, least - 1)
    assert "set" not in advice(100, least - 1), "not even the shortest sequence"


def test_both_groups_get_blocks_for_short_and_long_sequences() -> None:
    plan = plan_cache([FULL, LOCAL], BF16, 16, 512 * MIB, 32768, 512)
    full, local = plan.num_blocks
    assert full > 32768 // 16
    assert local > 512 // 16 * 8
    assert plan.num_bytes <= 512 * MIB


def test_what_is_beyond_one_longest_sequence_is_for_those_of_four_windows() -> None:
    """Of the widest."""
    groups = (FULL, LOCAL, KvGroup((24,), 2, (64, 64), window=1024))
    with pytest.raises(ConfigError) as caught:
        plan_cache(groups, BF16, 16, MIB, 32768, 512)
    least = int(str(caught.value).split("at least ")[1].split()[0])
    before, after = (
        plan_cache(groups, BF16, 16, budget, 32768, 512).num_blocks for budget in (least, 8 << 30)
    )
    more = [many - few for few, many in zip(before, after, strict=True)]
    needs = [blocks_needed(group, 16, 4 * 1024, 512) for group in groups]
    assert [many / more[0] for many in more] == pytest.approx(
        [need / needs[0] for need in needs], rel=0.001
    )


def test_as_many_sequences_fit_at_once_as_it_says() -> None:
    plan = plan_cache([FULL, LOCAL], BF16, 16, 512 * MIB, 32768, 512)
    for length in (100, 3000, 32768):
        count = plan.num_sequences(length)
        needs = [blocks_needed(group, 16, length, 512) for group in (FULL, LOCAL)]
        room = [num_blocks - 1 for num_blocks in plan.num_blocks]
        assert all(count * need <= left for need, left in zip(needs, room, strict=True))
        assert any((count + 1) * need > left for need, left in zip(needs, room, strict=True))
    need = blocks_needed(FULL, 16, 100, 512)
    twice = replace(plan, layouts=plan.layouts[:1], num_blocks=(2 * need,))
    assert twice.num_sequences(100) == 1, "one block is none"


def test_tokens_are_those_of_the_layers_that_see_everything_if_there_are_any() -> None:
    mixed = plan_cache([FULL, LOCAL], BF16, 16, 512 * MIB, 32768, 512)
    assert mixed.num_tokens == (mixed.num_blocks[0] - 1) * 16
    wider = KvGroup((24,), 2, (64, 64), window=1024)
    local = plan_cache([LOCAL, wider], BF16, 16, 512 * MIB, 32768, 512)
    assert local.num_tokens == (min(local.num_blocks) - 1) * 16
