"""An engine in this process, and the model it serves as text and HTTP see it.

Importing this module is cheap; torch comes with the first engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.served_model import ServedModel
from engine.config import EngineConfig
from engine.model_source import resolve_model
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine.async_engine import AsyncEngine


@dataclass(frozen=True)
class LocalEngine:
    backend: AsyncEngine
    model: ServedModel


def load_local_engine(config: EngineConfig, names: Sequence[str] = ()) -> LocalEngine:
    """Loads everything; the tokenizer first, which fails sooner than the weights.

    `names` are what the model is served as; by default its own.
    """
    source = resolve_model(
        config.model, config.revision, config.download_dir, weights=config.load_format != "dummy"
    )
    tokenizer = Tokenizer.from_folder(source.folder)
    template = ChatTemplate.from_folder(source.folder, tokenizer.special_tokens)

    from engine.async_engine import AsyncEngine
    from engine.engine import Engine

    engine = Engine.create(config)
    info = engine.info
    model = ServedModel(
        names=tuple(names) or (source.name,),
        root=source.name,
        tokenizer=tokenizer,
        chat_template=template,
        max_model_len=info.model.max_model_len,
        vocab_size=info.model.vocab_size,
        defaults=info.defaults,
    )
    return LocalEngine(AsyncEngine(engine, config.stall_timeout_s), model)
