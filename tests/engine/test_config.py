from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(ConfigError, match="blok_size") as caught:
        EngineConfig.from_mapping({"blok_size": 16})
    assert caught.value.field == "blok_size"
    assert "block_size" in str(caught.value), "the message lists what there is"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "half"),
        ("dtype", None),
        ("max_num_seqs", "3"),
        ("max_num_seqs", True),
        ("max_num_seqs", 0),
        ("max_num_seqs", -1),
        ("block_size", 24),
        ("block_size", 4),
        ("gpu_memory_utilization", 0),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", float("nan")),
        ("watermark", 0.5),
        ("watermark", float("nan")),
        ("stall_timeout_s", float("nan")),
        ("swap_space_bytes", -1),
        ("enable_prefix_caching", 1),
        ("model", 3),
        ("model", ""),
        ("max_model_len", 0),
        ("max_model_len", 1),
        ("seed", 2**63),
        ("num_threads", 10**12),
        ("max_num_seqs", 10**9),
        ("max_model_len", 10**12),
        ("scheduling_policy", "lifo"),
        ("kv_cache_dtype", "int4"),
    ],
)
def test_a_wrong_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_mapping({name: value})
    assert caught.value.field == name


def test_whole_numbers_serve_as_fractions() -> None:
    assert EngineConfig(gpu_memory_utilization=1).gpu_memory_utilization == 1
