"""What a router knows of a request, and where it sends it."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kv_cache.names import BlockName
from router.workers import Worker

# A whole name would cost an index half as much again for every key: an int of 60 bits has 32
# bytes, one of 64 has 48. A false hit costs time, never correctness.
KEY_MASK = (1 << 60) - 1


def key_of(name: BlockName) -> int:
    """What an index knows a block by."""
    return int.from_bytes(name[:8], "little") & KEY_MASK


def keys_of(names: Iterable[BlockName]) -> Sequence[int]:
    """Packed: the garbage collector looks at every key of a list, as long as it is a new one."""
    return array("Q", map(key_of, names))


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt, with what its client has of the answers already.

    `keys` are those of its full blocks, best as `keys_of` packs them. `num_new` tokens of each of
    `num_choices` are expected. `priority`: lower is sooner. `tenant`: whose share of the cluster it
    takes. `without`: workers that it must not go to again. `moved`: it was admitted before, and is
    never refused. `may_stay`: a decode worker may compute it, where the router's own says so too.
    Times are the caller's clock.
    """

    request_id: str
    num_tokens: int
    keys: Sequence[int] = ()
    num_new: int = 0
    num_choices: int = 1
    priority: int = 0
    tenant: str = ""
    arrived: float = 0.0
    deadline: float | None = None
    without: frozenset[Worker] = frozenset()
    moved: bool = False
    may_stay: bool = True


class Source(NamedTuple):
    """A worker that holds the prompt's first tokens."""

    worker: Worker
    num_tokens: int


class Terms(NamedTuple):
    """What one way to serve a request would cost, in seconds, and what it was made of; said in
    logs and to whoever asks, so that every choice can be understood."""

    decode: Worker
    prefill: Worker | None  # None: the decode worker computes the prompt
    cost_s: float
    wait_s: float  # for what is queued before it
    prefill_s: float  # of its own uncached tokens
    fetch_s: float  # of a prefix that another worker holds
    hand_off_s: float
    decode_s: float  # of the tokens that are expected
    num_cached: int  # tokens, where the prompt is computed
    source: Source | None = None

    @property
    def first_token_s(self) -> float:
        return self.wait_s + self.own_s

    @property
    def own_s(self) -> float:
        """Until its first token, had it nothing before it."""
        return self.fetch_s + self.prefill_s + self.hand_off_s


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes. `prefill` in order of preference; none: the decode worker computes
    the prompt. `considered`: the best few ways, this one first."""

    decode: Worker
    prefill: tuple[Worker, ...]
    sources: tuple[Source, ...]
    reason: str
    considered: tuple[Terms, ...]
