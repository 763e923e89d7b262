"""Time to draw the tokens of one step on this CPU, with torch's argmax for a yardstick.

    python -m benchmarks.sampler [--rows 32] [--vocab 32000] [--threads N] [--dtype bfloat16]

`flat` logits are normal with deviation 1, as random weights make them: nothing can be left out.
`peaked` ones have deviation 3, where a few hundred tokens share nearly all of the probability.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks import machine
from engine.sampler.cpu.sampler import CpuSampler
from engine.sampler.interface import Draws, History
from engine.sampler.table import SamplingTable
from engine.sampling import SamplingParams

CONTEXT = 600  # tokens of each sequence, which penalties go through
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, 5 logprobs": {"temperature": 0.0, "logprobs": 5},
    "temperature": {},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50": {"top_k": 50},
    "top_k 20, top_p 0.95, T 0.6": {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    "min_p 0.05": {"min_p": 0.05},
    "penalties, greedy": {"temperature": 0.0, "repetition_penalty": 1.1},
    "penalties, top_p 0.9": {"repetition_penalty": 1.1, "frequency_penalty": 0.5, "top_p": 0.9},
}


YARDSTICKS: dict[str, Callable[[torch.Tensor], object]] = {
    "torch argmax": lambda logits: logits.argmax(-1),
    "torch softmax, multinomial": lambda logits: logits.float().softmax(-1).multinomial(1),
}
LINE = "{:<30}" + "{:>12}" * 4


def step_of(params: dict[str, Any], logits: torch.Tensor) -> Callable[[], object]:
    rows, vocab = logits.shape
    table = SamplingTable(rows, vocab)
    for slot in range(rows):
        table.enter(slot, SamplingParams(**params), seed=slot, choice=0, num_prompt_tokens=100)
    numbers = np.arange(rows, dtype=np.int32)
    history = History(
        torch.randint(vocab, (rows, CONTEXT), dtype=torch.int32),
        torch.full((rows,), CONTEXT, dtype=torch.int32),
    )
    sampler = CpuSampler(table)
    return lambda: sampler.sample(logits, Draws(numbers, numbers), history)


def microseconds(step: Callable[[], object], seconds: float) -> tuple[float, float]:
    """(least, median): others at work on the machine add to the median."""
    step()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 10:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return min(times) * 1e6, statistics.median(times) * 1e6


def show(name: str, steps: Sequence[Callable[[], object]], seconds: float) -> None:
    figures = [figure for step in steps for figure in microseconds(step, seconds)]
    print(LINE.format(name, *(f"{figure:.0f}" for figure in figures)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sampler")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each figure")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print("python -m benchmarks.sampler", *sys.argv[1:])
    print(machine.describe(), f"threads {options.threads}")
    print(f"{options.rows} rows, vocabulary {options.vocab}, {options.dtype}; microseconds a step")
    dtype = getattr(torch, options.dtype)
    normal = torch.randn(options.rows, options.vocab)
    kinds = {"flat": normal.to(dtype), "peaked": (3 * normal).to(dtype)}
    heads = [f"{kind} {what}" for kind in kinds for what in ("min", "med")]
    print(LINE.format("", *heads))
    for name, params in CASES.items():
        show(name, [step_of(params, logits) for logits in kinds.values()], options.seconds)
    for name, function in YARDSTICKS.items():
        show(name, [partial(function, logits) for logits in kinds.values()], options.seconds)


if __name__ == "__main__":
    main()
