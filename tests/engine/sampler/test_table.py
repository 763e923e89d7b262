from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from transformers import RepetitionPenaltyLogitsProcessor

from engine.sampler.edits import edited_logits
from engine.sampler.ragged import Ragged
from engine.sampler.table import SLOT, SamplingTable
from engine.sampling import SamplingParams
from tests.engine.sampler.cases import (
    TWINS,
    all_draws,
    fill_table,
    make_sampler,
    sample,
    sequence,
)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 99), max_size=60)), max_size=40)
)
def test_ragged_holds_the_last_list_of_every_slot(puts: list[tuple[int, list[int]]]) -> None:
    starts, counts = np.zeros((2, 6), np.int32)
    ragged = Ragged(starts, counts)
    held: dict[int, list[int]] = {}
    for slot, ids in puts:
        ragged.put(slot, np.array(ids, np.int32), np.array(ids, np.float32) * np.float32(0.5))
        held[slot] = ids
        for other, expected in held.items():
            part = slice(starts[other], starts[other] + counts[other])
            assert ragged.ids[part].tolist() == expected
            assert ragged.values[part].tolist() == [i / 2 for i in expected]
    live = sum(len(ids) for ids in held.values())
    assert ragged.ids.size <= max(64, 4 * (live + 60))


def test_rows_are_whole_words() -> None:
    """The Triton twin reads fields as words of their own size."""
    assert SLOT.fields is not None
    assert all(offset % kind.itemsize == 0 for kind, offset, *_ in SLOT.fields.values())
    assert SLOT.itemsize % 8 == 0


def test_extreme_parameters_fit() -> None:
    table = SamplingTable(1, 10)
    params = SamplingParams(top_k=10**18, min_tokens=10**18, temperature=1e-5, min_p=1e-300)
    table.enter(0, params, -(2**63), 127, 5)
    row = table.rows[0]
    assert row["top_k"] == row["stops_from"] == 2**31 - 1
    assert np.isfinite(row["inverse_temperature"])


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize(
    ("ignore_eos", "output", "expected"),
    [(False, 0, 4), (False, 2, 4), (False, 3, 1), (True, 2, 1), (True, 3, 1)],
)
def test_min_tokens(twin: str, ignore_eos: bool, output: int, expected: int) -> None:
    """Token 1, the end of the text, and stop token 2 are the best; 4 comes after them."""
    logits = torch.zeros(1, 8)
    logits[0, [1, 2, 4]] = torch.tensor([9.0, 8.0, 7.0])
    params = SamplingParams(
        temperature=0.0, min_tokens=3, stop_token_ids=(2,), ignore_eos=ignore_eos
    )
    ours = sequence(tokens=[0] * (5 + output), prompt=5)
    table, history = fill_table([ours], 8)
    table.enter(0, params, 0, 0, 5, eos_ids=(1,))
    drawn = make_sampler(twin, table).sample(logits, all_draws(1), history)
    assert drawn.token_ids.tolist() == [expected]


def test_repetition_penalty_is_that_of_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 50, generator=generator)
    tokens = torch.randint(0, 50, (3, 20), generator=generator)
    sequences = [sequence(tokens=row.tolist(), prompt=8, repetition_penalty=1.4) for row in tokens]
    table, history = fill_table(sequences, 50)
    ours = edited_logits(logits, all_draws(3), table, history, None)
    theirs = RepetitionPenaltyLogitsProcessor(1.4)(tokens, logits)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def test_frequency_and_presence_count_the_output_alone() -> None:
    ours = sequence(
        tokens=(1, 1, 2, 3, 3, 3), prompt=3, frequency_penalty=0.5, presence_penalty=0.25
    )
    table, history = fill_table([ours], 5)
    edited = edited_logits(torch.zeros(1, 5), all_draws(1), table, history, None)
    assert edited.tolist() == [[0.0, 0.0, 0.0, -1.75, 0.0]]


@pytest.mark.parametrize("twin", TWINS)
def test_ids_beyond_the_logits_have_no_penalty(twin: str) -> None:
    ours = sequence(tokens=(4, 2**31 - 1, 900), prompt=1, presence_penalty=1.0, temperature=0.0)
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 3.5]])
    assert sample(twin, logits, [ours]).token_ids.tolist() == [4]


@pytest.mark.parametrize("twin", TWINS)
def test_bias_of_a_left_slot_is_gone(twin: str) -> None:
    logits = torch.tensor([[1.0, 0.0, 0.0]])
    table, history = fill_table([sequence(temperature=0.0, logit_bias={2: 5.0})], 3)
    sampler = make_sampler(twin, table)
    assert sampler.sample(logits, all_draws(1), history).token_ids.tolist() == [2]
    table.enter(0, SamplingParams(temperature=0.0), 0, 0, 1)
    assert sampler.sample(logits, all_draws(1), history).token_ids.tolist() == [0]


class Copies(TorchFunctionMode):
    """Which copies to a device were made, and whether they wait for what is queued there."""

    def __init__(self) -> None:
        super().__init__()
        self.wait: list[bool] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.Tensor.to and isinstance(args[1], torch.device):
            self.wait.append(not kwargs.get("non_blocking", False))
        return function(*args, **kwargs)


def test_edits_do_not_wait_for_the_device() -> None:
    """Which is at the logits still when they are launched."""
    edits: dict[str, Any] = {
        "allowed_token_ids": (1, 3, 5),
        "logit_bias": {3: 2.0},
        "min_tokens": 4,
        "stop_token_ids": (5,),
        "repetition_penalty": 1.5,
    }
    table, history = fill_table([sequence(**edits), sequence()], 40)
    bitmask = torch.full((2, 2), -1, dtype=torch.int32)
    with Copies() as copies:
        edited_logits(torch.zeros(2, 40), all_draws(2), table, history, bitmask)
    assert len(copies.wait) > 10
    assert not any(copies.wait)
