"""Rows that no token can be drawn from fail by themselves; strange ones that can, do not."""

import math

import pytest
import torch

from engine.sampler.interface import DrawStatus
from engine.sampler.report import make_samples
from tests.engine.sampler.cases import TWINS, fill_table, sample, sequence
from tests.engine.sampler.oracle import Sequence

VOCAB = 300
DRAWN, NOT_FINITE = int(DrawStatus.DRAWN), int(DrawStatus.NOT_FINITE)
NO_CANDIDATE = int(DrawStatus.NO_CANDIDATE)
INF, NAN = math.inf, math.nan

EACH = pytest.mark.parametrize("twin", TWINS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def kinds() -> list[Sequence]:
    return [
        sequence(temperature=0.0),
        sequence(),
        sequence(top_k=5, top_p=0.5),
        sequence(frequency_penalty=1.0, temperature=0.0),
        sequence(logit_bias={3: 1.0}),
    ]


@EACH
@DTYPES
@pytest.mark.parametrize("value", [NAN, -NAN, INF])
@pytest.mark.parametrize("place", [0, 128, VOCAB - 1])
def test_not_finite(twin: str, dtype: torch.dtype, value: float, place: int) -> None:
    logits = torch.randn(3, VOCAB).to(dtype)
    healthy = [sample(twin, logits, [s], rows=[0]).token_ids.item() for s in kinds()]
    logits[1, place] = value
    logits[1] = torch.copysign(logits[1], torch.tensor(math.copysign(1.0, value), dtype=dtype))
    rows = [row for row in (0, 1, 2) for _ in kinds()]
    drawn = sample(twin, logits, kinds() * 3, rows=rows)
    count = len(kinds())
    assert drawn.status.tolist() == [DRAWN] * count + [NOT_FINITE] * count + [DRAWN] * count
    assert drawn.token_ids[:count].tolist() == healthy
    assert drawn.token_ids[count : 2 * count].tolist() == [0] * count


@EACH
def test_nan_behind_a_mask(twin: str) -> None:
    logits = torch.randn(1, VOCAB)
    logits[0, 7] = NAN
    drawn = sample(twin, logits, [sequence(allowed_token_ids=(1, 2))])
    assert drawn.status.tolist() == [NOT_FINITE]


@EACH
@DTYPES
def test_nothing_left(twin: str, dtype: torch.dtype) -> None:
    logits = torch.full((1, VOCAB), -INF, dtype=dtype)
    drawn = sample(twin, logits, kinds(), rows=[0] * 5)
    assert drawn.status.tolist() == [NO_CANDIDATE] * 5
    banned = sequence(allowed_token_ids=(4,), stop_token_ids=(4,), min_tokens=1)
    drawn = sample(twin, torch.randn(1, VOCAB).to(dtype), [banned])
    assert drawn.status.tolist() == [NO_CANDIDATE]


@EACH
@DTYPES
def test_one_token_left(twin: str, dtype: torch.dtype) -> None:
    logits = torch.full((1, VOCAB), -INF, dtype=dtype)
    logits[0, 200] = -1e30
    drawn = sample(twin, logits, kinds(), rows=[0] * 5)
    assert drawn.status.tolist() == [DRAWN] * 5
    assert drawn.token_ids.tolist() == [200] * 5


@EACH
@DTYPES
@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0, 100.0])
def test_largest_numbers(twin: str, dtype: torch.dtype, temperature: float) -> None:
    logits = torch.full((1, VOCAB), -3e38, dtype=dtype)
    logits[0, 42] = 3e38
    drawn = sample(twin, logits, [sequence(temperature=temperature, top_p=0.9)])
    assert (drawn.status.item(), drawn.token_ids.item()) == (DRAWN, 42)


@EACH
@DTYPES
def test_greedy_takes_the_first_of_equal_ones(twin: str, dtype: torch.dtype) -> None:
    logits = torch.full((4, VOCAB), -1.0, dtype=dtype)
    logits[1, 9:] = 2.0
    logits[2, 130:] = -0.0
    logits[2, 140] = 0.0
    logits[3, 255] = 0.0
    logits[3, 256] = -0.0
    drawn = sample(twin, logits, [sequence(temperature=0.0)] * 4)
    assert drawn.token_ids.tolist() == [0, 9, 130, 255]
    drawn = sample(twin, logits, [sequence(temperature=0.0, logit_bias={1: -50.0})] * 4)
    assert drawn.token_ids.tolist() == [0, 9, 130, 255]


@EACH
def test_a_vocabulary_of_one(twin: str) -> None:
    drawn = sample(twin, torch.zeros(1, 1), [sequence(top_k=1, top_p=0.1, logprobs=4)])
    assert drawn.token_ids.tolist() == [0]
    assert drawn.logprobs is not None
    assert drawn.logprobs.logprob.tolist() == [0.0]
    assert drawn.logprobs.top_ids.tolist() == [[0]]


@EACH
def test_no_draws(twin: str) -> None:
    table, history = fill_table([sequence(logprobs=2)], VOCAB)
    assert table.num_reported(torch.empty(0, dtype=torch.int32).numpy()) == 0
    drawn = sample(twin, torch.zeros(1, VOCAB), [sequence()])
    assert make_samples(drawn, torch.zeros(1, dtype=torch.int32).numpy(), table).samples
    assert history.num_tokens.shape == (1,)
