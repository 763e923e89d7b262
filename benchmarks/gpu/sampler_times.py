"""What drawing the tokens of a step takes, uploads and launches included."""

from functools import partial

import numpy as np
import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.check_sampler import KINDS, filled_table
from engine.sampler.interface import Draws, History
from engine.sampler.triton import TritonSampler


def run(bench: Bench) -> None:
    vocab = 300 if bench.smoke else bench.shape.vocab_size
    for rows in (2,) if bench.smoke else (1, 64, 256):
        logits = torch.randn(rows, vocab, device=bench.device).to(bench.dtype)
        read_s = logits.nbytes / bench.limits.read_bytes_s
        slots = np.arange(rows, dtype=np.int32)
        for name in ("greedy", "plain", "all filters"):
            table, history = filled_table(KINDS[name], vocab, rows)
            there = History(*(t.to(bench.device) for t in history))
            draw = partial(TritonSampler(table).sample, logits, Draws(slots, slots), there)
            seconds = bench.seconds_of_calls(draw, 20)
            bench.figure(f"{name}, {rows} rows", "us", seconds * 1e6, limit=read_s * 1e6)
