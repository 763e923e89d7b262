"""An engine that says what a script tells it, and a small model to serve with it."""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Self

from cluster.served_model import ServedModel
from engine.errors import EngineError, QueueFullError, UnavailableError
from engine.generation_defaults import GenerationDefaults
from engine.request import (
    ChoiceDelta,
    FinishReason,
    GenerationRequest,
    GenerationUpdate,
    PromptReport,
)
from engine.step import TokenLogprobs
from engine.text.chat_template import ChatTemplate
from engine.text.special_tokens import SpecialTokens
from engine.text.tokenizer import Tokenizer
from tests.engine.text.small_tokenizers import byte_level, wrapped

ANSWER = "The quick brown fox 🦊 jumps over\n\nthe lazy dog."
MAX_MODEL_LEN = 512
CACHED = 3
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'bad' %}"
    "{{ raise_exception('no such role') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What a stream does next: tells news, fails, or waits for something.
Step = GenerationUpdate | EngineError | Awaitable[object]
Script = Callable[[GenerationRequest], Iterator[Step]]


@functools.cache
def small_tokenizer() -> Tokenizer:
    return wrapped(byte_level())


@functools.cache
def template() -> ChatTemplate:
    """To compile it takes longer than to serve a request."""
    special = SpecialTokens({"bos_token": "<s>"}, (), ())
    return ChatTemplate({"default": TEMPLATE}, special, "tests")


def small_model(defaults: GenerationDefaults | None = None, *, chat: bool = True) -> ServedModel:
    tokenizer = small_tokenizer()
    return ServedModel(
        names=("small", "tiny"),
        root="tests",
        tokenizer=tokenizer,
        chat_template=template() if chat else None,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=tokenizer.vocab_size + 10,
        defaults=defaults or GenerationDefaults(),
    )


def logprobs_of(token_id: int, num_top: int, rank: int = 1) -> TokenLogprobs:
    """Numbers that tell the tokens apart: -id/1000 for the token, less for its neighbours."""
    top = [(token_id + i, -token_id / 1000 - i) for i in range(num_top)]
    return TokenLogprobs(token_id, -token_id / 1000, rank, tuple(top))


def answer_tokens(text: str = ANSWER, tokenizer: Tokenizer | None = None) -> list[int]:
    tokenizer = tokenizer or small_tokenizer()
    return [*tokenizer.encode(text), tokenizer.eos_token_id or 0]


def delta(
    request: GenerationRequest,
    choice: int,
    ids: Sequence[int],
    finish: FinishReason | None = None,
) -> ChoiceDelta:
    num_top = request.params.logprobs
    logprobs = None if num_top is None else [logprobs_of(i, num_top) for i in ids]
    return ChoiceDelta(choice, list(ids), logprobs, finish)


def say(text: str = ANSWER, per_step: int = 1, tokenizer: Tokenizer | None = None) -> Script:
    """Every choice says the same text, a few tokens a step, within max_tokens."""

    def script(request: GenerationRequest) -> Iterator[Step]:
        params, tokens = request.params, answer_tokens(text, tokenizer)
        limit = params.max_tokens or MAX_MODEL_LEN
        finish = FinishReason.STOP if len(tokens) <= limit else FinishReason.LENGTH
        tokens = tokens[:limit]
        report: PromptReport | None = prompt_report(request)
        for start in range(0, len(tokens), per_step):
            ids = tokens[start : start + per_step]
            end = finish if start + per_step >= len(tokens) else None
            deltas = [delta(request, choice, ids, end) for choice in range(params.n)]
            yield GenerationUpdate(deltas, report)
            report = None

    return script


def prompt_report(request: GenerationRequest) -> PromptReport:
    num_top = request.params.prompt_logprobs
    if num_top is None:
        return PromptReport(CACHED)
    entries = [logprobs_of(i, num_top, rank=2) for i in request.prompt_token_ids[1:]]
    return PromptReport(CACHED, [None, *entries])


class FakeStream:
    def __init__(self, request: GenerationRequest, script: Script) -> None:
        self.request = request
        self.num_closed = 0
        self.closed = asyncio.Event()
        self.stopped: list[int] = []
        self._steps = script(request)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerationUpdate:
        for step in self._steps:
            if isinstance(step, EngineError):
                raise step
            if isinstance(step, GenerationUpdate):
                await asyncio.sleep(0)
                return step
            await step
        raise StopAsyncIteration

    def stop_choice(self, choice: int) -> None:
        self.stopped.append(choice)

    def close(self) -> None:
        self.num_closed += 1
        self.closed.set()


class FakeBackend:
    def __init__(self, script: Script | None = None) -> None:
        self.script = script or say()
        self.streams: list[FakeStream] = []
        self.dead: str | None = None
        self.full: QueueFullError | None = None

    def check_open(self, caller: str) -> None:
        if self.full is not None:
            raise self.full

    def submit(self, request: GenerationRequest) -> FakeStream:
        stream = FakeStream(request, self.script)
        self.streams.append(stream)
        return stream

    def check_health(self) -> None:
        if self.dead is not None:
            raise UnavailableError(self.dead)

    @property
    def last(self) -> GenerationRequest:
        return self.streams[-1].request
