"""Carries out the plan of a /v1/responses request: what a chat would answer, in items."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Literal

from cluster.backend import Submit
from cluster.drawn import new_request_id
from cluster.http_exchange import HttpExchange
from cluster.openai.chat_wording import ChatWording
from cluster.openai.errors import ApiError
from cluster.openai.events import dump
from cluster.openai.generation import ChoicePart, Generation
from cluster.openai.plan import Plan
from cluster.openai.responses.output import Output
from cluster.openai.responses.request import ResponsesRequest
from cluster.openai.wording import Json
from cluster.served_model import ServedModel
from engine.request import FinishReason, RequestId


class ResponseAnswer:
    """One response, streamed or whole; single use."""

    def __init__(
        self, plan: Plan, request: ResponsesRequest, model: ServedModel, exchange: HttpExchange
    ) -> None:
        uid = new_request_id()
        self._plan = plan
        self._exchange = exchange
        self._wording = wording = ChatWording(model.chat_format, plan.options)
        self._output = Output(
            uid, request.known_tools, wording.call_id, seals_reasoning=request.seals_reasoning
        )
        self._response = _begun(f"resp_{uid}", plan, request, model)
        self._generation: Generation | None = None
        self._status: Literal["completed", "incomplete"] = "completed"
        self._num_events = 0

    async def write(self, submit: Submit, timeout_s: float) -> None:
        plan = self._plan
        name = RequestId(f"{self._response['id']}-0")
        asked = plan.request_of(0, name, timeout_s, self._exchange.caller)
        pieces = self._wording.pieces
        generation = Generation(submit(asked), pieces, plan.prompts[0], plan.params, plan.options)
        self._generation = generation
        try:
            if plan.options.stream:
                await self._write_events(generation)
            else:
                await self._write_whole(generation)
        finally:
            generation.close()

    @property
    def num_output_tokens(self) -> int:
        return 0 if self._generation is None else self._generation.num_output_tokens

    async def _write_events(self, generation: Generation) -> None:
        """The headers wait for the first token, so that a refusal has its own status."""
        started = False
        async with aclosing(generation.parts()) as news:
            async for parts in news:
                events = [event for part in parts for event in self._read(part)]
                if not started:
                    started = True
                    await self._exchange.start_events(self._last_words)
                    kinds = ("response.created", "response.in_progress")
                    events = [{"type": kind, "response": self._response} for kind in kinds] + events
                if events:
                    await self._send(events)
        response = self._end()
        last = [{"type": f"response.{self._status}", "response": response}]
        frames = await asyncio.to_thread(self._frames, last)  # all of it once more
        await self._exchange.send_events(frames, last=True)

    async def _send(self, events: Sequence[Json]) -> None:
        """The three that end a text have all of its logprobs, which takes long: others get their
        turns between them."""
        if self._plan.options.logprobs is None or not _any_ends(events):
            await self._exchange.send_events(self._frames(events))
            return
        for event in events:
            await self._exchange.send_events(await asyncio.to_thread(self._frames, [event]))

    async def _write_whole(self, generation: Generation) -> None:
        async with aclosing(generation.parts()) as news:
            async for parts in news:
                for part in parts:
                    self._read(part)
        encoded = await asyncio.to_thread(dump, self._end())
        await self._exchange.send_json(encoded.encode())

    def _read(self, part: ChoicePart) -> list[Json]:
        logprobs = self._wording.logprobs(part)
        news = self._wording.read(part)
        events = self._output.push(news, logprobs["content"] if logprobs else ())
        if part.finish_reason is not None:
            is_cut = part.finish_reason is FinishReason.LENGTH
            self._status = "incomplete" if is_cut else "completed"
            events += self._output.finish(self._status)
        return events

    def _end(self) -> Json:
        """The whole response."""
        response, generation = self._response, self._generation
        assert generation is not None
        response["status"] = self._status
        if self._status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        num_input, num_output = self._plan.num_prompt_tokens, generation.num_output_tokens
        num_cached = 0 if generation.report is None else generation.report.num_cached_tokens
        details = self._wording.beside_usage().get("completion_tokens_details", {})
        response["output"] = self._output.items
        response["usage"] = {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens", 0)},
            "total_tokens": num_input + num_output,
        }
        return response

    def _last_words(self, error: ApiError) -> bytes:
        """Of a stream that fails: an event that the official client raises, and the response's."""
        if self._output.items:
            self._output.finish("incomplete")
        said = error.fields()
        failed = {**self._response, "status": "failed", "output": self._output.items}
        failed["error"] = {"code": "server_error", "message": said["message"]}
        events: list[Json] = [
            {**said, "type": "error", "error": said},
            {"type": "response.failed", "response": failed},
        ]
        return self._frames(events)

    def _frames(self, events: Sequence[Json]) -> bytes:
        frames = []
        for event in events:
            kind = event["type"]
            numbered = {**event, "sequence_number": self._num_events}
            frames.append(f"event: {kind}\ndata: {dump(numbered)}\n\n")
            self._num_events += 1
        return "".join(frames).encode()


def _any_ends(events: Sequence[Json]) -> bool:
    return any(event["type"].endswith(".done") for event in events)


def _begun(response_id: str, plan: Plan, request: ResponsesRequest, model: ServedModel) -> Json:
    text, reasoning = request.text, request.reasoning
    form: Json = {"type": "text"}
    if text is not None and text.format is not None:
        form = text.format.model_dump(by_alias=True, exclude_none=True)
    many = request.parallel_tool_calls is not False and not model.chat_format.calls_once
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "model": model.names[0],
        "output": [],
        "parallel_tool_calls": many,
        "previous_response_id": None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": plan.params.temperature,
        "text": {"format": form},
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": plan.params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
    }
