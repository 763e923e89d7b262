"""An engine in this process, and the model it serves as text and HTTP see it.

Importing this module is cheap; torch comes with the first engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.metrics.engine import EngineCollector
from cluster.metrics.page import Collects
from cluster.served_model import ServedModel
from cluster.text_side import TextSide, load_text_side
from engine.config import EngineConfig
from engine.models.describe import describe

if TYPE_CHECKING:
    from engine.async_engine import AsyncEngine


@dataclass(frozen=True)
class LocalEngine:
    backend: AsyncEngine
    model: ServedModel

    @property
    def collectors(self) -> list[Collects]:
        return [EngineCollector(self.backend.engine)]

    async def start(self) -> ServedModel:
        self.backend.start()
        return self.model

    async def stop(self) -> None:
        await asyncio.to_thread(self.backend.stop)


def load_local_engine(
    config: EngineConfig,
    names: Sequence[str] = (),
    chat_template: str | None = None,
    check: Callable[[ServedModel], object] | None = None,
) -> LocalEngine:
    """Loads everything; the tokenizer first, which fails sooner than the weights. `check` is called
    between the two, and may raise."""
    text = load_text_side(config, names, chat_template, weights=config.load_format != "dummy")
    if check is not None:
        check(_described(text, config))

    from engine.async_engine import AsyncEngine
    from engine.engine import Engine

    engine = Engine.create(config)
    info = engine.info
    model = text.model(info.model.max_model_len, info.model.vocab_size)
    return LocalEngine(AsyncEngine(engine, config.stall_timeout_s), model)


def _described(text: TextSide, config: EngineConfig) -> ServedModel:
    """By its files, as the engine that loads them will say."""
    model = describe(text.source)
    return text.model(model.length_for(config.max_model_len), model.vocab_size)
