"""What a step brings to a GPU, packed, no more of the token table than is read, and back."""

import numpy as np
import pytest
import torch

from engine.launched import packed, unpacked
from engine.sampler.interface import History, Logprobs, Sampled
from engine.sampler.reference import ReferenceSampler
from engine.slots import SlotTable
from engine.staging import ALIGN_BYTES, Array, fill, placed, views
from engine.step import EnteringSequence
from tests.engine.sampler.cases import all_draws, fill_table, random_sequence

VOCAB = 90


def test_packed_arrays_come_out_as_they_went_in() -> None:
    rng = np.random.default_rng(0)
    table = rng.integers(0, 100, (9, 12)).astype(np.int32)
    arrays: list[Array] = [
        rng.integers(0, 1 << 40, 5),
        rng.integers(0, 100, 3).astype(np.int32),
        np.zeros((2, 0), np.int32),
        table[:, ::5],  # not contiguous
        rng.normal(size=7).astype(np.float32),
    ]
    places = placed(arrays)
    host = torch.full((places[-1].start + places[-1].num_bytes,), 255, dtype=torch.uint8)
    fill(host, arrays, places)
    for place, view, array in zip(places, views(host, places), arrays, strict=True):
        assert place.start % ALIGN_BYTES == 0
        assert view.numpy().dtype == array.dtype
        np.testing.assert_array_equal(view.numpy(), array)


def test_the_columns_that_are_sent_are_enough_to_draw_by() -> None:
    rng = np.random.default_rng(1)
    sequences = [random_sequence(rng, VOCAB) for _ in range(30)]
    table, _ = fill_table(sequences, VOCAB)
    slots = SlotTable(30, 500, 16, 0)
    for slot, s in enumerate(sequences):
        entering = (slot, s.tokens, s.num_prompt_tokens, s.params, s.seed, s.choice, ())
        slots.enter(EnteringSequence(*entering))
    draws, penalized = all_draws(30), table.rows["penalized"] != 0
    assert penalized.any()
    logits = torch.from_numpy(rng.normal(size=(30, VOCAB)).astype(np.float32))

    def drawn(tokens: Array, num_tokens: Array) -> list[int]:
        history = History(torch.from_numpy(tokens), torch.from_numpy(num_tokens))
        return ReferenceSampler(table).sample(logits, draws, history).token_ids.tolist()

    everything = drawn(slots.tokens, slots.num_tokens)
    columns, counts = slots.history(draws.slots, with_tokens=True)
    assert columns.shape[1] == max(len(s.tokens) for s in sequences)
    assert drawn(columns, counts) == everything
    assert slots.history(draws.slots, with_tokens=False)[0].size == 0


@pytest.mark.parametrize("num_top", [None, 0, 3])
def test_what_was_drawn_comes_back_in_one_piece(num_top: int | None) -> None:
    logprobs = None
    if num_top is not None:
        logprobs = Logprobs(
            torch.randn(5),
            torch.arange(5, dtype=torch.int32),
            torch.arange(5 * num_top, dtype=torch.int32).view(5, num_top),
            torch.randn(5, num_top),
        )
    drawn = torch.tensor([[7, 0, 9, 8, 1], [0, 1, 0, 0, 2]], dtype=torch.int32)
    there = Sampled(drawn, logprobs)
    memory = torch.zeros(10 if num_top is None else 20 + 10 * num_top, dtype=torch.int32)
    back = unpacked(memory, there)
    memory.copy_(packed(there))  # as a copy that ends later
    assert torch.equal(back.token_ids, drawn[0])
    assert torch.equal(back.status, drawn[1])
    assert (back.logprobs is None) == (logprobs is None)
    for ours, theirs in zip(back.logprobs or (), logprobs or (), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
