"""Which of the workers that hold a prompt's beginning is asked for it, if any."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from engine.async_engine import AsyncEngine
from engine.request import RemotePrefix
from kv_transfer.links import Links
from prefill_worker.named_workers import PrefixSource
from prefill_worker.prefix_cost import (
    FREE,
    GroupSize,
    Offer,
    PullCost,
    pull_above,
    pull_cost,
    rank,
)

GRACE_S = 1.0
UNREACHED_PAUSE_S = 10.0  # so that who cannot be reached holds up few prompts


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """What is reserved, who is asked for it in order, and when it had better been computed."""

    prefix: RemotePrefix
    sources: tuple[tuple[str, int], ...]  # address and incarnation
    timeout_s: float


class PrefixPlanner:
    """Weighs links against the engine's step times; used on the event loop's thread."""

    def __init__(self, engine: AsyncEngine, links: Links, incarnation: int) -> None:
        self._engine = engine
        self._links = links
        self._incarnation = incarnation
        self._block_size = engine.engine.info.shape.block_size
        self._unreached: dict[int, float] = {}  # incarnations, and when to try again

    def note_unreached(self, incarnation: int) -> None:
        now = time.monotonic()
        self._unreached = {one: end for one, end in self._unreached.items() if end > now}
        self._unreached[incarnation] = now + UNREACHED_PAUSE_S

    def plan(
        self, sources: Sequence[PrefixSource], num_prompt_tokens: int, num_held_up: int = 0
    ) -> PrefixPlan | None:
        """None: all is computed. `num_held_up` sequences wait while a prompt is computed here."""
        if not sources:
            return None
        own_s = self._engine.engine.step_times.whole_prompt_token_s
        token_s = own_s * (1 + num_held_up)
        offers = [self._offer(source, num_prompt_tokens) for source in self._others(sources)]
        in_time = [one for one in offers if one.pull_s <= GRACE_S + one.num_tokens * own_s]
        ranked = rank(in_time, token_s)
        if not ranked:
            return None
        num_tokens = ranked[0].num_tokens
        return PrefixPlan(
            RemotePrefix(num_tokens, pull_above(ranked[0], token_s)),
            tuple((offer.address, offer.incarnation) for offer in ranked),
            GRACE_S + num_tokens * own_s,
        )

    def _others(self, sources: Sequence[PrefixSource]) -> list[PrefixSource]:
        size, now = self._block_size, time.monotonic()
        return [
            source
            for source in sources
            if source.incarnation != self._incarnation
            and source.num_tokens >= size
            and self._unreached.get(source.incarnation, now) <= now
        ]

    def _offer(self, source: PrefixSource, num_prompt_tokens: int) -> Offer:
        num_tokens = min(source.num_tokens, num_prompt_tokens)
        num_tokens -= num_tokens % self._block_size
        return Offer(source.address, source.incarnation, num_tokens, self._cost(source.address))

    def _cost(self, address: str) -> PullCost:
        link = self._links.known(address)
        if link is None:
            return FREE
        groups = [
            GroupSize(group.blob_bytes, group.window if group.HasField("window") else None)
            for group in link.description.format.groups
        ]
        figures = link.figures
        return pull_cost(figures.latency_s, figures.bytes_per_s, groups, self._block_size)
