"""From an engine's updates to parts of text: one prompt's choices, or several prompts'."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

from cluster.openai.plan import AnswerOptions, Prompt
from engine.errors import EngineError
from engine.generation_stream import GenerationStream
from engine.request import ChoiceDelta, FinishReason, GenerationUpdate, PromptReport
from engine.sampling import SamplingParams
from engine.step import TokenLogprobs
from engine.text.detokenizer import Detokenizer, TextOptions
from engine.text.pieces import Pieces


class ChoicePart(NamedTuple):
    """What is new of one choice, counted over all prompts of the request."""

    choice: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] | None
    offsets: Sequence[int] | None  # where the tokens' text begins in the choice's
    finish_reason: FinishReason | None
    stop_reason: str | int | None  # the stop string or stop token of the request that ended it


class Generation:
    """One prompt's choices as they grow, `pieces` saying what tokens show. Ends a choice at its
    stop strings."""

    def __init__(
        self,
        stream: GenerationStream,
        pieces: Pieces,
        prompt: Prompt,
        params: SamplingParams,
        options: AnswerOptions,
        first_choice: int = 0,
    ) -> None:
        self.prompt = prompt
        self.report: PromptReport | None = None  # set by the first update
        self.num_output_tokens = 0
        self._stream = stream
        self._first_choice = first_choice
        self._hides_stop_token = not params.include_stop_str_in_output
        self._shows_nothing = options.echo_only
        self._track_offsets = options.logprobs is not None
        text_options = TextOptions(
            params.stop, params.include_stop_str_in_output, params.min_tokens, self._track_offsets
        )
        self._running = {
            choice: Detokenizer(pieces, prompt.token_ids, text_options)
            for choice in range(params.n)
        }

    async def parts(self) -> AsyncGenerator[list[ChoicePart], None]:
        async for update in self._stream:
            parts = self._read(update)
            if parts:
                yield parts
            if not self._running:
                self.close()  # others of its request may go on for long
                return
        raise EngineError(f"generation ended with {len(self._running)} choices unfinished")

    def close(self) -> None:
        self._stream.close()

    def _read(self, update: GenerationUpdate) -> list[ChoicePart]:
        if update.prompt is not None:
            self.report = update.prompt
        parts = []
        for delta in update.deltas:
            detokenizer = self._running.get(delta.choice)
            if detokenizer is not None:  # else ended here by a stop string
                parts.append(self._read_delta(delta, detokenizer))
        return parts

    def _read_delta(self, delta: ChoiceDelta, detokenizer: Detokenizer) -> ChoicePart:
        if self._shows_nothing:
            del self._running[delta.choice]
            choice = self._first_choice + delta.choice
            return ChoicePart(choice, "", (), (), (), FinishReason.LENGTH, None)
        token_ids, finish = delta.token_ids, delta.finish_reason
        hides_last = finish is FinishReason.STOP and self._hides_stop_token
        text, num_tokens, stop = detokenizer.push(token_ids[:-1] if hides_last else token_ids)
        if stop is None and hides_last:
            detokenizer.pass_over()
            num_tokens += 1
        if finish is not None and stop is None:
            rest = detokenizer.finish()
            text, stop = text + rest.text, rest.stop
        if stop is not None:
            if finish is None:
                self._stream.stop_choice(delta.choice)
            finish = FinishReason.STOP
        if finish is not None:
            del self._running[delta.choice]
        self.num_output_tokens += num_tokens
        return ChoicePart(
            self._first_choice + delta.choice,
            text,
            token_ids if num_tokens == len(token_ids) else token_ids[:num_tokens],
            delta.logprobs[:num_tokens] if delta.logprobs is not None else None,
            detokenizer.last_offsets(num_tokens) if self._track_offsets else None,
            finish,
            stop if stop is not None else delta.stop_token_id,
        )


def all_parts(generations: Sequence[Generation]) -> AsyncGenerator[list[ChoicePart], None]:
    """Whatever comes next of any of them. The first failure ends all."""
    return generations[0].parts() if len(generations) == 1 else _merged(generations)


async def _merged(generations: Sequence[Generation]) -> AsyncGenerator[list[ChoicePart], None]:
    # Bounded, so that a client that does not read holds up its own streams alone.
    queue: asyncio.Queue[list[ChoicePart] | Exception | None]
    queue = asyncio.Queue(maxsize=2 * len(generations))
    pumps = [asyncio.create_task(_pump(generation, queue)) for generation in generations]
    try:
        num_running = len(pumps)
        while num_running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()


async def _pump(
    generation: Generation, queue: asyncio.Queue[list[ChoicePart] | Exception | None]
) -> None:
    try:
        async for parts in generation.parts():
            await queue.put(parts)
    except Exception as error:  # noqa: BLE001  whatever it is, the reader raises it
        await queue.put(error)
    else:
        await queue.put(None)
