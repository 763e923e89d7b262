"""Compiled twin == torch twin == plain Python, token by token."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.sampler import oracle
from tests.engine.sampler.cases import TWINS, random_sequence, sample, sequence

ROWS = 16


def random_logits(rng: np.random.Generator, vocab_size: int) -> torch.Tensor:
    scale = float(rng.choice([0.01, 1.0, 4.0]))
    return torch.from_numpy(rng.normal(size=(ROWS, vocab_size)).astype(np.float32)) * scale


def packed(mask: list[list[bool]]) -> torch.Tensor:
    """One bit a token, in int32 words, the first in the lowest bit."""
    bits = np.array(mask)
    bits = np.pad(bits, ((0, 0), (0, -bits.shape[1] % 32)))
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [10, 127, 128, 129, 300])
@pytest.mark.parametrize("seed", range(4))
def test_any_parameters(seed: int, vocab_size: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng([seed, vocab_size])
    sequences = [random_sequence(rng, vocab_size) for _ in range(ROWS)]
    logits = random_logits(rng, vocab_size).to(dtype)
    rows = rng.integers(0, ROWS, ROWS).tolist()
    compiled, slow = (sample(twin, logits, sequences, rows) for twin in ("cpu", "reference"))
    assert torch.equal(compiled.token_ids, slow.token_ids)
    assert torch.equal(compiled.status, slow.status)
    expected = [
        oracle.token_of(logits[row].tolist(), s)
        for row, s, status in zip(rows, sequences, slow.status.tolist(), strict=True)
        if status == 0
    ]
    assert slow.token_ids[slow.status == 0].tolist() == expected
    assert len(expected) > ROWS // 2


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("vocab_size", [31, 32, 33, 200])
def test_bitmask(twin: str, vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    sequences = [random_sequence(rng, vocab_size) for _ in range(ROWS)]
    logits = random_logits(rng, vocab_size)
    masks: list[list[bool]] = (rng.random((ROWS, vocab_size)) < 0.5).tolist()
    drawn = sample(twin, logits, sequences, bitmask=packed(masks))
    for i in (drawn.status == 0).nonzero()[:, 0].tolist():
        assert masks[i][drawn.token_ids[i]]
        assert drawn.token_ids[i] == oracle.token_of(logits[i].tolist(), sequences[i], masks[i])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_tokens(dtype: torch.dtype) -> None:
    """Where chunks are left out, bounds bite and top-k selects in two ways."""
    vocab_size = 128_256
    rng = np.random.default_rng(5)
    params: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.1},
        {"top_k": 3},
        {"top_k": 900},
        {"top_k": 2000, "top_p": 0.5},
        {"top_k": 127_000},
        {"top_p": 0.9},
        {"top_p": 0.01},
        {"min_p": 0.2},
        {"temperature": 30.0, "top_p": 0.6},
        {"frequency_penalty": 1.0, "top_k": 20, "top_p": 0.95, "temperature": 0.6},
    ]
    sequences = [
        sequence(seed=i, tokens=rng.integers(0, vocab_size, 500).tolist(), prompt=200, **p)
        for i, p in enumerate(params)
    ]
    logits = torch.from_numpy(rng.normal(size=(3, vocab_size)).astype(np.float32))
    logits *= torch.tensor([[1.0], [5.0], [0.0]])
    for row in range(3):
        rows = [row] * len(params)
        compiled, slow = (
            sample(twin, logits.to(dtype), sequences, rows) for twin in ("cpu", "reference")
        )
        assert torch.equal(compiled.token_ids, slow.token_ids)
        assert not compiled.status.any()


def test_logits_are_not_changed() -> None:
    rng = np.random.default_rng(8)
    logits = random_logits(rng, 100)
    before = logits.clone()
    for twin in TWINS:
        sample(twin, logits, [random_sequence(rng, 100) for _ in range(ROWS)])
    assert torch.equal(logits, before)
