"""A worker as a router sees it. Plain values; times are the caller's clock, in seconds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from protos.cores import Cores
from protos.judging import SILENT_AFTER_S


class Leg(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class Worker(NamedTuple):
    """Where a worker is reached, and which process it is; equal fingerprints share blocks."""

    address: str
    incarnation: int
    fingerprint: str


class StepCosts(NamedTuple):
    """What a worker's steps took lately: the seconds of a step, and of each of its parts.

    A pair is a prompt's token with a token that it attends to: u new tokens after c cached
    ones are u * c + u * u / 2 of them. `context` counts the tokens that decoding sequences
    read, `sequence` every sequence that takes part.
    """

    step_s: float = 0.0
    prompt_token_s: float = 0.0
    prompt_pair_s: float = 0.0
    context_token_s: float = 0.0
    sequence_s: float = 0.0


class LinkSpeed(NamedTuple):
    bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker said of itself; it reached us at `at`."""

    at: float
    num_steps: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_fetching: int = 0
    num_queued_tokens: int = 0  # of prompts, to be computed
    num_context_tokens: int = 0  # read by every decode step
    num_free_tokens: int = 0  # for which there is room, once all that may be evicted is
    num_total_tokens: int = 0
    max_sequences: int = 0  # 0: unknown; so below
    max_step_tokens: int = 0
    max_model_len: int = 0
    costs: StepCosts = StepCosts()
    links: Mapping[int, LinkSpeed] = field(default_factory=dict)  # from peers, by incarnation
    cores: Cores | None = None  # None: it computes on another device
    draining: bool = False
    unhealthy: str = ""
    still_s: float = 0.0  # with work and without a step
    step_s: float = 0.0  # that the step under way should take, with all that it attends to

    @property
    def num_sequences(self) -> int:
        return self.num_running + self.num_waiting + self.num_fetching


class CacheShape(NamedTuple):
    """Of the model that every worker serves. An index follows one group of its layers: the
    full-attention one where there is one, which is prefix-closed; or else the one whose window
    is the widest."""

    block_size: int
    block_bytes: int  # of all groups together
    group: int = 0
    window: int | None = None  # of that group, in tokens


@dataclass(slots=True)
class Standing:
    """A worker, and what it said last."""

    worker: Worker
    load: Load | None = None
    leaving: bool = False  # the cluster stops it, or it said that it drains
    reachable: bool = True

    def takes_new(self, now: float) -> bool:
        load = self.load
        if self.leaving or not self.reachable or load is None:
            return False
        return not (load.draining or load.unhealthy) and now - load.at <= SILENT_AFTER_S
