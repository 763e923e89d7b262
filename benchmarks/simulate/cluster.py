"""What is simulated: how many workers of which kind, in how many cells, behind how many routers."""

from dataclasses import dataclass, field

from benchmarks.simulate.feed import Delays
from benchmarks.simulate.roster import Death
from engine.errors import ConfigError
from router.config import RouterConfig
from router.workers import Leg


@dataclass(frozen=True)
class ClusterPlan:
    """Workers are those of one cell. Without prefill workers it is a colocated cluster.

    `prefill_step_tokens` None: a step is one whole prompt.
    """

    num_prefill: int = 8
    num_decode: int = 5
    prefill_step_tokens: int | None = 8192
    decode_step_tokens: int = 512
    max_sequences: int = 256
    num_cells: int = 1
    num_routers: int = 1  # of each cell
    message_s: float = 0.0005
    notice_s: float = 0.1  # from a worker's death until its peers know
    delays: Delays = field(default_factory=Delays)
    endless_decode: bool = False  # decode workers take no time and no prompts, and hold anything
    deaths: tuple[Death, ...] = ()  # in the first cell
    router: RouterConfig = field(default_factory=RouterConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"num_prefill": 0, "num_decode": 1, "num_cells": 1, "num_routers": 1}
        least |= {"decode_step_tokens": 1, "max_sequences": 1}
        for name, fewest in least.items():
            value = getattr(self, name)
            if value < fewest:
                raise ConfigError(name, f"{value}, must be at least {fewest}")
        for death in self.deaths:
            size = self.num_prefill if death.leg is Leg.PREFILL else self.num_decode
            if not 0 <= death.number < size:
                raise ConfigError(
                    "death", f"{death.leg} worker {death.number}, there are {size}, from 0 on"
                )
        if self.prefill_step_tokens is not None and self.prefill_step_tokens < 1:
            raise ConfigError("prefill_step_tokens", f"{self.prefill_step_tokens}, at least 1")

    @property
    def num_workers(self) -> int:
        return self.num_cells * (self.num_prefill + self.num_decode)

    @property
    def name(self) -> str:
        if self.num_prefill:
            return f"{self.num_prefill} prefill + {self.num_decode} decode"
        return f"{self.num_decode} colocated, {self.decode_step_tokens} tokens a step"
