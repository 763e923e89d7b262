"""A decode worker elsewhere, and the model it serves as text and HTTP see it."""

from dataclasses import dataclass

from cluster.metrics.page import Collects
from cluster.served_model import ServedModel
from cluster.session import SessionBackend
from cluster.text_side import TextSide
from engine.errors import ConfigError, EngineError
from engine.fingerprint import differs
from protos.worker_pb2 import WorkerDescription


@dataclass(frozen=True)
class RemoteEngine:
    backend: SessionBackend
    text: TextSide

    @property
    def collectors(self) -> list[Collects]:
        """The worker has a page of its own."""
        return []

    async def start(self) -> ServedModel:
        """UnavailableError if the worker cannot be reached; ConfigError if its model cannot be
        the one whose tokenizer we have."""
        description = await self.backend.start()
        try:
            check_same_model(self.text, description)
        except EngineError:
            await self.backend.stop()
            raise
        limits = description.limits
        return self.text.model(limits.max_model_len, limits.vocab_size)

    async def stop(self) -> None:
        await self.backend.stop()


def check_same_model(text: TextSide, description: WorkerDescription) -> None:
    """ConfigError where the worker's model cannot be the one that the text is for."""
    ours, theirs = text.source.name, description.model
    fingerprint = description.format.fingerprint
    other = differs(fingerprint, text.source)
    if other is not None:
        raise ConfigError(
            "model", f"{ours!r} here is {other}, the worker's {theirs!r} is {fingerprint}"
        )
    here, there = text.tokenizer.vocab_size, description.limits.vocab_size
    if there < here:
        raise ConfigError(
            "model",
            f"the tokenizer of {ours!r} knows {here} tokens, the worker's {theirs!r} {there}",
        )
