"""A worker as a router sees it. Plain values; times are the caller's clock, in seconds."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

# A worker whose last word is older may be stopped, cut off or stuck.
SILENT_AFTER_S = 2.0


class Leg(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class Worker(NamedTuple):
    """Where a worker is reached, and which process it is; equal fingerprints share blocks."""

    address: str
    incarnation: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker said of itself at `at`."""

    at: float
    num_sequences: int = 0  # running, waiting and fetching
    num_queued_tokens: int = 0  # of prompts, to be computed
    draining: bool = False
    unhealthy: str = ""


@dataclass(slots=True)
class Standing:
    """A worker, what it said last, and what we gave it that it may not have counted yet."""

    worker: Worker
    load: Load | None = None
    num_given: int = 0  # requests under way
    num_given_tokens: int = 0  # of prompts, until their first token
    leaving: bool = False  # the cluster stops it, or it said that it drains

    def takes_new(self, now: float) -> bool:
        if self.leaving or self.load is None or self.load.draining or self.load.unhealthy:
            return False
        return now - self.load.at <= SILENT_AFTER_S
