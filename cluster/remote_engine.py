"""A decode worker elsewhere, and the model it serves as text and HTTP see it."""

from dataclasses import dataclass

from cluster.served_model import ServedModel
from cluster.session import SessionBackend
from cluster.text_side import TextSide
from engine.errors import ConfigError
from engine.generation_defaults import read_generation_defaults
from protos.worker_pb2 import Limits


@dataclass(frozen=True)
class RemoteEngine:
    backend: SessionBackend
    text: TextSide

    async def start(self) -> ServedModel:
        """UnavailableError if the worker cannot be reached; ConfigError if its model cannot be
        the one whose tokenizer we have."""
        description = await self.backend.start()
        limits = description.limits
        if limits.vocab_size < self.text.tokenizer.vocab_size:
            await self.backend.stop()
            raise ConfigError("model", _does_not_fit(self.text, description.model, limits))
        defaults = read_generation_defaults(self.text.source.folder)
        return self.text.model(limits.max_model_len, limits.vocab_size, defaults)

    async def stop(self) -> None:
        await self.backend.stop()


def _does_not_fit(text: TextSide, model: str, limits: Limits) -> str:
    return (
        f"the worker's {model!r} knows {limits.vocab_size} tokens and the tokenizer of"
        f" {text.source.name!r} {text.tokenizer.vocab_size}"
    )
