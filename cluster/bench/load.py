"""A load: what is asked of which server, how, and when. `run_load` is the whole of it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from cluster.bench.answer import Tally
from cluster.bench.arrivals import Arrivals, ClosedLoop
from cluster.bench.client import Asking, Client, EndpointKind
from cluster.bench.connection import Address, Clock
from cluster.bench.drive import drive
from cluster.bench.prompts import ChatPrompts, PromptForm, Prompts, TextPrompts, TokenPrompts
from cluster.bench.record import Record
from cluster.bench.talk import Talk
from cluster.bench.target import WordTokens, first_model, word_tokens
from cluster.bench.workload import Conversation, Workload, first_requests
from engine.errors import ConfigError

TIMEOUT_S = 600.0
_TOKENS_PER_WORD = 1.3  # of English, where the server cannot be asked
_WARM_UP_STREAMS = 4
_LEAST_DIFFERENT = 16  # token ids that prompts are drawn from, where nobody says which


@dataclass(frozen=True)
class Load:
    """`model` and `token_ids` are found out where they are not given; `form` too."""

    url: str
    workload: Workload
    arrivals: Arrivals = ClosedLoop(1)
    num_requests: int | None = None
    duration_s: float | None = None
    num_warm_up: int = 0
    seed: int = 0
    think_s: float = 0.0
    model: str | None = None
    endpoint: EndpointKind = EndpointKind.COMPLETIONS
    form: PromptForm | None = None
    token_ids: Sequence[int] | None = None  # that prompts are drawn from
    timeout_s: float = TIMEOUT_S
    api_key: str | None = field(default=None, repr=False)
    ignore_eos: bool = True
    temperature: float = 0.0
    extra: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """Records are in the order in which their requests ended, their times the clock's."""

    model: str
    form: PromptForm
    records: tuple[Record, ...]
    num_unsent: int
    interrupted: bool
    start_s: float
    gone: bool = False  # the server, which ended a closed loop before its time


class Interrupted(Exception):  # noqa: N818 - nothing is wrong
    """Before anything was asked that could be told of."""


async def run_load(
    load: Load,
    *,
    tally: Tally | None = None,
    stop: asyncio.Event | None = None,
    clock: Clock = time.perf_counter,
) -> Outcome:
    """`stop` ends it before its time: what is under way is given up, and recorded so."""
    client = Client(Address(load.url), clock, api_key=load.api_key, timeout_s=load.timeout_s)
    records: list[Record] = []

    def talk(prompts: Prompts, keep: Callable[[Record], None], tally: Tally) -> Talk:
        return Talk(client, asking, prompts, clock, keep, tally=tally, think_s=load.think_s)

    try:
        preparing = asyncio.ensure_future(_prepare(load, client))
        if await _until(preparing, stop):
            raise Interrupted
        asking, form, words = preparing.result()
        # With other prompts, so that none of what is measured is in a cache.
        warming = talk(_prompts(load, form, words, "warm-up"), _forget, Tally())
        warm_up = _conversations(load, load.num_warm_up)
        warming_up = drive(warm_up, ClosedLoop(_WARM_UP_STREAMS), warming.converse, clock)
        if await _until(warming_up, stop):
            raise Interrupted
        talking = talk(_prompts(load, form, words, "load"), records.append, tally or Tally())
        start_s = clock()
        driving = asyncio.ensure_future(
            drive(
                _conversations(load, load.num_requests),
                load.arrivals,
                talking.converse,
                clock,
                duration_s=load.duration_s,
                seed=load.seed,
            )
        )
        interrupted = await _until(driving, stop)
        gone = not interrupted and not driving.result()
    finally:
        client.close()
    return Outcome(
        asking.model, form, tuple(records), talking.num_unsent, interrupted, start_s, gone
    )


async def _prepare(load: Load, client: Client) -> tuple[Asking, PromptForm, WordTokens]:
    model = load.model or await first_model(client)
    words = None
    if load.token_ids is None:
        words = await word_tokens(client, model)
    form = _form(load, words)
    asking = Asking(
        model,
        load.endpoint,
        ignore_eos=load.ignore_eos,
        temperature=load.temperature,
        return_token_ids=form is PromptForm.TOKENS and load.workload.many_turns,
        extra=load.extra,
    )
    return asking, form, words or WordTokens(tuple(load.token_ids or ()), _TOKENS_PER_WORD)


def _form(load: Load, words: WordTokens | None) -> PromptForm:
    has_ids = load.token_ids is not None or words is not None
    if load.endpoint is EndpointKind.CHAT:
        if load.form is PromptForm.TOKENS or load.token_ids is not None:
            raise ConfigError("prompts", "a chat has no token ids, only text")
        return PromptForm.TEXT
    if load.form is PromptForm.TOKENS and not has_ids:
        raise ConfigError("token_ids", "the server has no /tokenize; say which ids there are")
    few = words is not None and len(words.token_ids) < _LEAST_DIFFERENT
    if words is not None and few and load.form is not PromptForm.TEXT:
        raise ConfigError(
            "token_ids",
            f"the server's tokenizer makes {len(words.token_ids)} different tokens of common words,"
            " so prompts would be alike, and found cached; say which ids there are",
        )
    return load.form or (PromptForm.TOKENS if has_ids else PromptForm.TEXT)


def _prompts(load: Load, form: PromptForm, words: WordTokens, purpose: str) -> Prompts:
    seed = f"{purpose} {load.seed}"
    if load.endpoint is EndpointKind.CHAT:
        return ChatPrompts(seed, 1 / words.per_word)
    if form is PromptForm.TEXT:
        return TextPrompts(seed, 1 / words.per_word)
    return TokenPrompts(words.token_ids, seed)


def _conversations(load: Load, num_requests: int | None) -> Iterator[Conversation]:
    conversations = load.workload.conversations()
    return conversations if num_requests is None else first_requests(conversations, num_requests)


async def _until(work: Awaitable[object], stop: asyncio.Event | None) -> bool:
    """Whether it was stopped before its end."""
    if stop is None:
        await work
        return False
    working = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        interrupted = working.cancel()
    await asyncio.wait([working])
    if not working.cancelled():
        working.result()  # raises what it failed with
    return interrupted


def _forget(record: Record) -> None:
    pass
