"""A prefill engine and a decode engine side by side; blobs are copied from slab to slab."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.handoff import (
    Delivered,
    FetchOutcome,
    PromptChunk,
    PromptEnd,
    Reservation,
)
from engine.request import (
    ChoiceSoFar,
    FinishReason,
    GenerationRequest,
    HandOver,
    PromptReport,
    RequestId,
)
from engine.sampling import SamplingParams
from engine.scheduler.outbox import StepOutput
from engine.step import TokenLogprobs
from kv_cache.handover import HeldRange


@dataclass
class Answer:
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    prompt: PromptReport | None = None

    def take(self, output: StepOutput, name: str) -> None:
        assert not output.failures
        update = output.updates.get(RequestId(name))
        if update is None:
            return
        assert update.prompt is None or self.prompt is None, "the prompt is reported once"
        self.prompt = update.prompt or self.prompt
        for delta in update.deltas:
            self.tokens.setdefault(delta.choice, []).extend(delta.token_ids)
            self.logprobs.setdefault(delta.choice, []).extend(delta.logprobs or ())
            if delta.finish_reason is not None:
                self.reasons[delta.choice] = delta.finish_reason

    def check_equal(self, other: "Answer") -> None:
        """All but what was cached, and the last bits of logprobs: chunks round differently."""
        assert self.tokens == other.tokens
        assert self.reasons == other.reasons
        assert self.prompt is not None
        assert other.prompt is not None
        assert (self.prompt.logprobs is None) == (other.prompt.logprobs is None)
        ours, theirs = list(self.prompt.logprobs or ()), list(other.prompt.logprobs or ())
        for choice in other.tokens:
            ours += self.logprobs[choice]
            theirs += other.logprobs[choice]
        for mine, yours in zip(ours, theirs, strict=True):
            check_logprobs(mine, yours)


def check_logprobs(mine: TokenLogprobs | None, yours: TokenLogprobs | None) -> None:
    if mine is None or yours is None:
        assert mine is yours
        return
    assert (mine.token_id, mine.rank) == (yours.token_id, yours.rank)
    assert mine.logprob == pytest.approx(yours.logprob, abs=1e-4)
    assert [t for t, _ in mine.top] == [t for t, _ in yours.top]
    assert [x for _, x in mine.top] == pytest.approx([x for _, x in yours.top], abs=1e-4)


@dataclass
class Handed:
    """All that the prefill side has told of a prompt."""

    chunks: list[PromptChunk] = field(default_factory=list)
    end: PromptEnd | None = None


class Pair:
    """Fetches whatever the decode engine reserves."""

    def __init__(self, prefill: Engine, decode: Engine, draw: bool = True) -> None:
        self.prefill = prefill
        self.decode = decode
        self.draw = draw
        self.handed: list[Handed] = []
        self.reservations: list[Reservation] = []

    def run(
        self,
        jobs: dict[str, tuple[list[int], SamplingParams]],
        sent: tuple[ChoiceSoFar, ...] = (),
        fetch_above: int = 0,
    ) -> dict[str, Answer]:
        answers = {name: Answer() for name in jobs}
        for name, (prompt, params) in jobs.items():
            self.decode.add(
                GenerationRequest(
                    RequestId(name), prompt, params, fetch_above=fetch_above, sent=sent
                )
            )
        waiting: list[Reservation] = []
        while self.decode.has_work or waiting:
            for reservation in waiting:
                outcome = self.fetch(reservation)
                self.take(self.decode.end_fetch(reservation, outcome)[0], answers)
                self.decode.check_integrity()
            output = self.decode.step()
            waiting = list(output.reservations)
            self.reservations += waiting
            self.take(output, answers)
            self.decode.check_integrity()
        return answers

    def take(self, output: StepOutput, answers: dict[str, Answer]) -> None:
        for name, answer in answers.items():
            answer.take(output, name)

    def fetch(self, reservation: Reservation) -> FetchOutcome:
        """Has the prompt computed, and copies chunk by chunk while it is."""
        draw = self.draw and reservation.draw
        self.prefill.add(
            GenerationRequest(
                reservation.request_id,
                list(reservation.token_ids),
                reservation.params,
                hand_over=HandOver(reservation.held.start, draw),
            )
        )
        handed = Handed()
        self.handed.append(handed)
        ready = reservation.held.start
        while self.prefill.has_work:
            output = self.prefill.step()
            assert not output.failures
            for news in output.hand_overs.get(reservation.request_id, ()):
                if isinstance(news, PromptEnd):
                    handed.end = news
                else:
                    handed.chunks.append(news)
                    assert news.held.start == ready
                    ready = news.held.end
                    copy_blobs(self.prefill, news.held, self.decode, reservation.held)
            self.prefill.check_integrity()
        assert handed.end is not None
        assert ready == len(reservation.token_ids)
        for chunk in handed.chunks:
            self.prefill.drop_holds(chunk.held.holds)
        self.prefill.check_integrity()
        entries = [entry for chunk in handed.chunks for entry in chunk.prompt_logprobs]
        end = handed.end
        return Delivered(end.first_tokens, entries, num_cached_tokens=end.num_cached_tokens)

    def check_idle(self) -> None:
        for engine in (self.prefill, self.decode):
            engine.check_integrity()
            assert all(group.held == 0 for group in engine.cache_stats().groups)


def copy_blobs(source: Engine, chunk: HeldRange, target: Engine, wanted: HeldRange) -> None:
    """Every blob of the chunk goes to the entry of the same number."""
    places = {
        (run.group, run.first_entry + i): block
        for run in wanted.runs
        for i, block in enumerate(run.blocks)
    }
    for run in chunk.runs:
        for i, block in enumerate(run.blocks):
            place = places[run.group, run.first_entry + i]
            ours, theirs = target._runner._slabs[run.group], source._runner._slabs[run.group]
            ours.blob(place).copy_(theirs.blob(block))


def dtype_of(format: str) -> str:
    """For an engine with compiled kernels and such a cache: one for each, as they are compiled for
    a type and a format together, some 8 s of CPU time."""
    return "float32" if format == "fp8_e4m3" else "bfloat16"


def make_engine(folder: str, **knobs: Any) -> Engine:
    base: dict[str, Any] = {
        "dtype": "float32",
        "block_size": 16,
        "max_model_len": 192,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 4 << 20,
        "num_threads": 1,
        "max_pause_s": 1000.0,  # or a step that waited for a core has prompts cut to less
    }
    return Engine.create(EngineConfig(model=folder, **{**base, **knobs}))
