"""What passes between an engine and whoever carries a prompt's cache to or from another one.

Every HeldRange that comes out of an engine is the receiver's: it gives the holds of a prompt
chunk back with `drop_holds`, and a reservation with `end_fetch`, once each, whatever happened
to the request meanwhile.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.errors import EngineError
from engine.request import PromptTimes, RequestId
from engine.sampling import SamplingParams
from engine.step import TokenLogprobs
from kv_cache.handover import HeldRange
from kv_cache.transfers import TransferHold


class FirstToken(NamedTuple):
    """The token after the prompt, of one choice."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class PromptChunk(NamedTuple):
    """The next part of a prompt that is handed over.

    Ranges follow each other without a gap from the asked first token to the prompt's end, and
    may be empty. `prompt_logprobs` are of the next prompt tokens, from the second one on.
    """

    held: HeldRange
    prompt_logprobs: Sequence[TokenLogprobs] = ()


class PromptEnd(NamedTuple):
    """All of the prompt has been announced; the request is over. One token a choice, or none."""

    first_tokens: tuple[FirstToken, ...]
    num_cached_tokens: int  # of the prompt: neither computed here for it, nor by another for it
    times: PromptTimes = PromptTimes()


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks that wait for the cache of `token_ids`, from `held.start` to `held.end`.

    That is their end, or with `of_prefix` the end of a prefix that is cached elsewhere. The
    blocks are written by transfers alone until `end_fetch`, which is called once for each
    reservation. `attempt` is its identity: a request can have several, one after another, or at
    once where its choices go on from different tokens.
    """

    request_id: RequestId
    attempt: int
    token_ids: Sequence[int]  # the prompt and what was sent
    held: HeldRange
    params: SamplingParams  # to ask with: with the seed, and prompt logprobs if still wanted
    draw: bool  # whether the other side can draw the first tokens, one a choice
    of_prefix: bool = False

    @property
    def num_cached_tokens(self) -> int:
        return self.held.start


@dataclass(frozen=True, slots=True)
class Delivered:
    """Every byte is there and was confirmed.

    Without first tokens they are drawn here. `prompt_logprobs`, where they were wanted, has an
    entry for each prompt token from the second on. `num_cached_tokens` of the prompt were
    cached before the other side began, there or where it pulled them from. Of a prefix, which
    brings none of these, less may have arrived: the tokens up to `end`, a block's end.
    """

    first_tokens: Sequence[FirstToken] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    end: int | None = None  # None: all that was reserved
    num_cached_tokens: int = 0
    times: PromptTimes = PromptTimes()  # of the other side, and of the transfer

    def end_of(self, reservation: Reservation) -> int:
        return reservation.held.end if self.end is None else self.end


@dataclass(frozen=True, slots=True)
class Refetch:
    """It came to nothing; the request returns to its place in the queue and reserves again."""


@dataclass(frozen=True, slots=True)
class ComputeHere:
    """It came to nothing and is not tried again; the request returns to its place in the queue.

    After a prompt's fetch it is computed here; after a prefix's it goes on without that.
    """


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """It came to nothing, and so does the request."""

    error: EngineError


FetchOutcome = Delivered | Refetch | ComputeHere | FetchFailed


class UnfinishedReads(NamedTuple):
    """Blocks of a reservation into which something may still be written."""

    group: int
    blocks: tuple[int, ...]


Quarantined = tuple[TransferHold, ...]
