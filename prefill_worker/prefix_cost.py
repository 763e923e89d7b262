"""Whether a prompt's beginning is pulled from a worker that has it, or computed. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

ROUND_TRIPS = 4  # ask, chunk, read, commit


class GroupSize(NamedTuple):
    """Layers of one reach, as they travel."""

    blob_bytes: int
    window: int | None = None


class PullCost(NamedTuple):
    """Seconds, however many tokens are pulled, and for each of them."""

    fixed_s: float
    token_s: float


FREE = PullCost(0.0, 0.0)  # of a link that is not known yet: using it makes it known


class Offer(NamedTuple):
    """The prompt's first `num_tokens`, whole blocks, from one worker."""

    address: str
    incarnation: int
    num_tokens: int
    cost: PullCost

    @property
    def pull_s(self) -> float:
        return self.cost.fixed_s + self.num_tokens * self.cost.token_s


def pull_cost(
    latency_s: float, bytes_per_s: float, groups: Sequence[GroupSize], block_size: int
) -> PullCost:
    """Of a window only its last tokens travel, so these bytes do not grow with the prefix."""
    rate = max(1.0, bytes_per_s)
    growing = sum(group.blob_bytes for group in groups if group.window is None)
    fixed = sum(g.blob_bytes * -(-g.window // block_size) for g in groups if g.window is not None)
    return PullCost(ROUND_TRIPS * latency_s + fixed / rate, growing / block_size / rate)


def saved_s(offer: Offer, num_tokens: int, token_s: float) -> float:
    """By pulling so many tokens rather than computing them at `token_s` each."""
    return num_tokens * (token_s - offer.cost.token_s) - offer.cost.fixed_s


def rank(offers: Sequence[Offer], token_s: float) -> list[Offer]:
    """Those worth asking: the one that saves most, then all that have as much of the prompt.

    A source with less is not among them: of a window it has other blocks.
    """
    best = max(offers, key=lambda o: saved_s(o, o.num_tokens, token_s), default=None)
    if best is None:
        return []
    num_tokens = best.num_tokens
    enough = [
        offer
        for offer in offers
        if offer.num_tokens >= num_tokens and saved_s(offer, num_tokens, token_s) > 0
    ]
    return sorted(enough, key=lambda o: saved_s(o, num_tokens, token_s), reverse=True)


def pull_above(offer: Offer, token_s: float) -> int:
    """How many tokens are computed as soon as they are pulled; the offer is worth asking for."""
    return int(offer.cost.fixed_s / (token_s - offer.cost.token_s))
