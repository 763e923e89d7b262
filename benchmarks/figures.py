"""The figures of the table: each from the runs of one workload, beside its limit."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import bounds
from benchmarks.bounds import Limits
from benchmarks.workloads import START, WORKLOADS, Workload

Answer = Mapping[str, Any]  # a run as the child tells it
MEMORY = "memory"


@dataclass(frozen=True)
class Figure:
    """`value` takes one run; the figure is the median over the runs."""

    workload: str
    label: str
    unit: str
    lower_is_better: bool
    value: Callable[[Answer], float]
    limit: Callable[[Limits], float] | None = None

    def of(self, answers: Sequence[Answer]) -> float:
        return statistics.median(map(self.value, answers))

    def advantage(self, ours: float, theirs: float) -> float:
        """Above 1 where ours is better."""
        return theirs / ours if self.lower_is_better else ours / theirs

    def share(self, value: float, limit: float) -> float:
        return limit / value if self.lower_is_better else value / limit


def _ms(seconds: float) -> float:
    return seconds * 1e3


def _first_token(workload: Workload) -> Figure:
    return Figure(
        workload.name,
        "first token",
        "ms",
        True,
        lambda run: _ms(run["first_token_s"][0]),
        lambda limits: _ms(bounds.prefill_s(workload.model, limits, workload.prompt_len)),
    )


def _step(workload: Workload, label: str, *, limited: bool = True) -> Figure:
    return Figure(
        workload.name,
        label,
        "ms",
        True,
        lambda run: _ms(statistics.median(run["decode_step_s"])),
        (lambda limits: _ms(bounds.mean_decode_step_s(workload, limits))) if limited else None,
    )


def _output_rate(workload: Workload) -> Figure:
    num_tokens = workload.num_seqs * workload.output_len
    return Figure(
        workload.name,
        "output",
        "tokens/s",
        False,
        lambda run: num_tokens / run["total_s"],
        lambda limits: num_tokens / bounds.total_s(workload, limits),
    )


def _prompt_rate(workload: Workload) -> Figure:
    length = workload.prompt_len
    return Figure(
        workload.name,
        "prompt",
        "tokens/s",
        False,
        lambda run: length / run["first_token_s"][0],
        lambda limits: length / bounds.prefill_s(workload.model, limits, length),
    )


def _beyond_weights_and_cache(run: Answer) -> float:
    rest: int = run["peak_resident_bytes"] - run["weights_bytes"] - run["kv_bytes"]
    return rest / 1e6


FIGURES = (
    _step(WORKLOADS["single"], "a token"),
    _first_token(WORKLOADS["single"]),
    _output_rate(WORKLOADS["batch-512"]),
    _step(WORKLOADS["batch-512"], "median step"),
    _output_rate(WORKLOADS["batch-32"]),
    _step(WORKLOADS["batch-32"], "median step"),
    _prompt_rate(WORKLOADS["prefill-512"]),
    _prompt_rate(WORKLOADS["prefill-2048"]),
    _step(WORKLOADS["overhead"], "median step", limited=False),
    Figure(START, "first start to first token", "s", True, lambda run: run["first_start_s"]),
    Figure(START, "second start to first token", "s", True, lambda run: run["second_start_s"]),
    Figure(START, "its cache", "MiB", True, lambda run: run["kv_bytes"] / (1 << 20)),
    Figure(MEMORY, "peak beyond weights and cache", "MB", True, _beyond_weights_and_cache),
)
