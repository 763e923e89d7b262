"""An answer read by a task of its own."""

import asyncio
from collections.abc import AsyncIterator

from decode_worker.answerer import AnswerStream
from engine.request import GenerationUpdate


async def updates(stream: AnswerStream) -> AsyncIterator[GenerationUpdate]:
    news = asyncio.Event()
    stream.listen(news.set)
    while True:
        news.clear()
        while (update := stream.take()) is not None:
            yield update
        if stream.has_ended:
            return
        await news.wait()
