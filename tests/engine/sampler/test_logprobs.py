import math

import numpy as np
import pytest
import torch

from engine.sampler.report import logprob_entries, make_samples
from tests.engine.sampler import oracle
from tests.engine.sampler.cases import (
    TWINS,
    all_draws,
    fill_table,
    make_sampler,
    sample,
    sequence,
)

EACH = pytest.mark.parametrize("twin", TWINS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def logits_of(rows: int, vocab_size: int, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(0))


@EACH
@DTYPES
@pytest.mark.parametrize("vocab_size", [7, 1000, 128_256])
def test_like_log_softmax(twin: str, dtype: torch.dtype, vocab_size: int) -> None:
    logits = logits_of(6, vocab_size).to(dtype)
    targets = torch.tensor([0, 1, 2, 3, 5, 6], dtype=torch.int32)
    table, _ = fill_table([sequence()], vocab_size)
    got = make_sampler(twin, table).token_logprobs(logits, targets, 5)
    exact = logits.double().log_softmax(1)
    chosen = exact.gather(1, targets.long()[:, None])
    torch.testing.assert_close(got.logprob, chosen[:, 0].float(), rtol=0, atol=1e-5)
    assert got.rank.tolist() == (1 + (exact > chosen).sum(1)).tolist()
    best = exact.sort(dim=1, descending=True, stable=True)
    assert torch.equal(got.top_ids.long(), best.indices[:, :5])
    torch.testing.assert_close(got.top_logprobs, best.values[:, :5].float(), rtol=0, atol=1e-5)


@EACH
def test_before_everything_else(twin: str) -> None:
    """Neither penalties nor masks, temperature or filters change what is reported."""
    logits = logits_of(1, 50)
    changed = sequence(
        tokens=(1, 2, 3),
        logprobs=3,
        temperature=0.2,
        top_k=1,
        frequency_penalty=2.0,
        logit_bias={9: 100.0},
        allowed_token_ids=(9, 10),
    )
    drawn = sample(twin, logits, [changed])
    assert drawn.logprobs is not None
    exact = oracle.logprobs(logits[0].tolist())
    assert drawn.token_ids.tolist() == [9]
    assert drawn.logprobs.logprob.item() == pytest.approx(exact[9], abs=1e-5)
    assert drawn.logprobs.top_ids[0, 0] == exact.index(max(exact))


@EACH
def test_equal_alternatives_by_id(twin: str) -> None:
    logits = torch.zeros(1, 400)
    logits[0, 300:] = 1.0
    table, _ = fill_table([sequence()], 400)
    got = make_sampler(twin, table).token_logprobs(logits, torch.tensor([5], dtype=torch.int32), 20)
    assert got.top_ids.tolist() == [list(range(300, 320))]
    assert got.rank.tolist() == [101]


@EACH
def test_forbidden_and_broken_rows(twin: str) -> None:
    logits = torch.zeros(3, 10)
    logits[0, 1:] = -math.inf
    logits[1, 4] = math.nan
    logits[2] = -math.inf
    table, _ = fill_table([sequence()], 10)
    got = make_sampler(twin, table).token_logprobs(
        logits, torch.tensor([1, 0, 0], dtype=torch.int32), 2
    )
    assert got.logprob[0] == -math.inf
    assert got.top_logprobs[0].tolist() == [0.0, -math.inf]
    assert got.top_ids[0].tolist() == [0, 1]
    assert got.logprob[1:].isnan().all()
    assert got.top_logprobs[1:].isnan().all()
    assert got.rank.tolist() == [2, 0, 0]


@EACH
def test_samples_carry_what_their_slots_asked_for(twin: str) -> None:
    asked = (None, 0, 3, None, 1)
    sequences = [sequence(temperature=0.0, logprobs=n) for n in asked]
    logits = logits_of(5, 60)
    table, history = fill_table(sequences, 60)
    drawn = make_sampler(twin, table).sample(logits, all_draws(5), history)
    result = make_samples(drawn, all_draws(5).slots, table)
    assert result.failed_slots == {}
    assert [s.slot for s in result.samples] == list(range(5))
    exact = logits.log_softmax(1)
    for i, (n, s) in enumerate(zip(asked, result.samples, strict=True)):
        assert s.token_id == int(logits[i].argmax())
        if n is None:
            assert s.logprobs is None
            continue
        assert s.logprobs is not None
        assert s.logprobs.token_id == s.token_id
        assert s.logprobs.rank == 1
        assert s.logprobs.logprob == pytest.approx(exact[i].max().item(), abs=1e-5)
        assert [token for token, _ in s.logprobs.top] == exact[i].topk(n).indices.tolist()


@EACH
def test_nobody_asks(twin: str) -> None:
    logits = logits_of(2, 60)
    logits[1, 0] = math.nan
    table, history = fill_table([sequence(), sequence()], 60)
    drawn = make_sampler(twin, table).sample(logits, all_draws(2), history)
    assert drawn.logprobs is None
    result = make_samples(drawn, all_draws(2).slots, table)
    assert [s.logprobs for s in result.samples] == [None, None]
    assert result.failed_slots == {1: "the model's logits are not finite"}


@EACH
def test_prompt_entries(twin: str) -> None:
    logits = logits_of(4, 60)
    table, _ = fill_table([sequence()], 60)
    sampler = make_sampler(twin, table)
    targets = np.array([3, 1, 4, 1], np.int32)
    for n in (0, 2):
        got = sampler.token_logprobs(logits, torch.from_numpy(targets), n)
        entries = logprob_entries(got, targets.tolist(), n)
        assert [e.token_id for e in entries] == [3, 1, 4, 1]
        assert [len(e.top) for e in entries] == [n] * 4
        exact = logits.log_softmax(1)[range(4), targets]
        assert [e.logprob for e in entries] == pytest.approx(exact.tolist(), abs=1e-5)
