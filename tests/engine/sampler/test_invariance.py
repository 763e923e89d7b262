"""A draw depends on its logits, parameters, tokens, seed, choice and position: nothing else."""

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from engine.sampler.cpu.sampler import CpuSampler
from engine.sampler.interface import Draws
from engine.sampler.table import SamplingTable
from tests.engine.sampler.cases import (
    TWINS,
    all_draws,
    fill_table,
    make_sampler,
    random_sequence,
    sample,
    sequence,
)
from tests.engine.sampler.oracle import token_of

VOCAB, ROWS = 1000, 24


@pytest.mark.parametrize("twin", TWINS)
def test_alone_or_in_any_batch(twin: str) -> None:
    rng = np.random.default_rng(3)
    sequences = [random_sequence(rng, VOCAB) for _ in range(ROWS)]
    logits = torch.from_numpy(rng.normal(size=(ROWS, VOCAB)).astype(np.float32)) * 2
    together = sample(twin, logits, sequences).token_ids.tolist()
    alone = [
        sample(twin, logits[i : i + 1].contiguous(), [s]).token_ids.item()
        for i, s in enumerate(sequences)
    ]
    assert alone == together
    order = rng.permutation(ROWS).tolist()
    shuffled = sample(twin, logits, [sequences[i] for i in order], rows=order).token_ids.tolist()
    assert shuffled == [together[i] for i in order]


def test_any_number_of_threads() -> None:
    rng = np.random.default_rng(4)
    sequences = [random_sequence(rng, VOCAB) for _ in range(ROWS)]
    logits = torch.from_numpy(rng.normal(size=(ROWS, VOCAB)).astype(np.float32))
    table, history = fill_table(sequences, VOCAB)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            sampler = CpuSampler(table)
            results.append(sampler.sample(logits, all_draws(ROWS), history).token_ids.tolist())
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1] == results[2]


def test_no_python_for_each_sequence() -> None:
    """Whatever they ask for, logprobs too."""
    rng = np.random.default_rng(7)
    sequences = [sequence(logprobs=3), *(random_sequence(rng, VOCAB) for _ in range(63))]
    logits = torch.from_numpy(rng.normal(size=(64, VOCAB)).astype(np.float32))
    table, history = fill_table(sequences, VOCAB)
    sampler = on_one_thread(table)
    sampler.sample(logits, all_draws(64), history)  # compiled by now
    one, all_of_them = (
        num_steps(partial(sampler.sample, logits, all_draws(count), history)) for count in (1, 64)
    )
    assert 100 < one == all_of_them


def num_steps(work: Callable[[], object]) -> int:
    """Of Python's own code."""
    steps = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return steps


def on_one_thread(table: SamplingTable) -> CpuSampler:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return CpuSampler(table)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("twin", TWINS)
def test_another_slot_that_others_have_used(twin: str) -> None:
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(rng.normal(size=(1, VOCAB)).astype(np.float32))
    ours = random_sequence(rng, VOCAB)
    expected = sample(twin, logits, [ours]).token_ids.item()
    table, history = fill_table([random_sequence(rng, VOCAB) for _ in range(4)], VOCAB)
    sampler = make_sampler(twin, table)
    for slot in (2, 0, 3):
        table.enter(slot, ours.params, ours.seed, ours.choice, ours.num_prompt_tokens, ours.eos_ids)
        history.tokens[slot, : len(ours.tokens)] = torch.tensor(ours.tokens, dtype=torch.int32)
        history.num_tokens[slot] = len(ours.tokens)
        draw = Draws(np.array([slot], np.int32), np.zeros(1, np.int32))
        assert sampler.sample(logits, draw, history).token_ids.item() == expected


@pytest.mark.parametrize("twin", TWINS)
def test_lists_that_have_outgrown_their_place(twin: str) -> None:
    rng = np.random.default_rng(6)
    logits = torch.from_numpy(rng.normal(size=(ROWS, VOCAB)).astype(np.float32)) * 2
    table, history = fill_table([sequence() for _ in range(ROWS)], VOCAB)
    sampler = make_sampler(twin, table)
    sampler.sample(logits, all_draws(ROWS), history)
    before = table.allowed.ids, table.bias.ids, table.stops.ids

    def ids() -> tuple[int, ...]:
        return tuple(rng.choice(VOCAB, 40, replace=False).tolist())

    long = [
        sequence(
            seed=slot,
            temperature=0.0 if slot % 2 else 1.0,
            allowed_token_ids=ids() if slot % 3 else None,
            logit_bias=dict.fromkeys(ids(), 9.0),
            min_tokens=5,
            stop_token_ids=ids(),
        )
        for slot in range(ROWS)
    ]
    for slot, s in enumerate(long):
        table.enter(slot, s.params, s.seed, s.choice, s.num_prompt_tokens, s.eos_ids)
    after = table.allowed.ids, table.bias.ids, table.stops.ids
    assert all(new is not old for new, old in zip(after, before, strict=True))
    drawn = sampler.sample(logits, all_draws(ROWS), history).token_ids.tolist()
    assert drawn == [token_of(row, s) for row, s in zip(logits.tolist(), long, strict=True)]


@pytest.mark.parametrize("twin", TWINS)
def test_choices_of_one_prompt_share_a_row(twin: str) -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1] += torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))
    choices = [sequence(seed=9, choice=c) for c in range(20)]
    shared = sample(twin, logits, choices, rows=[1] * 20).token_ids.tolist()
    apart = [sample(twin, logits, [c], rows=[1]).token_ids.item() for c in choices]
    assert shared == apart
    assert len(set(shared)) > 10


@pytest.mark.parametrize("twin", TWINS)
def test_shift_of_all_logits_and_their_precision_in_memory(twin: str) -> None:
    """bf16 logits mean the fp32 numbers that they are."""
    sequences = [sequence(seed=i, top_p=0.9) for i in range(ROWS)]
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0)).bfloat16()
    narrow = sample(twin, logits, sequences).token_ids
    assert torch.equal(narrow, sample(twin, logits.float(), sequences).token_ids)
    # a power of two keeps the differences of these numbers exact
    quarters = (logits.float() * 4).round() / 4
    moved = sample(twin, quarters + 64.0, sequences).token_ids
    assert torch.equal(moved, sample(twin, quarters, sequences).token_ids)
