"""What a sampler takes and gives: one signature, three twins (`reference`, `cpu`, `triton`)."""

from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int32]


class DrawStatus(IntEnum):
    """What became of a draw; the token id of one that failed is 0 and means nothing."""

    DRAWN = 0
    NOT_FINITE = 1  # the row of logits holds NaN or +inf, or its processing made one
    NO_CANDIDATE = 2  # masks and bans left no token


class Draws(NamedTuple):
    """Draw i picks a token for `slots[i]` from row `logit_rows[i]`; rows may be drawn from often.

    Both arrays live on the host, where the plan that they come from was made.
    """

    slots: IntArray
    logit_rows: IntArray


class History(NamedTuple):
    """The runner's token table, on the sampler's device; the sampler only reads it."""

    tokens: torch.Tensor  # [slots, max_len] int32, prompt and output so far
    num_tokens: torch.Tensor  # [slots] int32, also the position of the token to draw


class Logprobs(NamedTuple):
    """log_softmax of raw logits at chosen tokens, with the best alternatives beside them."""

    logprob: torch.Tensor  # [n] fp32
    rank: torch.Tensor  # [n] int32, 1 + the number of strictly better tokens
    top_ids: torch.Tensor  # [n, k] int32, best first, equal ones by id
    top_logprobs: torch.Tensor  # [n, k] fp32


class Sampled(NamedTuple):
    """One entry for each draw. `logprobs` has every draw when any of their slots asked."""

    drawn: torch.Tensor  # [2, draws] int32, so that they travel together: token ids and status
    logprobs: Logprobs | None

    @property
    def token_ids(self) -> torch.Tensor:
        return self.drawn[0]

    @property
    def status(self) -> torch.Tensor:
        """Of DrawStatus."""
        return self.drawn[1]


class Sampler(Protocol):
    """Draws tokens by the parameters of a SamplingTable. Holds no state of a sequence."""

    def sample(
        self,
        logits: torch.Tensor,  # [rows, vocab] fp32, bf16 or fp16, contiguous; not changed
        draws: Draws,
        history: History,
        bitmask: torch.Tensor | None = None,  # [rows, ceil(vocab / 32)] int32; bit set: allowed
    ) -> Sampled: ...

    def token_logprobs(
        self,
        logits: torch.Tensor,  # [rows, vocab]
        targets: torch.Tensor,  # [rows] int32
        num_top: int,
    ) -> Logprobs:
        """For prompt logprobs. Working memory may reach a few fp32 copies of `logits`:
        the caller slices long prompts."""
        ...
