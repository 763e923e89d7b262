"""Requests answered by one engine, their prompts computed here or fetched, whichever is sooner."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from decode_worker.answerer import LocalPrefill, PrefillCandidate, Route, SubmittedRequest
from decode_worker.policy import (
    DECISIONS,
    Decision,
    Prospect,
    Reason,
    Station,
    decide,
    fetch_above,
    in_turn,
    is_shunned,
    num_held_up,
)
from decode_worker.under_way import Share, UnderWay
from engine.async_engine import AsyncEngine
from engine.async_streams import EngineStream
from engine.request import GenerationRequest, GenerationUpdate
from engine.step_times import whole_prompt_token_s
from kv_transfer.link import Link
from kv_transfer.links import Links
from prefill_worker.fetching import Fetcher, FetchPlan
from prefill_worker.prefix_cost import ROUND_TRIPS
from protos.cores import Cores, contend


class FetchingStream:
    """An engine's stream whose prompt may be on its way from another worker."""

    def __init__(self, stream: EngineStream, fetcher: Fetcher, share: Share) -> None:
        self._stream = stream
        self._fetcher = fetcher
        self._share = share

    def listen(self, on_news: Callable[[], None]) -> None:
        self._stream.listen(on_news)

    def take(self) -> GenerationUpdate | None:
        update = self._stream.take()
        if update is not None:
            self._share.run()
        return update

    @property
    def has_ended(self) -> bool:
        return self._stream.has_ended

    def stop_choice(self, choice: int) -> None:
        self._stream.stop_choice(choice)

    def close(self) -> None:
        """What is being fetched stops being fetched."""
        self._share.end()
        self._stream.close()
        self._fetcher.forget(self._stream.request_id)


class _Choice(NamedTuple):
    """Uncached tokens from which the prompt is fetched, None: it is computed here; and whom
    from, in turn."""

    decision: Decision
    threshold: int | None
    candidates: Sequence[PrefillCandidate] = ()

    def where(self, num_prompt_tokens: int) -> str | None:
        """It is computed, if nothing of it is cached."""
        is_fetched = self.threshold is not None and num_prompt_tokens > self.threshold
        return self.candidates[0].address if is_fetched and self.candidates else None


class FetchingAnswerer:
    """Decides, for each request, how long a prompt is worth a hand-off, and whose prefix it
    begins with if it is computed here."""

    def __init__(
        self, engine: AsyncEngine, links: Links, fetcher: Fetcher, cores: Cores | None
    ) -> None:
        self._engine = engine
        self._links = links
        self._fetcher = fetcher
        self._cores = cores
        self._under_way = UnderWay()
        self.decisions = Counter(dict.fromkeys(DECISIONS, 0))

    def submit(self, submitted: SubmittedRequest) -> FetchingStream:
        request, route = submitted.request, submitted.route
        num_prompt = len(request.prompt_token_ids)
        choice = self._choose(request, route)
        self.decisions[choice.decision] += 1
        local = route.local_prefill is not LocalPrefill.NEVER
        prefix = None
        if local:
            prefix = self._fetcher.prefixes.plan(
                route.sources, num_prompt, self._here().num_held_up
            )
        if choice.threshold is not None or prefix is not None:
            request = replace(
                request,
                fetch_above=choice.threshold,
                prefix=None if prefix is None else prefix.prefix,
            )
            plan = FetchPlan(choice.candidates, route.sources, local, prefix)
            self._fetcher.expect(request, plan)
        share = self._under_way.begin(choice.where(num_prompt), num_prompt, request.params.n)
        return FetchingStream(self._engine.submit(request), self._fetcher, share)

    def _choose(self, request: GenerationRequest, route: Route) -> _Choice:
        if route.local_prefill is LocalPrefill.ALWAYS:
            return _Choice(Decision(False, Reason.ASKED), None)
        prospects = [self._prospect(candidate) for candidate in route.prefill_workers]
        turn = in_turn(prospects)
        if route.local_prefill is LocalPrefill.NEVER:
            asked = Decision(True, Reason.ASKED)
            return _Choice(asked, 0, [route.prefill_workers[i] for i in turn])
        num_prompt = len(request.prompt_token_ids)
        threshold = fetch_above(self._here(), prospects, num_prompt)
        willing = [route.prefill_workers[i] for i in turn if not prospects[i].shunned]
        return _Choice(decide(prospects, threshold, num_prompt), threshold, willing)

    def _here(self) -> Station:
        token_s = self._engine.engine.step_times.whole_prompt_token_s
        under_way = self._under_way
        held_up = num_held_up(under_way.num_running, under_way.num_queued, under_way.num_fetched)
        return Station(under_way.num_queued_tokens(None) * token_s, token_s, held_up)

    def _prospect(self, candidate: PrefillCandidate) -> Prospect:
        link = self._links.known(candidate.address)
        if link is None:
            return Prospect(shunned=self._links.is_avoided(candidate.address))
        if candidate.incarnation not in (0, link.incarnation):
            return Prospect()
        age_s, load = time.monotonic() - link.heard_at, link.load
        if load is None:
            return Prospect(shunned=is_shunned(age_s, False, False))
        times = load.step_times
        token_s = whole_prompt_token_s(
            times.base_s, times.prompt_token_s, times.sequence_s, times.prompt_pair_s
        )
        # What was sent there since it reported, or waits for blocks here, is not in its report.
        queued = max(load.num_queued_tokens, self._under_way.num_queued_tokens(candidate.address))
        return Prospect(
            Station(queued * token_s, token_s),
            _hand_off_s(link),
            is_shunned(age_s, load.draining, bool(load.unhealthy)),
            contend(self._cores, Cores.read(load.cores)),
        )


def _hand_off_s(link: Link) -> float:
    """What a prompt's last block cannot hide behind the computation."""
    blob_bytes = sum(group.blob_bytes for group in link.description.format.groups)
    return ROUND_TRIPS * link.figures.latency_s + blob_bytes / max(1.0, link.figures.bytes_per_s)
