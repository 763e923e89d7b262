"""One workload run on one engine, with the clock read around every step."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from benchmarks.workloads import Workload


class Side(Protocol):
    """An engine under measure; requests are known by their index."""

    def add(self, index: int, prompt: list[int], num_output: int) -> None: ...

    def step(self) -> Mapping[int, int]:
        """How many tokens each request got."""
        ...


@dataclass(frozen=True)
class Run:
    total_s: float  # from the first prompt handed over to the last token
    first_token_s: list[float]  # of each request, from the same moment
    decode_step_s: list[float]  # of the steps in which every request got a token, none its first
    num_output_tokens: int


def run(side: Side, workload: Workload, seed: int) -> Run:
    prompts = workload.prompts(seed)
    first_token_s: dict[int, float] = {}
    decode_step_s: list[float] = []
    missing = dict.fromkeys(range(len(prompts)), workload.output_len)
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        side.add(index, prompt, workload.output_len)
    before = time.perf_counter()
    while missing:
        tokens = side.step()
        after = time.perf_counter()
        if len(tokens) == workload.num_seqs and len(first_token_s) == workload.num_seqs:
            decode_step_s.append(after - before)
        for index, count in tokens.items():
            first_token_s.setdefault(index, after - started)
            missing[index] -= count
            if not missing[index]:
                del missing[index]
        before = after
    return Run(
        total_s=before - started,
        first_token_s=[first_token_s[i] for i in range(len(prompts))],
        decode_step_s=decode_step_s,
        num_output_tokens=len(prompts) * workload.output_len,
    )
