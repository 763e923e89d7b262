"""Carries out a step's plan on one device: blocks moved, model run, tokens drawn."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.grammar.table import GrammarTable
from engine.kernels.interface import StepBatch
from engine.launched import LaunchedStep
from engine.models.interface import CausalModel
from engine.moves import BlockMoves
from engine.sampler.interface import Draws, History, IntArray, Sampler
from engine.sampler.report import logprob_entries, make_samples
from engine.sampler.table import SamplingTable
from engine.slots import DrawnTokens, SlotTable
from engine.staging import Array, Staging
from engine.step import EnteringSequence, Slice, StepPlan, StepResult, TokenLogprobs
from engine.step_memory import PROMPT_LOGPROB_ROWS
from kv_cache.slab import KvSlab

Rows = npt.NDArray[np.int64]


class ModelRunner:
    """Owns the slot table, the slabs and the model; decides nothing and knows no requests.

    One thread calls. Each plan is launched and then finished, in their order, and before a step
    is finished the next one may be launched: its slices may begin at the tokens that are being
    drawn, and what it enters must not be in the other. A plan of which either call raised may
    have written into the blocks of its own slices, and into nothing else; it writes no more.
    """

    def __init__(
        self,
        model: CausalModel,
        sampler: Sampler,
        parameters: SamplingTable,
        slots: SlotTable,
        grammars: GrammarTable,
        slabs: Sequence[KvSlab],
        host_slabs: Sequence[KvSlab],
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._parameters = parameters
        self._slots = slots
        self._grammars = grammars
        self._slabs = slabs
        self._moves = BlockMoves(slabs, host_slabs)
        self._eos_token_ids = eos_token_ids
        self._device = slabs[0].data.device
        self._staging = Staging(self._device)
        self._history_staging = Staging(self._device)
        self._latest: DrawnTokens | None = None

    @torch.inference_mode()
    def prepare(self) -> None:
        """Before the first plan; may take seconds."""
        self._model.prepare(self._slabs, self._slots.num_slots)

    @torch.inference_mode()
    def launch(self, plan: StepPlan, on_written: Callable[[], None]) -> LaunchedStep:
        """On a GPU the step's work is queued, and is waited for only where a prompt's logprobs
        need it, and what is swapped out; a CPU does it here.

        `on_written`: all that the step writes to the cache is there, and nothing is drawn yet.
        Called only where that is known without waiting for a device.
        """
        try:
            self._moves.issue(plan)
            return self._launch(plan, on_written)
        except BaseException:  # its blocks are others' then, who may write past our stream
            LaunchedStep.without_draws(plan.step, {}, self._device).wait()
            raise
        finally:
            self._moves.wait_for_host()

    def _launch(self, plan: StepPlan, on_written: Callable[[], None]) -> LaunchedStep:
        for sequence in plan.entering:
            self._enter(sequence)
        self._slots.update_tables(plan.updates)
        if not plan.slices:
            return LaunchedStep.without_draws(plan.step, {}, self._device)
        batch = self._slots.batch(plan.slices, plan.num_decode, self._staging, self._latest)
        if any(s.prompt_logprobs is not None for s in plan.slices):
            return self._read_prompts(plan, batch, on_written)
        drawing = [bool(s.samples) for s in plan.slices]
        decodes = batch.num_decode == batch.num_seqs and all(drawing)
        wanted = None if decodes else _ends(plan)[drawing] - 1
        return self._draw(plan, self._forward(batch, wanted, on_written), {})

    def finish(self, launched: LaunchedStep) -> StepResult:
        """Waits for the device: peers read what a step wrote, past our stream, as soon as it is
        said to be done. Then what was drawn is known here."""
        launched.wait()
        draws = launched.draws
        if draws is None:
            return StepResult(launched.step, (), launched.prompt_logprobs)
        drawn = make_samples(draws.sampled, draws.slots, self._parameters)
        failed = drawn.failed_slots
        if draws.follows:
            failed |= self._grammars.accept(s for s in drawn.samples if s.slot not in failed)
        self._slots.fill(draws.slots, draws.places, draws.sampled.token_ids.numpy())
        return StepResult(launched.step, drawn.samples, launched.prompt_logprobs, failed)

    def _enter(self, sequence: EnteringSequence) -> None:
        self._slots.enter(sequence)
        self._parameters.enter(
            sequence.slot,
            sequence.params,
            sequence.seed,
            sequence.choice,
            sequence.num_prompt_tokens,
            self._eos_token_ids,
        )
        output = sequence.token_ids[sequence.num_prompt_tokens :]
        params = sequence.params
        self._grammars.enter(
            sequence.slot,
            sequence.grammar,
            output,
            params.reasoning,
            params.exits,
            params.entries,
        )

    def _forward(
        self, batch: StepBatch, wanted: Rows | None, on_written: Callable[[], None]
    ) -> torch.Tensor:
        rows = None
        if wanted is not None:
            rows = torch.from_numpy(wanted).to(self._device, non_blocking=True)
        hidden = self._model.forward(batch, self._slabs, rows)
        if self._device.type == "cpu":
            on_written()
        return hidden

    def _read_prompts(
        self, plan: StepPlan, batch: StepBatch, on_written: Callable[[], None]
    ) -> LaunchedStep:
        """A step in which some prompt's every token is asked for."""
        hidden, ends = self._forward(batch, None, on_written), _ends(plan)
        prompt_logprobs = {
            s.slot: self._prompt_logprobs(s, hidden[end - s.num_tokens : end])
            for s, end in zip(plan.slices, ends, strict=True)
            if s.prompt_logprobs is not None
        }
        drawing = [bool(s.samples) for s in plan.slices]
        rows = torch.from_numpy(ends[drawing] - 1).to(self._device)
        return self._draw(plan, hidden[rows], prompt_logprobs)

    def _draw(
        self,
        plan: StepPlan,
        hidden: torch.Tensor,  # one row for each slice that draws
        prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]],
    ) -> LaunchedStep:
        drawing = [s.samples for s in plan.slices if s.samples]
        if not drawing:
            return LaunchedStep.without_draws(plan.step, prompt_logprobs, self._device)
        slots = np.array([slot for samples in drawing for slot in samples], np.int32)
        rows = np.arange(len(drawing), dtype=np.int32)
        if len(slots) > len(drawing):
            rows = np.repeat(rows, [len(samples) for samples in drawing])
        logits, draws = self._model.logits(hidden), Draws(slots, rows)
        masks = self._masks(draws)  # while a GPU computes the logits
        sampled = self._sampler.sample(logits, draws, self._history(slots), masks)
        places = self._slots.append(slots)
        self._latest = DrawnTokens(slots, sampled.token_ids)
        follows = self._grammars.follows(slots.tolist())
        return LaunchedStep.drawing(plan.step, prompt_logprobs, slots, places, sampled, follows)

    def _masks(self, draws: Draws) -> torch.Tensor | None:
        masks = self._grammars.masks(draws)
        if masks is None:
            return None
        if complete := self._grammars.complete(draws.slots.tolist()):
            self._parameters.allow_stops(complete)
        return torch.from_numpy(masks).to(self._device, non_blocking=True)

    def _history(self, slots: IntArray) -> History:
        tokens, num_tokens = self._slots.tokens, self._slots.num_tokens
        penalized = bool(self._parameters.rows["penalized"][slots].any())
        if self._device.type != "cpu":
            tokens, num_tokens = self._slots.history(slots, with_tokens=penalized)
        arrays: list[Array] = [tokens, num_tokens]
        late = self._slots.unknown(slots) if penalized else slots[:0]
        if late.size:
            assert self._latest is not None
            places = self._slots.order(self._latest)[late]
            arrays += late.astype(np.int64), num_tokens[late].astype(np.int64) - 1, places
        there, counts, *rest = self._history_staging.put(arrays)
        if late.size:
            assert self._latest is not None
            rows, columns, order = rest
            there[rows, columns] = self._latest.token_ids[order]
        return History(there, counts)

    def _prompt_logprobs(self, part: Slice, hidden: torch.Tensor) -> tuple[TokenLogprobs, ...]:
        assert part.prompt_logprobs is not None
        first = part.start + 1
        last = min(first + part.num_tokens, int(self._slots.num_prompt_tokens[part.slot]))
        targets = self._slots.tokens[part.slot, first:last]
        entries: list[TokenLogprobs] = []
        for start in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            piece = torch.from_numpy(targets[start : start + PROMPT_LOGPROB_ROWS])
            logits = self._model.logits(hidden[start : start + len(piece)])
            logprobs = self._sampler.token_logprobs(
                logits, piece.to(self._device), part.prompt_logprobs
            )
            entries += logprob_entries(logprobs, piece.tolist(), part.prompt_logprobs)
        return tuple(entries)


def _ends(plan: StepPlan) -> Rows:
    """Behind the last token of each slice."""
    return np.cumsum([s.num_tokens for s in plan.slices])
