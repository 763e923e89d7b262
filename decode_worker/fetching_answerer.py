"""Requests answered by one engine, their prompts computed here or fetched, whichever is sooner."""

from dataclasses import replace
from typing import Self

from decode_worker.answerer import LocalPrefill, Route, SubmittedRequest
from decode_worker.policy import Station, fetch_above
from engine.async_engine import AsyncEngine
from engine.async_streams import EngineStream
from engine.generation_stream import GenerationStream
from engine.request import GenerationRequest, GenerationUpdate
from kv_transfer.link import Link
from kv_transfer.links import Links
from prefill_worker.fetching import Fetcher, FetchPlan
from prefill_worker.prefix_cost import ROUND_TRIPS
from protos.handoff_pb2 import PrefixSource


class FetchingStream:
    """An engine's stream whose prompt may be on its way from another worker."""

    def __init__(self, stream: EngineStream, fetcher: Fetcher) -> None:
        self._stream = stream
        self._fetcher = fetcher

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerationUpdate:
        return await anext(self._stream)

    def stop_choice(self, choice: int) -> None:
        self._stream.stop_choice(choice)

    def close(self) -> None:
        """What is being fetched stops being fetched."""
        self._stream.close()
        self._fetcher.forget(self._stream.request_id)


class FetchingAnswerer:
    """Decides, for each request, how long a prompt is worth a hand-off, and whose prefix it
    begins with if it is computed here."""

    def __init__(self, engine: AsyncEngine, links: Links, fetcher: Fetcher) -> None:
        self._engine = engine
        self._links = links
        self._fetcher = fetcher

    def submit(self, submitted: SubmittedRequest) -> GenerationStream:
        request, route = submitted.request, submitted.route
        threshold = self._threshold(request, route)
        sources = [PrefixSource(**source._asdict()) for source in route.sources]
        local = route.local_prefill is not LocalPrefill.NEVER
        prefix = None
        if local:
            num_prompt = len(request.prompt_token_ids)
            prefix = self._fetcher.prefixes.plan(sources, num_prompt, self._engine.num_open)
        if threshold is None and prefix is None:
            return self._engine.submit(request)
        request = replace(
            request, fetch_above=threshold, prefix=None if prefix is None else prefix.prefix
        )
        self._fetcher.expect(request, FetchPlan(route.prefill_workers, sources, local, prefix))
        return FetchingStream(self._engine.submit(request), self._fetcher)

    def _threshold(self, request: GenerationRequest, route: Route) -> int | None:
        """Uncached tokens from which the prompt is fetched; None: it is computed here."""
        match route.local_prefill:
            case LocalPrefill.NEVER:
                return 0
            case LocalPrefill.ALWAYS:
                return None
        if not route.prefill_workers:
            return None
        link = self._links.known(route.prefill_workers[0].address)
        if link is None or link.load is None:
            return 0  # nothing is known yet, and asking makes it known
        return fetch_above(
            self._here(), _there(link), _hand_off_s(link), len(request.prompt_token_ids)
        )

    def _here(self) -> Station:
        engine = self._engine.engine
        token_s = engine.step_times.whole_prompt_token_s
        return Station(0.0, token_s, self._engine.num_open)


def _there(link: Link) -> Station:
    assert link.load is not None
    token_s = link.load.step_times.prompt_token_s
    return Station(link.load.num_queued_tokens * token_s, token_s)


def _hand_off_s(link: Link) -> float:
    """What a prompt's last block cannot hide behind the computation."""
    blob_bytes = sum(group.blob_bytes for group in link.description.format.groups)
    return ROUND_TRIPS * link.figures.latency_s + blob_bytes / max(1.0, link.figures.bytes_per_s)
