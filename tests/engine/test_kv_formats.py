"""Token for token within a quantised format: however its blocks came about, they are the same."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.kernels import reference
from engine.kernels.cpu.kernels import CpuKernels
from engine.kernels.interface import AttentionSpec
from engine.kernels.reference import ReferenceKernels
from engine.memory import bytes_needed
from engine.model_source import resolve_model
from engine.models.describe import describe
from engine.sampling import SamplingParams
from engine.sizing import decide_shape
from kv_cache.layout import KV_FORMATS
from tests.engine.models_on_disk import TinyModel, make_tiny
from tests.engine.pair import Pair, dtype_of, make_engine
from tests.engine.test_exact import check, greedy, random_prompts, run

# What an engine does with blocks is the same for every format: their bytes and scales are as many.
# An fp8 and an integer, one without windows and one with both kinds of layers.
CASES = [("llama", "int8"), ("gemma3", "fp8_e4m3")]
NUM_TOKENS = 16


def exact_linear(
    kernels: object, weight: torch.Tensor, bias: torch.Tensor | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    weight, bias = weight.double(), None if bias is None else bias.double()
    return lambda x: F.linear(x.double(), weight, bias).to(x.dtype)


@pytest.fixture(scope="module", autouse=True)
def exact_sums() -> Iterator[None]:
    """Sums in fp64, whose bits do not hang on what else is computed: the last bit of an fp32 sum
    can decide to which step of a format an element is rounded, and that which token is drawn."""

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        spec: AttentionSpec,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        return attend_in_fp32(q.double(), k.double(), v.double(), spec, sinks)

    attend_in_fp32 = reference.attend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReferenceKernels, "linear", exact_linear)
        patch.setattr(CpuKernels, "linear", exact_linear)
        patch.setattr(reference, "attend", attend)
        yield


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    model, format = request.param
    return model, format


@pytest.fixture(scope="module")
def tiny(case: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny(case[0], tmp_path_factory.mktemp(case[0]))


@pytest.fixture(scope="module")
def format(case: tuple[str, str]) -> str:
    return case[1]


@pytest.fixture(scope="module")
def make(tiny: TinyModel, format: str) -> Callable[..., Engine]:
    def make_one(**knobs: object) -> Engine:
        return make_engine(str(tiny.folder), kernels="reference", kv_cache_dtype=format, **knobs)

    return make_one


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """From less than a block to several windows; one is a whole number of blocks."""
    return [*random_prompts(2, 10, 110), random_prompts(1, 48, 48, seed=8)[0]]


@pytest.fixture(scope="module")
def expected(make: Callable[..., Engine], prompts: list[list[int]]) -> list[list[int]]:
    """Every prompt alone, at once, and without a cache of what was before."""
    engine = make(max_num_batched_tokens=256, enable_prefix_caching=False)
    return [run(engine, {"x": (p, greedy(NUM_TOKENS))})["x"].tokens[0] for p in prompts]


def jobs(prompts: list[list[int]], length: int) -> dict[str, tuple[list[int], SamplingParams]]:
    return {str(i): (prompt, greedy(length)) for i, prompt in enumerate(prompts)}


@pytest.mark.parametrize("budget", [8, 17])
def test_chunked_is_one_shot(
    make: Callable[..., Engine], prompts: list[list[int]], expected: list[list[int]], budget: int
) -> None:
    engine = make(max_num_batched_tokens=budget, enable_prefix_caching=False)
    check(run(engine, jobs(prompts, NUM_TOKENS)), expected)


def test_a_hit_is_cold(
    make: Callable[..., Engine], prompts: list[list[int]], expected: list[list[int]]
) -> None:
    engine = make()
    check(run(engine, jobs(prompts, NUM_TOKENS)), expected)
    assert engine.figures().num_cached_tokens == 0
    check(run(engine, jobs(prompts, NUM_TOKENS)), expected)
    assert engine.figures().num_cached_tokens > 100


SMALL = {"max_model_len": 64, "block_size": 8, "max_num_batched_tokens": 16}


@pytest.fixture(scope="module")
def growing(make: Callable[..., Engine]) -> tuple[list[list[int]], list[list[int]], int]:
    """Prompts, what they grow into alone, and the least memory for one of them."""
    prompts = random_prompts(4, 4, 12, seed=5)
    alone = make(**SMALL, enable_prefix_caching=False)
    expected = [run(alone, {"x": (p, greedy(40))})["x"].tokens[0] for p in prompts]
    return prompts, expected, bytes_needed(alone.info.cache.layouts, 64, 16)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_is_uninterrupted(
    make: Callable[..., Engine], growing: tuple[list[list[int]], list[list[int]], int], mode: str
) -> None:
    prompts, expected, least = growing
    engine = make(**SMALL, preemption_mode=mode, kv_cache_memory_bytes=least)
    check(run(engine, jobs(prompts, 40)), expected)
    assert engine.scheduler_stats().num_preemptions > 0


def test_disaggregated_is_one_process(
    make: Callable[..., Engine], prompts: list[list[int]], expected: list[list[int]]
) -> None:
    pair = Pair(make(max_num_batched_tokens=24), make())
    answers = pair.run(jobs(prompts, NUM_TOKENS))
    pair.check_idle()
    assert {name: answer.tokens[0] for name, answer in answers.items()} == {
        str(i): tokens for i, tokens in enumerate(expected)
    }
    assert len(pair.reservations) == len(prompts)
    assert pair.decode.slabs[0].layout.format.quantised


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_compiled_kernels_chunked_and_after_a_hit(format: str, tmp_path: Path) -> None:
    """No chunk is of one token, whose attention is another kernel's, with other bits."""
    model = str(make_tiny("llama", tmp_path).folder)

    def answer(engine: Engine) -> list[int]:
        prompt = random_prompts(1, 90, 90)[0]
        return run(engine, {"x": (prompt, greedy(NUM_TOKENS))})["x"].tokens[0]

    knobs = {"kernels": "cpu", "kv_cache_dtype": format, "dtype": dtype_of(format)}
    expected = answer(make_engine(model, max_num_batched_tokens=256, **knobs))
    engine = make_engine(model, max_num_batched_tokens=32, **knobs)
    assert answer(engine) == expected
    assert answer(engine) == expected
    assert engine.figures().num_cached_tokens == 80


def test_blocks_of_another_format_have_other_names(
    make: Callable[..., Engine], tiny: TinyModel, format: str
) -> None:
    engine, plain = make(), make_engine(str(tiny.folder), kernels="reference")
    assert engine.info.fingerprint == plain.info.fingerprint, "the model is the same"
    assert format in engine.limits.fingerprint
    assert engine.limits.fingerprint != plain.limits.fingerprint


def test_names_are_vllms() -> None:
    model = describe(resolve_model("bundled", weights=False))
    for name, kv_format in (("fp8", "fp8_e4m3"), ("int8", "int8"), ("auto", "fp32")):
        config = EngineConfig(dtype="float32", device="cpu", kv_cache_dtype=name)
        assert decide_shape(config, model).kv_format is KV_FORMATS[kv_format]
    with pytest.raises(
        ConfigError, match=r"must be the model's 'float32' or one of .*int8"
    ) as told:
        decide_shape(EngineConfig(dtype="float32", device="cpu", kv_cache_dtype="bfloat16"), model)
    assert told.value.field == "kv_cache_dtype"
