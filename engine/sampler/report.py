"""From arrays to the samples of a StepResult: the one place with Python objects per draw."""

from itertools import repeat
from typing import NamedTuple

from engine.sampler.interface import DrawStatus, IntArray, Logprobs, Sampled
from engine.sampler.table import SamplingTable
from engine.step import NO_TOKEN_LEFT, NOT_FINITE, Sample, TokenLogprobs

_FAILURES = {
    DrawStatus.NOT_FINITE: NOT_FINITE,
    DrawStatus.NO_CANDIDATE: NO_TOKEN_LEFT,
}


class Drawn(NamedTuple):
    """`samples` has every draw in order; those of `failed_slots` mean nothing, for the reason
    given there."""

    samples: tuple[Sample, ...]
    failed_slots: dict[int, str]


def make_samples(sampled: Sampled, slots: IntArray, table: SamplingTable) -> Drawn:
    """`sampled` is on the host."""
    tokens, status = sampled.token_ids.tolist(), sampled.status.tolist()
    slot_ids = slots.tolist()
    failed = {slot: _FAILURES[bad] for slot, bad in zip(slot_ids, status, strict=True) if bad}
    if sampled.logprobs is None:
        return Drawn(tuple(map(Sample, slot_ids, tokens, repeat(None))), failed)
    wanted = table.rows["reported"][slots].tolist()
    entries = _entries(sampled.logprobs, tokens, wanted)
    return Drawn(tuple(map(Sample, slot_ids, tokens, entries)), failed)


def logprob_entries(logprobs: Logprobs, token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    """For prompt logprobs; entries of a row that is not finite hold NaN."""
    wanted = [num_top + 1] * len(token_ids)
    return [entry for entry in _entries(logprobs, token_ids, wanted) if entry is not None]


def _entries(
    logprobs: Logprobs, token_ids: list[int], wanted: list[int]
) -> list[TokenLogprobs | None]:
    """wanted[i]: 0 for none, 1 + n for the token's own and n alternatives."""
    values, ranks = logprobs.logprob.tolist(), logprobs.rank.tolist()
    ids, tops = logprobs.top_ids.tolist(), logprobs.top_logprobs.tolist()
    return [
        TokenLogprobs(
            token, values[i], ranks[i], tuple(zip(ids[i][: n - 1], tops[i][: n - 1], strict=True))
        )
        if n > 0
        else None
        for i, (token, n) in enumerate(zip(token_ids, wanted, strict=True))
    ]
