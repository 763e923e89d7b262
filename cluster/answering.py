"""Carries out a plan: submits its prompts, and writes the answer as it comes."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from cluster.backend import Submit
from cluster.drawn import new_request_id
from cluster.http_exchange import DONE, HttpExchange
from cluster.openai.events import EventWriter, dump
from cluster.openai.generation import ChoicePart, Generation, all_parts
from cluster.openai.plan import Plan
from cluster.openai.wording import Json, WholeChoice, Wording
from cluster.served_model import ServedModel
from engine.request import GenerationRequest, RequestId

# Wording this many tokens' logprobs takes some milliseconds of the event loop.
_FEW_LOGPROBS = 256
# Submitting prompts of so many tokens takes a millisecond; beside its tokens, as long as this many
# more takes a request by itself, each of its choices, and each stop string of a choice.
_FEW_TOKENS = 4096
_OF_REQUEST, _OF_CHOICE, _OF_STOP = 700, 50, 16


class Answer:
    """One response, streamed or whole; single use."""

    def __init__(
        self, plan: Plan, wording: Wording, model: ServedModel, exchange: HttpExchange
    ) -> None:
        self._plan = plan
        self._wording = wording
        self._exchange = exchange
        self._id = f"{wording.id_prefix}-{new_request_id()}"
        self._envelope: Json = {
            "id": self._id,
            "object": wording.chunk_name if plan.options.stream else wording.object_name,
            "created": int(time.time()),
            "model": model.names[0],
        }
        self._writer = EventWriter(
            self._envelope, wording, usage_in_events=plan.options.include_usage
        )
        options = plan.options
        self._text_only = wording.is_plain and not (
            options.return_token_ids or options.continuous_usage or options.logprobs is not None
        )
        self._echoes_logprobs = options.echo and options.logprobs is not None
        self._tells_prompts = options.echo or options.return_token_ids
        self._opened: set[int] = set()
        self._generations: list[Generation] = []

    async def write(self, submit: Submit, timeout_s: float) -> None:
        try:
            await self._submit(submit, timeout_s)
            if self._plan.options.stream:
                await self._write_events()
            else:
                await self._write_whole()
        finally:
            for generation in self._generations:
                generation.close()

    async def _submit(self, submit: Submit, timeout_s: float) -> None:
        """Others get their turns between the prompts."""
        plan, wording = self._plan, self._wording
        num_tokens = 0
        for number, prompt in enumerate(plan.prompts):
            name = RequestId(f"{self._id}-{number}")
            request = plan.request_of(number, name, timeout_s, self._exchange.caller)
            stream = submit(request)
            first = number * plan.params.n
            self._generations.append(
                Generation(stream, wording.pieces, prompt, plan.params, plan.options, first)
            )
            num_tokens += _cost(request)
            if num_tokens >= _FEW_TOKENS:
                num_tokens = 0
                await asyncio.sleep(0)

    async def _write_events(self) -> None:
        """The headers wait for the first token, so that a refusal has its own status."""
        started, frames = False, b""
        num_open = len(self._plan.prompts) * self._plan.params.n
        async with aclosing(all_parts(self._generations)) as news:
            async for parts in news:
                if not started:
                    started = True
                    await self._exchange.start_events()
                frames = b""  # the last ones go with the end
                for some in self._runs(parts):
                    if frames:
                        await self._exchange.send_events(frames)
                    if self._echoes_logprobs and self._opens_long(some):
                        frames = await asyncio.to_thread(self._all_frames, some)
                    else:
                        frames = self._all_frames(some)
                num_open -= sum(part.finish_reason is not None for part in parts)
                if not num_open:
                    break
                if frames:
                    await self._exchange.send_events(frames)
        await self._exchange.send_events(frames + self._end(), last=True)

    def _end(self) -> bytes:
        if self._plan.options.include_usage:
            return self._writer.event([], self._usage()) + DONE
        return DONE

    def _runs(self, parts: Sequence[ChoicePart]) -> Sequence[Sequence[ChoicePart]]:
        """What is sent at once. Each choice begins with its prompt, where that is told: many times
        a long one may be more than there is memory."""
        if self._tells_prompts and self._opens(parts):
            return [[part] for part in parts]
        return [parts]

    def _opens_long(self, parts: Sequence[ChoicePart]) -> bool:
        return self._opens(parts) and self._num_prompt_logprobs > _FEW_LOGPROBS

    def _opens(self, parts: Sequence[ChoicePart]) -> bool:
        return any(part.choice not in self._opened for part in parts)

    def _all_frames(self, parts: Sequence[ChoicePart]) -> bytes:
        return b"".join([self._frames(part) for part in parts])

    def _frames(self, part: ChoicePart) -> bytes:
        opening = b"" if part.choice in self._opened else self._open(part.choice)
        if self._text_only and part.finish_reason is None:
            return opening + self._writer.text(part.choice, part.text) if part.text else opening
        choice = self._wording.delta(part)
        if _says_nothing(choice):
            return opening
        usage = self._usage() if self._plan.options.continuous_usage else None
        return opening + self._writer.event([choice], usage)

    def _open(self, choice: int) -> bytes:
        beside = None if self._opened else self._wording.beside_choices(self._generations)
        self._opened.add(choice)
        opening = self._wording.opening(self._generation_of(choice), choice)
        return b"" if opening is None else self._writer.event([opening], beside=beside)

    async def _write_whole(self) -> None:
        wholes = [WholeChoice() for _ in self._plan.prompts for _ in range(self._plan.params.n)]
        async with aclosing(all_parts(self._generations)) as news:
            async for parts in news:
                for part in parts:
                    wholes[part.choice].add(part)
        async with aclosing(self._pieces(wholes)) as pieces:
            await self._exchange.send_long_json(pieces)

    async def _pieces(self, wholes: Sequence[WholeChoice]) -> AsyncGenerator[bytes, None]:
        """Choice by choice: `dump` lets no other thread run before its end, and all of them,
        each with its prompt, may be more than there is memory."""
        num_logprobs = self._num_prompt_logprobs + sum(len(whole.logprobs) for whole in wholes)
        takes_long = num_logprobs > _FEW_LOGPROBS
        yield dump(self._envelope)[:-1].encode()
        before, of_prompt = b',"choices":[', b""
        for choice, whole in enumerate(wholes):
            if choice % self._plan.params.n == 0:
                of_prompt = await _made(takes_long, self._of_prompt, choice)
            yield before
            yield await _made(takes_long, self._whole, choice, whole)
            yield of_prompt
            before = b","
        yield b"]"
        yield await _made(takes_long, self._beside)

    def _whole(self, choice: int, whole: WholeChoice) -> bytes:
        """Without its end, which `_of_prompt` is."""
        words = self._wording.whole(self._generation_of(choice), whole.part(choice))
        return dump(words)[:-1].encode()

    def _of_prompt(self, choice: int) -> bytes:
        return _rest(self._wording.of_prompt(self._generation_of(choice)))

    def _beside(self) -> bytes:
        beside = self._wording.beside_choices(self._generations)
        return _rest({"usage": self._usage(), **beside})

    @property
    def _num_prompt_logprobs(self) -> int:
        """As often as they are told: to every choice of a prompt."""
        reports = [generation.report for generation in self._generations]
        told = [report.logprobs or () for report in reports if report is not None]
        return self._plan.params.n * sum(map(len, told))

    def _generation_of(self, choice: int) -> Generation:
        return self._generations[choice // self._plan.params.n]

    @property
    def num_output_tokens(self) -> int:
        return sum(generation.num_output_tokens for generation in self._generations)

    def _usage(self) -> Json:
        num_prompt, num_output = self._plan.num_prompt_tokens, self.num_output_tokens
        reports = [generation.report for generation in self._generations]
        num_cached = sum(report.num_cached_tokens for report in reports if report is not None)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": num_cached},
            **self._wording.beside_usage(),
        }


def _cost(request: GenerationRequest) -> int:
    """Of submitting it, in tokens of a prompt."""
    params = request.params
    of_choices = params.n * (_OF_CHOICE + _OF_STOP * len(params.stop))
    num_tokens = len(request.prompt_token_ids) + params.num_named_tokens
    return _OF_REQUEST + num_tokens + of_choices


async def _made(takes_long: bool, make: Callable[..., bytes], *arguments: Any) -> bytes:
    if takes_long:
        return await asyncio.to_thread(make, *arguments)
    return make(*arguments)


def _rest(fields: Json) -> bytes:
    """How an object goes on and ends that has these fields as well."""
    return f",{dump(fields)[1:]}".encode() if fields else b"}"


def _says_nothing(choice: Json) -> bool:
    """A chat's text may wait for what follows it."""
    return (
        choice.get("delta") == {}
        and choice["finish_reason"] is None
        and choice["logprobs"] is None
        and not choice.get("token_ids")
    )
