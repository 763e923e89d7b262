"""The native decoder against transformers, for every covered family."""

from dataclasses import replace

import pytest
import torch

from engine.kernels.registry import load_kernels
from engine.models.describe import describe
from engine.models.interface import CausalModel, ModelDescription
from engine.models.load import load_model
from tests.engine.models.cases import NATIVE_CASES, NUM_TOKENS, PROMPT_LEN, Case
from tests.engine.models.conftest import Saved, SavedModels
from tests.engine.models.driver import Driver

CPU = torch.device("cpu")
CASES = [pytest.param(case, id=case.name) for case in NATIVE_CASES]
TOLERANCE = 1e-4


def described(saved: Saved) -> ModelDescription:
    description = describe(saved.source)
    if saved.case.max_model_len is not None:
        description = replace(description, max_model_len=saved.case.max_model_len)
    return description


def loaded(
    saved: Saved, kernels: str = "reference", dtype: torch.dtype = torch.float32
) -> tuple[CausalModel, ModelDescription]:
    description = described(saved)
    model = load_model(saved.source, description, load_kernels(kernels, CPU), dtype, CPU)
    return model, description


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_and_logits_are_those_of_transformers(
    saved_models: SavedModels, case: Case, kernels: str
) -> None:
    """Two sequences: one prefilled at once, the other in chunks, then decoded together."""
    saved = saved_models(case)
    driver = Driver(*loaded(saved, kernels))
    first, second = (driver.start(prompt) for prompt in saved.prompts)
    rows: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    (logits,) = driver.step([(first, PROMPT_LEN)])
    rows[0].append(logits)
    first.tokens.append(int(logits[-1].argmax()))
    for chunk in (11, 1, 16, PROMPT_LEN - 28):
        by_sequence = driver.step([(first, 1), (second, chunk)])
        rows[0].append(by_sequence[0])
        rows[1].append(by_sequence[1])
        first.tokens.append(int(by_sequence[0][-1].argmax()))
    second.tokens.append(int(rows[1][-1][-1].argmax()))
    while second.num_cached < PROMPT_LEN + NUM_TOKENS:
        running = [s for s in (first, second) if s.num_cached < PROMPT_LEN + NUM_TOKENS]
        for sequence, logits in zip(running, driver.step([(s, 1) for s in running]), strict=True):
            rows[0 if sequence is first else 1].append(logits)
            sequence.tokens.append(int(logits[-1].argmax()))

    for index, sequence in enumerate((first, second)):
        expected = saved.answers[index]
        assert sequence.tokens[: len(expected)] == expected
        ours = torch.cat(rows[index])
        torch.testing.assert_close(
            ours, saved.logits[index], rtol=0, atol=TOLERANCE, check_dtype=False
        )
