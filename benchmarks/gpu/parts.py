"""The parts of a run in their order, what matters most before what may be left out.

Each is a module with `run(bench)`, in a process of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from typing import Protocol

from benchmarks.gpu.bench import LIMITS_PART, Bench


class Runs(Protocol):
    def run(self, bench: Bench) -> None: ...


class Group(StrEnum):
    CHECKS = "checks"  # before all else, all at the same time
    MEASURES = "measures"  # each alone on the device
    ATTEMPTS = "attempts"  # the same, of what is not in use: wanted when somebody tunes


@dataclass(frozen=True)
class Part:
    name: str
    module: str  # of this package
    group: Group
    expected_s: float  # on an H200, from its process's start; not run on a card yet

    @property
    def measures(self) -> bool:
        return self.group is not Group.CHECKS

    @property
    def limit_s(self) -> float:
        return max(1.5 * self.expected_s, self.expected_s + 25)

    def load(self) -> Runs:
        module: Runs = import_module(f"benchmarks.gpu.{self.module}")
        return module


PARTS = (
    Part("check-kernels", "check_kernels", Group.CHECKS, 110),
    Part("check-quantised", "check_quantised", Group.CHECKS, 100),
    Part("check-sampler", "check_sampler", Group.CHECKS, 60),
    Part("check-model", "check_model", Group.CHECKS, 60),
    Part("check-families", "check_families", Group.CHECKS, 110),
    Part("check-tests", "check_tests", Group.CHECKS, 120),
    Part("check-workers", "check_workers", Group.CHECKS, 90),
    Part(LIMITS_PART, "limits", Group.MEASURES, 12),
    Part("decode-attention", "decode_attention", Group.MEASURES, 25),
    Part("prefill-attention", "prefill_attention", Group.MEASURES, 20),
    Part("steps", "steps", Group.MEASURES, 50),
    Part("offline", "offline", Group.MEASURES, 40),
    Part("offline-transformers", "offline_transformers", Group.MEASURES, 45),
    Part("linears", "linears", Group.MEASURES, 12),
    Part("sampler", "sampler_times", Group.MEASURES, 12),
    Part("kv-formats", "kv_formats", Group.MEASURES, 80),
    Part("layout", "layout", Group.MEASURES, 25),
    Part("transfer", "transfer", Group.MEASURES, 30),
    Part("tma", "prefill_by_tma", Group.ATTEMPTS, 30),
    Part("tiles", "tile_choices", Group.ATTEMPTS, 75),
)
BY_NAME = {part.name: part for part in PARTS}
CHOICES = (*Group, *BY_NAME)


def chosen(names: Sequence[str]) -> list[Part]:
    """Of parts and groups; all without any."""
    return [part for part in PARTS if not names or {part.name, part.group} & {*names}]
