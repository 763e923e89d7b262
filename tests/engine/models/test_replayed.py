"""Decode steps that are repeated against the same steps computed call by call."""

from dataclasses import replace

import pytest
import torch

from engine.kernels.cpu.features import CpuFeatures
from engine.kernels.cpu.kernels import CpuKernels
from engine.kernels.interface import StepBatch
from engine.models.describe import describe
from engine.models.interface import CausalModel
from engine.models.load import load_model
from engine.models.replayed import Decoded, DecodeStep, ReplayedDecoder
from tests.engine.models.cases import NATIVE_CASES
from tests.engine.models.conftest import Saved, SavedModels
from tests.engine.models.driver import DrivenSequence, Driver

CPU = torch.device("cpu")
LENGTHS = (3, 30, 17)
OWN = replace(CpuFeatures.of_this_machine(), wide_registers=True)


def loaded(saved: Saved, dtype: torch.dtype) -> ReplayedDecoder:
    model = load_model(saved.source, describe(saved.source), CpuKernels(OWN), dtype, CPU)
    assert isinstance(model, ReplayedDecoder)
    return model


def decoded(model: CausalModel, saved: Saved, dtype: torch.dtype) -> torch.Tensor:
    """Logits of steps with three, two and three sequences; one of them passes a block's end."""
    driver = Driver(model, describe(saved.source), dtype)
    prompt = saved.prompts[0] + saved.prompts[1]
    sequences = [driver.start(prompt[:length]) for length in LENGTHS]
    for sequence, length in zip(sequences, LENGTHS, strict=True):
        driver.step([(sequence, length)])
    rows: list[torch.Tensor] = []

    def decode(running: list[DrivenSequence], count: int) -> None:
        for i in range(count):
            for sequence in running:
                sequence.tokens.append(prompt[(i + len(sequence.tokens)) % len(prompt)])
            rows.extend(t.clone() for t in driver.step([(s, 1) for s in running]))

    decode(sequences, 12)
    decode(sequences[1:], 5)
    decode(sequences, 4)
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_repeated_steps_give_the_same_bits(
    saved_models: SavedModels, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    saved = saved_models(next(c for c in NATIVE_CASES if c.name.startswith(name)))
    repeated = []
    run = DecodeStep.run

    def noted(step: DecodeStep, batch: StepBatch) -> Decoded:
        repeated.append(step)
        return run(step, batch)

    monkeypatch.setattr(DecodeStep, "run", noted)
    model = loaded(saved, dtype)
    ours = decoded(model, saved, dtype)
    own = OWN.wide_registers or OWN.narrow_registers
    assert len(repeated) == own * (12 + 5 + 4 - 2 * 2)  # but for those seen first and recorded
    assert torch.equal(ours, decoded(model._decoder, saved, dtype))


def test_logits_of_a_repeated_step_are_there_once_and_are_its_own(
    saved_models: SavedModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Capping overwrites them, and asking for other rows asks the head."""
    saved = saved_models(next(c for c in NATIVE_CASES if c.name == "gemma2-head96"))
    model = loaded(saved, torch.float32)
    decoder, asked = model._decoder, []
    scores = decoder.scores

    def noted(hidden: torch.Tensor) -> torch.Tensor:
        asked.append(hidden)
        return scores(hidden)

    driver = Driver(model, describe(saved.source), torch.float32)
    sequences = [driver.start(prompt) for prompt in saved.prompts[:2]]
    for sequence in sequences:
        driver.step([(sequence, len(sequence.tokens))])
    forward = model.forward

    def compared(*args: object) -> torch.Tensor:
        hidden = forward(*args)  # type: ignore[arg-type]
        if len(hidden) == len(sequences):
            expected = decoder.logits(hidden.clone())
            if step % 2:
                assert torch.equal(model.logits(hidden[1:2]), decoder.logits(hidden[1:2].clone()))
            else:
                asked.clear()
                assert torch.equal(model.logits(hidden), expected)
                assert bool(asked) is not repeats
            assert torch.equal(model.logits(hidden), expected)
        return hidden

    monkeypatch.setattr(decoder, "scores", noted)
    monkeypatch.setattr(model, "forward", compared)
    own = OWN.wide_registers or OWN.narrow_registers
    for step in range(5):
        repeats = own and step > 0  # the first one is seen, the second one recorded
        for sequence in sequences:
            sequence.tokens.append(5 + step)
        driver.step([(sequence, 1) for sequence in sequences])
