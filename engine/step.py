"""What passes between the scheduler and the model runner: a StepPlan down, a StepResult up.

The runner keeps a table of *slots*, one row for each running sequence: its tokens, its block
tables, its sampling parameters. A plan says what changes in that table and which tokens to
compute, so that a decode step of many sequences carries a few numbers for each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.grammar.interface import CompiledGrammar
from engine.sampling import SamplingParams

GRAMMAR_FAILED = "the grammar: "  # and why, which is of the library's words
NOT_FINITE = "the model's logits are not finite"
NO_TOKEN_LEFT = "no token is left by allowed_token_ids, grammar, logit_bias and min_tokens"


class EnteringSequence(NamedTuple):
    """A sequence takes a slot: admitted, forked, or back from preemption."""

    slot: int
    token_ids: list[int]  # prompt and output so far
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    choice: int
    tables: tuple[list[int], ...]  # one block table for each group; 0 where a block was freed
    grammar: CompiledGrammar | None = None


class TableUpdate(NamedTuple):
    """`block` becomes entry number `entry` of a slot's table."""

    slot: int
    group: int
    entry: int
    block: int


class BlockCopy(NamedTuple):
    """Copies a whole blob inside a group's slab, before anything of the step is written."""

    group: int
    source: int
    target: int


class HostCopy(NamedTuple):
    """Moves a blob between the device's slab and the host's swap space of the same group."""

    group: int
    device_block: int
    host_block: int


class Slice(NamedTuple):
    """Tokens start .. start + num_tokens of the sequence in `slot` are computed in this step.

    Keys and values are written for tokens from `write_start` on; those before it are cached
    already (a whole-prompt hit computes its last token again). `samples` are the slots that
    draw a token from the logits of the slice's last token: none inside a prompt, the own slot
    usually, and those of all choices when a prompt with n > 1 ends.
    """

    slot: int
    start: int
    num_tokens: int
    write_start: int
    samples: tuple[int, ...]
    prompt_logprobs: int | None = None  # alternatives for each prompt token of the slice


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything the runner does in one step, in this order: swap out, copies (in
    theirs), swap in, entering sequences, table updates, slices. One-token slices come first."""

    step: int
    slices: tuple[Slice, ...]
    num_decode: int
    num_tokens: int
    entering: tuple[EnteringSequence, ...] = ()
    updates: tuple[TableUpdate, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    swap_out: tuple[HostCopy, ...] = ()
    swap_in: tuple[HostCopy, ...] = ()


class TokenLogprobs(NamedTuple):
    """Log-probabilities before penalties, temperature and filters; `top` is best first."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely
    top: tuple[tuple[int, float], ...]


class Sample(NamedTuple):
    slot: int
    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The tokens drawn, in the order of the plan's slices and of their samples.

    `prompt_logprobs` has, for every slot that asked, the entries of the tokens
    start + 1 .. start + num_tokens of its slice (those that are prompt tokens). The samples
    of `failed_slots` mean nothing, for the reason given there.
    """

    step: int
    samples: Sequence[Sample]
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]]
    failed_slots: Mapping[int, str] = field(default_factory=dict)
