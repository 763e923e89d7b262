"""The GPU twin, on a card where there is one, otherwise in the interpreter of Triton."""

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import engine.sampler.triton as gpu
from engine.sampler.interface import Draws, History, Sampled
from engine.sampler.reference import ReferenceSampler
from tests.engine.sampler.cases import all_draws, fill_table, random_sequence, sequence
from tests.engine.sampler.oracle import Sequence
from tests.interpreter import language_is_patched_once, sums_are_not_checked_for_overflow

__all__ = ["language_is_patched_once", "sums_are_not_checked_for_overflow"]

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
ROWS, VOCAB = 12, 203


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several tiles in a row, and an overflow that is meant (exp of distances beyond reach)."""
    monkeypatch.setattr(gpu, "BLOCK", 64)
    with np.errstate(over="ignore"):
        yield


def both(
    logits: torch.Tensor,
    sequences: list[Sequence],
    draws: Draws,
    bitmask: torch.Tensor | None = None,
) -> tuple[Sampled, Sampled]:
    table, history = fill_table(sequences, logits.shape[1])
    there = History(*(tensor.to(DEVICE) for tensor in history))
    mask = None if bitmask is None else bitmask.to(DEVICE)
    drawn = gpu.TritonSampler(table).sample(logits.to(DEVICE), draws, there, mask)
    return drawn, ReferenceSampler(table).sample(logits, draws, history, bitmask)


def assert_equal(drawn: Sampled, expected: Sampled) -> None:
    assert drawn.token_ids.tolist() == expected.token_ids.tolist()
    assert drawn.status.tolist() == expected.status.tolist()
    assert (drawn.logprobs is None) == (expected.logprobs is None)
    for got, wanted in zip(drawn.logprobs or (), expected.logprobs or (), strict=True):
        torch.testing.assert_close(got.cpu(), wanted, rtol=0, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_parameters(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(2)
    sequences = [random_sequence(rng, VOCAB) for _ in range(ROWS)]
    logits = torch.from_numpy(rng.normal(size=(ROWS, VOCAB)).astype(np.float32)).to(dtype)
    rows = rng.integers(0, ROWS, ROWS).astype(np.int32)
    mask = torch.from_numpy(rng.integers(-(2**31), 2**31, (ROWS, 7)).astype(np.int32))
    draws = Draws(all_draws(ROWS).slots, rows)
    assert_equal(*both(logits, sequences, draws, mask if dtype == torch.float32 else None))


def test_rows_as_the_model_made_them() -> None:
    """No request edits its logits: the kernel reads bf16 rows in place."""
    kinds = [
        sequence(seed=5, temperature=0.0, logprobs=2),
        sequence(seed=6),
        sequence(seed=7, top_k=9),
        sequence(seed=8, top_p=0.3),
        sequence(seed=9, top_k=30, top_p=0.8, min_p=0.05, temperature=0.7),
    ]
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1)).bfloat16()
    logits[1] = (logits[1] * 2).round() / 2  # many equal ones
    rows = np.repeat(np.arange(2, dtype=np.int32), 5)
    assert_equal(*both(logits, kinds * 2, Draws(all_draws(10).slots, rows)))


def test_failing_rows() -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[0, 3] = torch.nan
    logits[1, 200] = torch.inf
    logits[2] = -torch.inf
    logits[3, 1:] = -torch.inf
    for kind in (sequence(), sequence(temperature=0.0), sequence(logit_bias={4: 1.0})):
        drawn, expected = both(logits, [kind] * 5, all_draws(5))
        assert_equal(drawn, expected)
        assert drawn.status.tolist() == [1, 1, 2, 0, 0]
    hidden, _ = both(logits, [sequence(allowed_token_ids=(4,))] * 5, all_draws(5))
    assert hidden.status.tolist() == [1, 1, 2, 2, 0]
