"""Token for token, as in `test_exact.py`, for the families that nothing else there goes through:
each property once, on which the families differ and not the scheduler's ways."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.model_source import ModelSource
from engine.models.describe import describe
from tests.engine import test_exact as exact
from tests.engine.models_on_disk import OTHERS, TinyModel, make_tiny
from tests.engine.test_exact import expected, growing, prompts

__all__ = ["expected", "growing", "prompts"]

Prompts = list[list[int]]
# Each once with our decoder and with transformers', and with one group and with two; both where
# our decoder has two groups.
MODES = {
    "cohere2": ("swap",),
    "gemma2": ("recompute", "swap"),
    "gpt2": ("recompute",),
    "phi3": ("swap",),
    "qwen2": ("swap",),
    "qwen3": ("recompute",),
}


@pytest.fixture(scope="module", params=sorted(OTHERS))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def make(tiny: TinyModel) -> Callable[..., Engine]:
    base = EngineConfig(model=str(tiny.folder), **exact.BASE)
    return lambda **knobs: Engine.create(replace(base, **knobs))


def test_paged_is_dense_and_a_hit_is_cold(
    make: Callable[..., Engine], prompts: Prompts, expected: Prompts
) -> None:
    exact.test_paged_is_dense(make, prompts, expected)


def test_chunked_is_one_shot(
    make: Callable[..., Engine], prompts: Prompts, expected: Prompts
) -> None:
    exact.check_chunked(make, prompts, expected, 17)


def test_preempted_is_uninterrupted(
    make: Callable[..., Engine], growing: tuple[Prompts, Prompts], tiny: TinyModel
) -> None:
    for mode in MODES[tiny.name]:
        exact.check_preempted(make, growing, mode, caching=False)


def test_a_fork_is_separate_requests(make: Callable[..., Engine], tiny: TinyModel) -> None:
    exact.test_a_fork_is_separate_requests(make, tiny)


@pytest.mark.parametrize("tiny", ["gemma2", "gpt2"], indirect=True)
def test_logprobs_are_those_of_transformers(
    make: Callable[..., Engine], tiny: TinyModel, prompts: Prompts
) -> None:
    """Of logits that are capped, and of those of a model that transformers computes."""
    exact.test_logprobs_are_those_of_transformers(make, tiny, prompts)


def test_what_these_are_here_for(tiny: TinyModel) -> None:
    """Our decoder's and transformers', with one group and with two."""
    model = describe(ModelSource(tiny.name, tiny.folder))
    assert model.native is (tiny.name not in ("gpt2", "cohere2"))
    assert len(model.groups) == (2 if tiny.name in ("gemma2", "cohere2", "qwen2") else 1)
