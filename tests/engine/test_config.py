from dataclasses import fields
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(ConfigError, match="blok_size") as caught:
        EngineConfig.from_mapping({"blok_size": 16})
    assert caught.value.field == "blok_size"
    assert "block_size" in str(caught.value), "the message lists what there is"


NAN, INF = float("nan"), float("inf")
# Of every knob, so that a new one has its own: of another type, of none, too small, too large.
WRONG: dict[str, tuple[Any, ...]] = {
    "model": (3, ""),
    "revision": (3,),
    "download_dir": (True,),
    "load_format": ("pickle", None),
    "dtype": ("half", None),
    "device": ("tpu", 0),
    "kernels": ("cuda",),
    "num_threads": (0, 10**12, 1.5),
    "seed": (2**63, -(2**63) - 1, None),
    "block_size": (24, 4, "16"),
    "kv_cache_dtype": ("int4",),
    "kv_cache_memory_bytes": (0, -1, "1GiB"),
    "gpu_memory_utilization": (0, 1.5, NAN),
    "max_model_len": (0, 1, 10**12),
    "enable_prefix_caching": (1, None),
    "eviction_policy": ("fifo",),
    "watermark": (0.5, NAN, -0.1),
    "max_num_seqs": ("3", True, 0, -1, 10**9),
    "max_num_batched_tokens": (0, 2.5),
    "max_pause_s": (0, NAN, INF),
    "max_num_queued_reqs": (0, -1, INF),
    "scheduling_policy": ("lifo",),
    "max_overtake_s": (-1, NAN, INF),
    "preemption_mode": ("drop", True),
    "swap_space_bytes": (-1, 0.5),
    "async_scheduling": (1, "auto"),
    "stall_timeout_s": (NAN, 0, "60"),
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(knob.name, value) for knob in fields(EngineConfig) for value in WRONG[knob.name]],
)
def test_a_wrong_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: .*must ") as caught:
        EngineConfig.from_mapping({name: value})
    assert caught.value.field == name


def test_whole_numbers_serve_as_fractions() -> None:
    assert EngineConfig(gpu_memory_utilization=1).gpu_memory_utilization == 1
