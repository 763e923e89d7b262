"""The parts of a run, in their order, each a module with `run(bench)` in a process of its own."""

from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from benchmarks.gpu.bench import LIMITS_PART, Bench


class Runs(Protocol):
    def run(self, bench: Bench) -> None: ...


@dataclass(frozen=True)
class Part:
    name: str
    module: str  # of this package
    limit_s: float
    measures: bool = True  # alone on the device; checks go before, all at the same time

    def load(self) -> Runs:
        module: Runs = import_module(f"benchmarks.gpu.{self.module}")
        return module


PARTS = (
    Part("check-kernels", "check_kernels", 170, measures=False),
    Part("check-quantised", "check_quantised", 170, measures=False),
    Part("check-sampler", "check_sampler", 170, measures=False),
    Part("check-model", "check_model", 170, measures=False),
    Part("check-families", "check_families", 170, measures=False),
    Part("check-tests", "check_tests", 170, measures=False),
    Part(LIMITS_PART, "limits", 40),
    Part("decode-attention", "decode_attention", 60),
    Part("prefill-attention", "prefill_attention", 60),
    Part("linears", "linears", 40),
    Part("sampler", "sampler_times", 30),
    Part("steps", "steps", 100),
    Part("layout", "layout", 60),
    Part("kv-formats", "kv_formats", 110),
    Part("transfer", "transfer", 60),
    Part("offline", "offline", 80),
    Part("offline-transformers", "offline_transformers", 110),
    Part("tma", "prefill_by_tma", 60),
    Part("tiles", "tile_choices", 120),
)
BY_NAME = {part.name: part for part in PARTS}
