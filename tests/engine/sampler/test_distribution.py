"""Tokens drawn over positions, choices and seeds have the probabilities asked for."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from engine.sampler.interface import Draws
from tests.engine.sampler import oracle
from tests.engine.sampler.cases import fill_table, make_sampler, sequence

VOCAB, BATCH, ROUNDS = 40, 256, 100


def bound(degrees: int) -> float:
    """What chi-square exceeds with probability 1e-5 (Wilson and Hilferty)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 4.265 * math.sqrt(spread)) ** 3


def chi_square(counts: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def drawn(logits: torch.Tensor, twin: str = "cpu", rounds: int = ROUNDS, **params: Any) -> Any:
    """[rounds, BATCH]: positions go up by one in each round, sequences differ by seed."""
    sequences = [sequence(seed=12345 + i, **params) for i in range(BATCH)]
    table, history = fill_table(sequences, logits.numel())
    sampler = make_sampler(twin, table)
    draws = Draws(np.arange(BATCH, dtype=np.int32), np.zeros(BATCH, np.int32))
    results = []
    for _ in range(rounds):
        results.append(sampler.sample(logits[None], draws, history).token_ids.clone())
        history.num_tokens.add_(1)
    return torch.stack(results).numpy()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 7},
        {"top_p": 0.8},
        {"top_p": 0.3},
        {"min_p": 0.1},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    ],
)
def test_probabilities(params: dict[str, Any]) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 1.5
    kept = oracle.survivors(logits.tolist(), sequence(**params).params)
    counts = np.bincount(drawn(logits, **params).ravel(), minlength=VOCAB)
    assert set(counts.nonzero()[0].tolist()) <= set(kept)
    expected = np.array([kept[token] for token in kept]) * counts.sum()
    # rare tokens together, as the test wants some 5 of each
    common = expected >= 5
    observed = counts[list(kept)]
    observed = np.append(observed[common], observed[~common].sum())
    expected = np.append(expected[common], expected[~common].sum() + 1e-9)
    assert chi_square(observed, expected) < bound(len(expected) - 1)


def test_equal_logits_of_a_large_vocabulary() -> None:
    """The noise is fine enough that the first of 131072 equal tokens has no advantage."""
    tokens = drawn(torch.zeros(131_072), rounds=30).ravel()
    counts = np.bincount(tokens // 2048, minlength=64)
    assert chi_square(counts, np.full(64, tokens.size / 64)) < bound(63)
    assert np.bincount(tokens % 4, minlength=4).min() > tokens.size / 4 * 0.93


@pytest.mark.parametrize("step", ["position", "seed", "choice"])
def test_neighbours_are_independent(step: str) -> None:
    """Pairs of draws that differ in one of the three by one fill a table evenly."""
    logits = torch.zeros(6)
    first = drawn(logits)
    if step == "choice":
        second = drawn(logits, choice=1)
    elif step == "seed":
        first, second = first[:, :-1], first[:, 1:]
    else:
        first, second = first[:-1], first[1:]
    counts = np.bincount((first * 6 + second).ravel(), minlength=36)
    assert chi_square(counts, np.full(36, counts.sum() / 36)) < bound(35)
