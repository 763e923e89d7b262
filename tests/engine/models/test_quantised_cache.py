"""What a quantised cache makes of a model's logits, beside dense attention in fp32."""

import pytest
import torch

from engine.kernels.registry import load_kernels
from engine.models.describe import describe
from engine.models.load import load_model
from tests.engine.models.cases import NATIVE_CASES, PROMPT_LEN, Case
from tests.engine.models.conftest import SavedModels
from tests.engine.models.driver import Driver
from tests.engine.models.transformers_cases import SERVED_CASES

CPU = torch.device("cpu")
# ||logits - dense ones|| / ||dense ones||, of all rows, of models that make much of a difference:
# their weights are several times as large as those of trained ones
BOUNDS = {"int8": 0.025, "fp8_e4m3": 0.1, "fp8_e5m2": 0.2}
NAMES = ("llama-gqa", "gemma2", "gemma3", "gpt2", "cohere2")
CASES = [
    next(case for case in (*NATIVE_CASES, *SERVED_CASES) if case.name.startswith(name))
    for name in NAMES
]


# fp8_e5m2 would be compiled with fp32 for this alone; tests of the kernels have it with others.
TWINS = [
    *(("reference", format) for format in sorted(BOUNDS)),
    ("cpu", "fp8_e4m3"),
    ("cpu", "int8"),
]


@pytest.mark.parametrize(("kernels", "format"), TWINS)
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
@torch.inference_mode()
def test_logits_are_near_those_of_dense_attention(
    saved_models: SavedModels, case: Case, kernels: str, format: str
) -> None:
    """A prompt in two chunks, then token by token: all but the first chunk read what is stored."""
    saved = saved_models(case)
    description = describe(saved.source)
    twin = load_kernels(kernels, CPU)
    model = load_model(saved.source, description, twin, torch.float32, CPU)
    errors = {}
    for kv_format in (format, "fp32"):
        driver = Driver(model, description, format=kv_format)
        sequence = driver.start(saved.answers[0])
        rows = driver.step([(sequence, 19)]) + driver.step([(sequence, PROMPT_LEN - 19)])
        while sequence.num_cached < len(sequence.tokens):
            rows += driver.step([(sequence, 1)])
        dense = saved.logits[0].float()
        errors[kv_format] = float((torch.cat(rows) - dense).norm() / dense.norm())
    assert errors["fp32"] < 1e-4
    assert 10 * errors["fp32"] < errors[format] < BOUNDS[format], errors
