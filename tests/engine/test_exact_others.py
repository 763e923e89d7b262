"""Token for token, as in `test_exact.py`, for the families that nothing else here goes through."""

from collections.abc import Callable

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from tests.engine.models_on_disk import OTHERS, TinyModel, make_tiny
from tests.engine.test_exact import (
    BASE,
    expected,
    growing,
    prompts,
    test_a_fork_is_separate_requests,
    test_chunked_is_one_shot,
    test_paged_is_dense,
    test_preempted_is_uninterrupted,
)

__all__ = [
    "expected",
    "growing",
    "prompts",
    "test_a_fork_is_separate_requests",
    "test_chunked_is_one_shot",
    "test_paged_is_dense",
    "test_preempted_is_uninterrupted",
]


@pytest.fixture(scope="module", params=sorted(OTHERS))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def make(tiny: TinyModel) -> Callable[..., Engine]:
    return lambda **knobs: Engine.create(EngineConfig(model=str(tiny.folder), **{**BASE, **knobs}))


def test_who_runs_through_transformers(make: Callable[..., Engine], tiny: TinyModel) -> None:
    model = make().info.model
    assert model.native is (tiny.name not in ("gpt2", "cohere2"))
    assert len(model.groups) == (2 if tiny.name in ("gemma2", "cohere2") else 1)
