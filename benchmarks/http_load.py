"""A closed loop of streaming completions over HTTP, the clock read at every piece of an answer."""

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Answer:
    first_s: float  # from the request to its first piece
    last_s: float
    num_tokens: int

    @property
    def token_s(self) -> float:
        """After the first one."""
        return (self.last_s - self.first_s) / max(1, self.num_tokens - 1)


@dataclass(frozen=True)
class LoadFigures:
    tokens_per_s: float
    mean_first_s: float
    median_first_s: float
    median_token_s: float


async def load(
    url: str, model: str, prompts: Sequence[list[int]], num_output: int, concurrency: int
) -> LoadFigures:
    """Every prompt once, so many at a time."""
    waiting = list(prompts)
    answers: list[Answer] = []
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:

        async def work() -> None:
            while waiting:
                answers.append(await _ask(client, url, model, waiting.pop(0), num_output))

        started = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(concurrency)))
        total_s = time.perf_counter() - started
    return LoadFigures(
        tokens_per_s=sum(a.num_tokens for a in answers) / total_s,
        mean_first_s=statistics.mean(a.first_s for a in answers),
        median_first_s=statistics.median(a.first_s for a in answers),
        median_token_s=statistics.median(a.token_s for a in answers),
    )


async def _ask(
    client: httpx.AsyncClient, url: str, model: str, prompt: list[int], num_output: int
) -> Answer:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    first = last = 0.0
    num_tokens = 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            now = time.perf_counter() - started
            piece: dict[str, Any] = json.loads(line.removeprefix("data: "))
            if piece.get("usage"):
                num_tokens = piece["usage"]["completion_tokens"]
            if piece.get("choices") and piece["choices"][0]["text"]:
                first, last = first or now, now
    if num_tokens != num_output:
        raise RuntimeError(f"{num_tokens} tokens came, {num_output} were asked for")
    return Answer(first, last, num_tokens)
