"""Sequences in a table, ready to be drawn, for every twin."""

from collections.abc import Sequence as Sequences
from typing import Any

import numpy as np
import torch

from engine.sampler.cpu.sampler import CpuSampler
from engine.sampler.interface import Draws, History, Sampled, Sampler
from engine.sampler.reference import ReferenceSampler
from engine.sampler.table import SamplingTable
from engine.sampling import SamplingParams
from tests.engine.sampler.oracle import Sequence

TWINS = ("reference", "cpu")


def make_sampler(twin: str, table: SamplingTable) -> Sampler:
    return ReferenceSampler(table) if twin == "reference" else CpuSampler(table)


def sequence(
    seed: int = 0, choice: int = 0, tokens: Sequences[int] = (0,), prompt: int = 1, **params: Any
) -> Sequence:
    return Sequence(SamplingParams(**params), seed, choice, list(tokens), prompt)


def fill_table(sequences: Sequences[Sequence], vocab_size: int) -> tuple[SamplingTable, History]:
    """Sequence i takes slot i."""
    table = SamplingTable(len(sequences), vocab_size)
    width = max(len(s.tokens) for s in sequences) + 1
    tokens = torch.full((len(sequences), width), vocab_size - 1, dtype=torch.int32)
    for slot, s in enumerate(sequences):
        table.enter(slot, s.params, s.seed, s.choice, s.num_prompt_tokens, s.eos_ids)
        tokens[slot, : len(s.tokens)] = torch.tensor(s.tokens, dtype=torch.int32)
    lengths = torch.tensor([len(s.tokens) for s in sequences], dtype=torch.int32)
    return table, History(tokens, lengths)


def all_draws(count: int) -> Draws:
    """Slot i from row i."""
    numbers = np.arange(count, dtype=np.int32)
    return Draws(numbers, numbers)


def sample(
    twin: str,
    logits: torch.Tensor,
    sequences: Sequences[Sequence],
    rows: Sequences[int] | None = None,
    bitmask: torch.Tensor | None = None,
) -> Sampled:
    table, history = fill_table(sequences, logits.shape[1])
    draws = all_draws(len(sequences))
    if rows is not None:
        draws = Draws(draws.slots, np.array(rows, np.int32))
    return make_sampler(twin, table).sample(logits, draws, history, bitmask)


def random_sequence(rng: np.random.Generator, vocab_size: int, max_tokens: int = 12) -> Sequence:
    """Every parameter on in some, off in most."""

    def maybe(chance: float, value: Any, otherwise: Any) -> Any:
        return value if rng.random() < chance else otherwise

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, vocab_size, count).tolist())

    params = SamplingParams(
        temperature=float(rng.choice([0.0, 0.3, 1.0, 2.5])),
        top_k=maybe(0.4, int(rng.choice([1, 2, 5, 40, 10**9])), 0),
        top_p=maybe(0.4, float(rng.choice([0.05, 0.5, 0.9])), 1.0),
        min_p=maybe(0.3, float(rng.choice([0.02, 0.3, 1.0])), 0.0),
        repetition_penalty=maybe(0.3, float(rng.choice([0.7, 1.5])), 1.0),
        presence_penalty=maybe(0.3, 0.75, 0.0),
        frequency_penalty=maybe(0.3, float(rng.choice([-0.25, 1.5])), 0.0),
        logit_bias=maybe(0.3, {token: float(rng.normal()) * 3 for token in ids(4)}, {}),
        allowed_token_ids=maybe(0.2, ids(9), None),
        min_tokens=maybe(0.3, 4, 0),
        stop_token_ids=ids(2),
        ignore_eos=maybe(0.3, True, False),
    )
    count = int(rng.integers(2, max_tokens + 1))
    return Sequence(
        params,
        seed=int(rng.integers(-(2**63), 2**63 - 1)),
        choice=int(rng.integers(0, 4)),
        tokens=list(ids(count)),
        num_prompt_tokens=int(rng.integers(1, count + 1)),
        eos_ids=ids(1),
    )
