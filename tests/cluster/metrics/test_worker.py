"""What two workers say of prompts that one reads and the other answers: exact numbers."""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from cluster.metrics.engine import EngineCollector
from cluster.metrics.meter import Meter, RelayCollector, labels_of, process_page
from cluster.metrics.page import Page
from cluster.metrics.worker import worker_collectors
from cluster.relay import Relay
from decode_worker.answerer import LocalPrefill
from decode_worker.policy import Decision, Reason
from engine.sampling import SamplingParams
from kv_transfer.quarantine import Quarantine
from prefill_worker.node import Node
from router.config import RouterConfig
from router.router import Router
from tests.cluster.fakes import small_model
from tests.cluster.metrics.samples import WHOSE, Samples, read, value
from tests.decode_worker.worker_pair import WorkerPair
from tests.engine.models_on_disk import make_tiny
from tests.engine.pair import make_engine
from tests.engine.test_exact import random_prompts
from tests.engine.test_hand_over import answer
from tests.kv_transfer.test_quarantine import unfinished
from tests.waiting import until

PARAMS = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
(PROMPT,) = random_prompts(1, 100, 100, seed=4)
STATES = ("free", "held", "cached", "quarantined")
ENDS = ("done", "not_held", "failed", "cancelled")
DECISIONS = {
    "remote": ("asked", "sooner", "unknown"),
    "local": ("asked", "sooner", "short", "shared", "alone", "shunned"),
}
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"


@pytest_asyncio.fixture
async def pair(tmp_path: Path) -> AsyncIterator[WorkerPair]:
    folder = str(make_tiny("llama", tmp_path).folder)
    pair = await WorkerPair.start(make_engine(folder), make_engine(folder), ("inprocess",))
    yield pair
    await pair.check_idle()
    await pair.stop()


def samples_of(node: Node) -> Samples:
    return read(process_page({}, worker_collectors(node)).render())


def by_source(samples: Samples) -> list[float]:
    return [value(samples, "prompt_tokens_by_source_total", source=one) for one in SOURCES]


async def test_each_token_is_counted_where_it_came_from(pair: WorkerPair) -> None:
    for node in (pair.prefill, pair.decode):
        assert by_source(samples_of(node)) == [0, 0, 0], "the warm-up is nobody's"
    for _ in range(2):
        await pair.ask(PROMPT, PARAMS, LocalPrefill.NEVER)
    prefill, decode = samples_of(pair.prefill), samples_of(pair.decode)
    # The second time the prompt's whole blocks, 96 tokens, are cached on either side.
    assert by_source(decode) == [0, 96, 104]
    assert by_source(prefill) == [104, 96, 0]
    assert value(decode, "drawn_tokens_total") == 4
    assert value(prefill, "drawn_tokens_total") == 2
    assert value(decode, "prefix_cache_queries_total") == 200
    assert value(decode, "prefix_cache_hits_total") == 96


async def test_hand_offs_are_counted_on_both_sides(pair: WorkerPair) -> None:
    await pair.ask(PROMPT, PARAMS, LocalPrefill.NEVER)
    await pair.check_idle()
    prefill, decode = samples_of(pair.prefill), samples_of(pair.decode)
    by = {"connector": "inprocess"}
    assert value(decode, "handoffs_total", end="done", **by) == 1
    assert value(decode, "handoff_descriptors_total", **by) == 7
    blob_bytes = pair.decode.engine.engine.slabs[0].layout.blob_bytes
    assert value(decode, "handoff_bytes_total", **by) == 7 * blob_bytes
    for name in ("post", "transfer", "exposed"):
        assert value(decode, f"handoff_{name}_seconds_count", **by) == 1
    hidden = pair.decode.exchange.pulls["inprocess"].num_hidden_bytes
    assert value(decode, "handoff_hidden_bytes_total", **by) == hidden
    assert value(decode, "links", transport="memcpy", **by) == 1
    assert value(decode, "fetches_total", outcome="delivered") == 1
    states = [value(decode, "kv_cache_blocks", group="0", state=state) for state in STATES]
    total = pair.decode.engine.engine.cache_stats().groups[0].total
    assert states == [total - 6, 0, 6, 0], "the last block of 100 tokens is not whole"
    assert value(decode, "prefill_decisions_total", where="remote", reason="asked") == 1
    assert value(prefill, "leases_granted_total") == 1
    assert value(prefill, "leases") == 0
    assert value(prefill, "handoff_commits_total", verdict="held") == 1
    assert value(prefill, "handoff_commits_total", verdict="refused") == 0


async def test_a_hand_off_that_was_not_held_is_counted_on_both_sides(tmp_path: Path) -> None:
    folder = str(make_tiny("llama", tmp_path).folder)
    engines = make_engine(folder), make_engine(folder)
    pair = await WorkerPair.start(*engines, ("inprocess",), "holder.commit=release")
    told = await pair.ask(PROMPT, PARAMS, LocalPrefill.AUTO)
    assert len(told.tokens[0]) == 3
    await pair.check_idle()
    prefill, decode = samples_of(pair.prefill), samples_of(pair.decode)
    by = {"connector": "inprocess"}
    ends = {end: value(decode, "handoffs_total", end=end, **by) for end in ENDS}
    assert ends == {**dict.fromkeys(ENDS, 0), "not_held": 1}
    assert value(decode, "fetches_total", outcome="computed_here") == 1
    assert value(decode, "prefill_decisions_total", where="remote", reason="unknown") == 1
    assert value(prefill, "handoff_commits_total", verdict="refused") == 1
    assert value(prefill, "handoff_commits_total", verdict="held") == 0
    await pair.stop()


async def test_each_decision_is_counted_by_where_and_why(pair: WorkerPair) -> None:
    every = [(where, reason) for where, reasons in DECISIONS.items() for reason in reasons]
    for number, (where, reason) in enumerate(every, 1):
        pair.decode.answerer.decisions[Decision(where == "remote", Reason(reason))] = number
    page = samples_of(pair.decode)
    for number, (where, reason) in enumerate(every, 1):
        by = {"where": where, "reason": reason}
        assert value(page, "prefill_decisions_total", **by) == number


async def test_a_prompt_is_shown_that_another_worker_is_to_compute(pair: WorkerPair) -> None:
    """While the one that is asked for it is at something else."""
    go_on = threading.Event()
    held = asyncio.ensure_future(pair.prefill.engine.ask(lambda engine: go_on.wait(30)))
    asked = asyncio.ensure_future(pair.ask(PROMPT, PARAMS, LocalPrefill.NEVER))
    try:
        await until(
            lambda: (
                pair.prefill.num_queued_tokens > 0 and pair.decode.engine.engine.num_transfers > 0
            )
        )
        prefill, decode = samples_of(pair.prefill), samples_of(pair.decode)
        assert value(prefill, "queued_prompt_tokens") == 100
        assert value(prefill, "leases") == 1
        assert value(decode, "num_requests_fetching") == 1
        assert value(decode, "kv_cache_reserved_blocks", group="0") == 7
        blocks = {
            state: value(decode, "kv_cache_blocks", group="0", state=state) for state in STATES
        }
        assert blocks == {"free": blocks["free"], "held": 7, "cached": 0, "quarantined": 0}
        share = 7 / (7 + blocks["free"])
        assert value(decode, "kv_cache_usage_perc") == pytest.approx(share)
    finally:
        go_on.set()
    assert await held
    await asked
    decode = samples_of(pair.decode)
    assert value(decode, "num_requests_fetching") == 0
    assert value(decode, "engine_steps_total") == pair.decode.engine.engine.num_steps > 0
    assert value(decode, "engine_step_seconds_total") == pair.decode.engine.engine.steps_s > 0


async def test_a_worker_is_shown_as_it_drains_and_is_to_be_replaced(
    pair: WorkerPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown() -> list[float]:
        page = samples_of(pair.decode)
        names = ("quarantined_reads", "quarantined_blocks", "quarantines_total")
        return [value(page, name) for name in ("draining", "healthy", *names)]

    assert shown() == [0, 1, 0, 0, 0]
    pair.decode.begin_drain()
    quarantine = Quarantine(3, lambda hold: None)
    monkeypatch.setattr(pair.decode.exchange, "quarantine", quarantine)
    one, read, hold = unfinished(1, 2, 3, 4)
    quarantine.keep([one], [hold])
    assert shown() == [1, 0, 1, 4, 1]
    read.finish()
    await until(lambda: not quarantine.num_blocks)
    assert shown() == [1, 1, 0, 0, 1]


def test_an_engine_shows_what_it_evicts_and_plans_ahead(tmp_path: Path) -> None:
    """With room for one of two prompts."""
    folder = str(make_tiny("llama", tmp_path).folder)
    engine = make_engine(folder, kv_cache_memory_bytes=14 * 8192, async_scheduling=True)
    for prompt in random_prompts(2, 150, 150, seed=5):
        answer(engine, prompt, PARAMS)
    page = read(Page({}, [EngineCollector(engine)]).render())
    assert value(page, "kv_cache_evictions_total", group="0") > 0
    assert value(page, "engine_steps_ahead_total") == engine.num_steps_ahead > 0
    assert value(page, "engine_steps_total") == engine.num_steps > engine.num_steps_ahead


async def test_a_link_is_told_with_what_it_moves(
    pair: WorkerPair, caplog: pytest.LogCaptureFixture
) -> None:
    """To the log, to routers and on the page."""
    caplog.set_level(logging.INFO, "kv_transfer.link_maker")
    await pair.ask(PROMPT, PARAMS, LocalPrefill.NEVER)
    (report,) = pair.decode.exchange.link_reports()
    by, page = {"connector": "inprocess", "peer": pair.addresses[0]}, samples_of(pair.decode)
    assert value(page, "link_bytes_per_second", **by) == report.bytes_per_s > 0
    assert value(page, "link_latency_seconds", **by) == report.latency_s > 0
    figures = f"{report.bytes_per_s / 1e9:.2f} GB/s, {report.latency_s * 1e3:.2f} ms"
    assert f"linked to {pair.addresses[0]} by inprocess (memcpy): {figures}" in caplog.messages


async def test_times_of_a_prompt_come_with_its_first_token(pair: WorkerPair) -> None:
    for local in (LocalPrefill.ALWAYS, LocalPrefill.NEVER):
        await pair.forget(pair.prefill, pair.decode)
        answer = await pair.ask(PROMPT, PARAMS, local)
        assert answer.prompt is not None
        times = answer.prompt.times
        assert times is not None
        assert times.prefill_s > 0
        assert (times.transfer_s > 0) is (local is LocalPrefill.NEVER)


def rows() -> set[str]:
    """Names in the first column of the table."""
    lines = DOCS.read_text().splitlines()
    return {line.split("`")[1] for line in lines if line.startswith("| `kvrelay:")}


async def test_what_has_not_happened_is_counted_as_nothing(pair: WorkerPair) -> None:
    """A series that began with its first event would show Prometheus no increase."""
    own, decode = read(relay_page(Counter()).render()), samples_of(pair.decode)
    for reason in ("died", "left", "refused", "stuck"):
        assert value(own, "reroutes_total", reason=reason) == 0
    for reason in ("full", "late"):
        assert value(own, "router_refusals_total", reason=reason) == 0
    for reason in ("remote", "local-sooner", "no-prefill-worker", "policy"):
        assert value(own, "router_placements_total", reason=reason) == 0
    for outcome in ("delivered", "fetched_again", "computed_here", "failed", "cancelled"):
        assert value(decode, "fetches_total", outcome=outcome) == 0
    for end in ENDS:
        assert value(decode, "handoffs_total", connector="inprocess", end=end) == 0
    for where, reasons in DECISIONS.items():
        for reason in reasons:
            assert value(decode, "prefill_decisions_total", where=where, reason=reason) == 0


def relay_page(reroutes: Counter[str], router: Router | None = None) -> Page:
    relay = Relay.__new__(Relay)
    relay.reroutes = reroutes
    relay.router = router or Router(RouterConfig(), Random(0))
    return Meter(small_model(), [RelayCollector(relay)]).page_of("ingress", "i")


# As in vLLM's /metrics, after its own prefix: the kind, and the labels beside the model's.
OF_VLLM: dict[str, tuple[str, set[str]]] = {
    "num_requests_running": ("gauge", set()),
    "num_requests_waiting": ("gauge", set()),
    "kv_cache_usage_perc": ("gauge", set()),
    "prefix_cache_queries": ("counter", set()),
    "prefix_cache_hits": ("counter", set()),
    "num_preemptions": ("counter", set()),
    "prompt_tokens": ("counter", set()),
    "prompt_tokens_by_source": ("counter", {"source"}),
    "generation_tokens": ("counter", set()),
    "request_success": ("counter", {"finished_reason"}),
    "time_to_first_token_seconds": ("histogram", set()),
    "inter_token_latency_seconds": ("histogram", set()),
    "e2e_request_latency_seconds": ("histogram", set()),
    "request_queue_time_seconds": ("histogram", set()),
    "request_prefill_time_seconds": ("histogram", set()),
    "request_decode_time_seconds": ("histogram", set()),
    "request_prompt_tokens": ("histogram", set()),
    "request_generation_tokens": ("histogram", set()),
}


async def test_vllm_s_dashboards_find_what_they_ask_for(pair: WorkerPair) -> None:
    pages = [
        relay_page(Counter()),
        process_page(labels_of("m", "decode", "d"), worker_collectors(pair.decode)),
    ]
    shown = {}
    for page in pages:
        for family in text_string_to_metric_families(page.render().decode()):
            labels = {label for sample in family.samples for label in sample.labels}
            shown[family.name] = (family.type, labels - {*WHOSE, "le"})
    for name, (kind, labels) in OF_VLLM.items():
        assert shown[f"kvrelay:{name}"] == (kind, labels), name


async def test_every_metric_is_explained_and_nothing_else(pair: WorkerPair) -> None:
    own = relay_page(Counter())
    nodes = [process_page(labels_of("m", "p", "r"), worker_collectors(pair.decode))]
    shown = {
        metric.name + ("_total" if metric.type == "counter" else "")
        for page in (own, *nodes)
        for metric in page.collect()
        if metric.name.startswith("kvrelay:")
    }
    assert rows() == shown | {"kvrelay:replica_up"}
