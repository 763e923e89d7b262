"""What a holder needs of an engine: prompts computed chunk by chunk, blocks held and let go."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kv_cache.handover import HeldRange
from kv_cache.transfers import TransferHold
from protos.generation_pb2 import TokenLogprobs
from protos.handoff_pb2 import Ask, FirstToken


class ReadyChunk(NamedTuple):
    """Tokens whose blobs are there, held for the puller from now on."""

    held: HeldRange
    prompt_logprobs: Sequence[TokenLogprobs] = ()


class ReadyEnd(NamedTuple):
    """Nothing more comes. `tokens` has one for each choice, or none."""

    tokens: Sequence[FirstToken]
    num_cached_tokens: int
    queued_s: float = 0.0
    prefill_s: float = 0.0


class PromptStream(Protocol):
    """One prompt on its way, read by one task.

    Waiting and taking are apart so that a task that is cancelled never loses a chunk, whose
    blocks would then be held by nobody.
    """

    async def wait(self) -> None:
        """Until there is something to take."""
        ...

    def take(self) -> ReadyChunk | ReadyEnd | None:
        """The next news, None while there is none; its holds are the caller's from here on.
        `Refused` for whatever keeps the prompt from its end."""
        ...

    def close(self) -> None:
        """Nobody reads any more: the prompt is dropped, with all that was not taken.
        Idempotent."""
        ...


class PromptSource(Protocol):
    """An engine that computes prompts for others, or at least hands out what it has."""

    def next_turn(self) -> int:
        """Grows from call to call as long as the engine's thread is not stuck."""
        ...

    def open(self, ask: Ask) -> PromptStream:
        """The ask is checked by whoever computes it. Never blocks, never raises."""
        ...

    def predict_s(self) -> float:
        """Until a prompt that arrives now has its first chunk."""
        ...

    def turn_s(self) -> float:
        """What the longest turn should take."""
        ...

    def drop(self, holds: Sequence[TransferHold]) -> None:
        """Lets go. Never blocks."""
        ...
