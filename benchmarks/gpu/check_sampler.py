"""The draws of the Triton sampler against the reference's, token for token."""

import numpy as np
import torch

from benchmarks.gpu.bench import Bench
from engine.sampler.interface import Draws, History
from engine.sampler.reference import ReferenceSampler
from engine.sampler.table import SamplingTable
from engine.sampler.triton import TritonSampler
from engine.sampling import SamplingParams

KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(),
    "top-k 40": SamplingParams(top_k=40),
    "top-p 0.9": SamplingParams(top_p=0.9),
    "min-p 0.05": SamplingParams(min_p=0.05, temperature=0.7),
    "all filters": SamplingParams(top_k=200, top_p=0.8, min_p=0.01, temperature=1.3),
    "penalties": SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5),
    "bias": SamplingParams(logit_bias={3: 9.0, 17: -4.0}),
}


def run(bench: Bench) -> None:
    vocab, rows = (300, 2) if bench.smoke else (128256, 64)
    for name, params in KINDS.items():
        _kind(bench, name, params, vocab, rows)


def filled_table(params: SamplingParams, vocab: int, rows: int) -> tuple[SamplingTable, History]:
    table = SamplingTable(rows, vocab)
    seeds = np.random.default_rng().integers(-(2**63), 2**63 - 1, rows)
    for slot, seed in enumerate(seeds.tolist()):
        table.enter(slot, params, seed, 0, 2)
    tokens = torch.randint(0, vocab, (rows, 50), dtype=torch.int32)
    return table, History(tokens, torch.randint(3, 50, (rows,), dtype=torch.int32))


def _kind(bench: Bench, name: str, params: SamplingParams, vocab: int, rows: int) -> None:
    """Of the logits' type that a step has; the reference computes from the same bits."""
    table, history = filled_table(params, vocab, rows)
    logits = (torch.randn(rows, vocab) * 3).to(bench.dtype)
    slots = np.arange(rows, dtype=np.int32)
    draws = Draws(slots, slots)
    expected = ReferenceSampler(table).sample(logits, draws, history)
    there = History(*(t.to(bench.device) for t in history))
    drawn = TritonSampler(table).sample(logits.to(bench.device), draws, there)
    wrong = (drawn.token_ids.cpu() != expected.token_ids).sum()
    bench.check(f"{name}: tokens that differ of {rows}", float(wrong), 0.0)
