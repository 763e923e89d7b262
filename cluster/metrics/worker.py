"""A worker's figures: what its node, its fetcher and its exchange keep. On its event loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import Metric

from cluster.metrics.engine import EngineCollector
from cluster.metrics.families import counter, counters, gauge, gauges, histograms
from cluster.metrics.page import Collects
from kv_transfer.tally import ENDS

if TYPE_CHECKING:
    from decode_worker.worker import DecodeWorker
    from kv_transfer.exchange import Exchange
    from prefill_worker.fetching import Fetcher
    from prefill_worker.node import Node


def worker_collectors(node: Node) -> list[Collects]:
    from decode_worker.worker import DecodeWorker

    collectors: list[Collects] = [
        EngineCollector(node.engine.engine),
        NodeCollector(node),
        ExchangeCollector(node.exchange),
        FetchCollector(node.fetcher),
    ]
    if isinstance(node, DecodeWorker):
        collectors.append(DecodeCollector(node))
    return collectors


class NodeCollector:
    def __init__(self, node: Node) -> None:
        self._node = node

    def collect(self) -> Iterator[Metric]:
        node = self._node
        yield gauge("draining", "1 of a worker that takes nothing new.", node.draining)
        yield gauge("healthy", "0 of one that is to be replaced.", node.problem() is None)
        yield gauge("queued_prompt_tokens", "To be computed for others.", node.num_queued_tokens)


class ExchangeCollector:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def collect(self) -> Iterator[Metric]:
        yield from self._pulls()
        yield from self._leases()
        yield from self._links()

    def _pulls(self) -> Iterator[Metric]:
        pulls = self._exchange.pulls
        yield counters(
            "handoffs",
            "Hand-offs that were pulled, by how they ended.",
            ["connector", "end"],
            {(name, end): tally.ends[end] for name, tally in pulls.items() for end in ENDS},
        )
        for name, text, values in (
            ("handoff_bytes", "Bytes that were pulled.", [t.num_bytes for t in pulls.values()]),
            (
                "handoff_hidden_bytes",
                "Of them, those that were there before the prompt was computed.",
                [t.num_hidden_bytes for t in pulls.values()],
            ),
            ("handoff_descriptors", "Blobs that were read.", [t.num_blobs for t in pulls.values()]),
        ):
            by_connector = zip(pulls, values, strict=True)
            yield counters(name, text, ["connector"], {(c,): n for c, n in by_connector})
        yield histograms(
            "handoff_post_seconds",
            "Starting a hand-off's reads.",
            "connector",
            [(name, tally.post_s) for name, tally in pulls.items()],
        )
        yield histograms(
            "handoff_transfer_seconds",
            "From a hand-off's first read to the end of its last.",
            "connector",
            [(name, tally.transfer_s) for name, tally in pulls.items()],
        )
        yield histograms(
            "handoff_exposed_seconds",
            "Of that, what came after the prompt was computed.",
            "connector",
            [(name, tally.exposed_s) for name, tally in pulls.items()],
        )

    def _leases(self) -> Iterator[Metric]:
        holder, quarantine = self._exchange.holder, self._exchange.quarantine
        tally = holder.tally
        yield gauge("leases", "Hand-offs that are being served.", holder.num_leases)
        yield counter("leases_granted", "Those that ever were.", tally.num_leases)
        yield counters(
            "handoff_commits",
            "What a holder said when all was read.",
            ["verdict"],
            {("held",): tally.num_commits, ("refused",): tally.num_refused_commits},
        )
        yield gauge("quarantined_reads", "Reads that never ended.", quarantine.num_reads)
        yield gauge("quarantined_blocks", "Blocks that they may write to.", quarantine.num_blocks)
        yield counter("quarantines", "Reads that ever were in quarantine.", quarantine.num_ever)

    def _links(self) -> Iterator[Metric]:
        links = self._exchange.links.live()
        kinds = Counter((link.connector, link.pool.transport) for link in links)
        yield gauges("links", "Peers that are read from.", ["connector", "transport"], kinds)
        yield gauges(
            "link_bytes_per_second",
            "What a link moves, measured on large reads.",
            ["connector", "peer"],
            {(link.connector, link.address): link.figures.bytes_per_s for link in links},
        )
        yield gauges(
            "link_latency_seconds",
            "Of a link's smallest read.",
            ["connector", "peer"],
            {(link.connector, link.address): link.figures.latency_s for link in links},
        )


class FetchCollector:
    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    def collect(self) -> Iterator[Metric]:
        yield counters(
            "fetches",
            "Prompts and prefixes that were to come from elsewhere, by what came of it.",
            ["outcome"],
            {(end.value,): number for end, number in self._fetcher.ends.items()},
        )
        yield counter(
            "prefix_tokens_pulled", "Of prefixes, alone.", self._fetcher.num_prefix_tokens
        )


class DecodeCollector:
    def __init__(self, worker: DecodeWorker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        sessions, decisions = self._worker.sessions, self._worker.answerer.decisions
        yield gauge("sessions", "Ingresses that are connected.", sessions.num_sessions)
        yield counters(
            "prefill_decisions",
            "Where prompts were to be computed, and why.",
            ["where", "reason"],
            {
                ("remote" if remote else "local", reason.value): number
                for (remote, reason), number in decisions.items()
            },
        )
