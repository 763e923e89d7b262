"""What a router decided, for whoever asks why. Plain values."""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from router.ask import Placement


class Decision(NamedTuple):
    """What was decided, for whoever asks why."""

    at: float
    request_id: str
    num_tokens: int
    tenant: str
    priority: int
    waited_s: float
    placement: Placement


@dataclass(slots=True)
class RouterStats:
    """Counted since the router began."""

    num_submitted: int = 0
    num_expired: int = 0
    placed: Counter[str] = field(default_factory=Counter)  # by reason
    refused: Counter[str] = field(default_factory=Counter)  # by reason
