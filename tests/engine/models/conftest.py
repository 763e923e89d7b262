"""Saved tiny models, made once a session and shared by all tests of a case."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine.model_source import ModelSource, resolve_model
from tests.engine.models.cases import Case, dense_logits, greedy, make_model, prompt_tokens


@dataclass(frozen=True)
class Saved:
    """A model in a folder, and what transformers makes of a prompt with it."""

    case: Case
    source: ModelSource
    model: PreTrainedModel
    prompts: list[list[int]]
    answers: list[list[int]]  # prompts and greedy continuations
    logits: list[torch.Tensor]  # of the answers, dense


class SavedModels:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._saved: dict[str, Saved] = {}

    def __call__(self, case: Case) -> Saved:
        if case.name not in self._saved:
            folder = self._root / case.name
            model = make_model(case.make_config())
            model.save_pretrained(folder)
            prompts = [prompt_tokens(0), prompt_tokens(1)]
            answers = [greedy(model, prompt) for prompt in prompts]
            logits = [dense_logits(model, answer) for answer in answers]
            source = resolve_model(str(folder))
            self._saved[case.name] = Saved(case, source, model, prompts, answers, logits)
        return self._saved[case.name]


@pytest.fixture(scope="session")
def saved_models(tmp_path_factory: pytest.TempPathFactory) -> SavedModels:
    return SavedModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """These models are too small to share out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
