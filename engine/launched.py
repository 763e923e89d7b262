"""A step between its launch and its end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine.sampler.interface import IntArray, Logprobs, Sampled
from engine.step import TokenLogprobs

PromptLogprobs = Mapping[int, Sequence[TokenLogprobs]]


class LaunchedDraws(NamedTuple):
    """What is drawn, for whom, and which of their tokens that will be."""

    slots: IntArray
    places: IntArray
    sampled: Sampled  # on the host, and there once the step has been waited for
    follows: bool  # some of it goes into a grammar


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedStep:
    """What the device is at, or has done; it is `ModelRunner.finish`ed once."""

    step: int
    prompt_logprobs: PromptLogprobs
    draws: LaunchedDraws | None
    done: torch.cuda.Event | None  # None on a CPU

    @classmethod
    def without_draws(
        cls, step: int, prompt_logprobs: PromptLogprobs, device: torch.device
    ) -> "LaunchedStep":
        return cls(step, prompt_logprobs, None, _mark(device))

    @classmethod
    def drawing(
        cls,
        step: int,
        prompt_logprobs: PromptLogprobs,
        slots: IntArray,
        places: IntArray,
        sampled: Sampled,
        follows: bool,
    ) -> "LaunchedStep":
        device = sampled.token_ids.device
        draws = LaunchedDraws(slots, places, _to_host(sampled), follows)
        return cls(step, prompt_logprobs, draws, _mark(device))

    def wait(self) -> None:
        """The one synchronisation of a step."""
        if self.done is not None:
            self.done.synchronize()


def _mark(device: torch.device) -> torch.cuda.Event | None:
    if device.type == "cpu":
        return None
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    return done


def _to_host(sampled: Sampled) -> Sampled:
    """From a GPU by one copy, into pinned memory that torch takes back when it is read."""
    if sampled.drawn.device.type == "cpu":
        return sampled
    return unpacked(packed(sampled).to("cpu", non_blocking=True), sampled)


def packed(sampled: Sampled) -> torch.Tensor:
    """All that a step has to tell, one behind the other: every element has 32 bits."""
    if sampled.logprobs is None:
        return sampled.drawn.view(-1)
    return torch.cat([t.view(torch.int32).flatten() for t in (sampled.drawn, *sampled.logprobs)])


def unpacked(memory: torch.Tensor, like: Sampled) -> Sampled:
    """Of the same memory, which may be filled later."""
    tensors = (like.drawn, *(like.logprobs or ()))
    parts = torch.split(memory, [t.numel() for t in tensors])
    drawn, *rest = [
        part.view(t.dtype).view(t.shape) for part, t in zip(parts, tensors, strict=True)
    ]
    return Sampled(drawn, Logprobs(*rest) if rest else None)
