"""A model runner under plans of our own: steps of any batch and context, no prefill before."""

from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.inputs import FORMATS, random_slab
from engine.grammar.table import GrammarTable
from engine.models.interface import CausalModel, ModelDescription
from engine.runner import ModelRunner
from engine.sampler.table import SamplingTable
from engine.sampler.triton import TritonSampler
from engine.sampling import SamplingParams
from engine.slots import SlotTable
from engine.staging import Staging
from engine.step import EnteringSequence, Slice, StepPlan, StepResult
from kv_cache.layout import KV_FORMATS, BlockLayout
from kv_cache.slab import KvSlab

BLOCK_SIZE = 64
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


class Rig:
    """Sequences own blocks in random order of a cache that is full of random numbers."""

    def __init__(
        self,
        bench: Bench,
        model: CausalModel,
        description: ModelDescription,
        dtype: torch.dtype,
        num_seqs: int,
        max_len: int,
        slab: KvSlab | None = None,
        format: str | None = None,
    ) -> None:
        """A `slab` that another rig had is used again."""
        (group,) = description.groups
        self._columns = max_len // BLOCK_SIZE + 1
        layout = BlockLayout(group, BLOCK_SIZE, KV_FORMATS[format or FORMATS[dtype]])
        count = num_seqs * self._columns + 1
        self.slab = slab or random_slab(layout, count, bench.device)
        assert self.slab.num_blocks >= count
        self._order = np.random.default_rng().permutation(count - 1) + 1
        self._slots = SlotTable(num_seqs, max_len, BLOCK_SIZE, 1)
        self.model = model
        self._device = bench.device
        parameters = SamplingTable(num_seqs, description.vocab_size)
        self.sampler = TritonSampler(parameters)
        self._runner = ModelRunner(
            model,
            self.sampler,
            parameters,
            self._slots,
            GrammarTable(description.vocab_size, ()),
            [self.slab],
            [],
            (),
        )
        self._step = 0
        self._lens: list[int] = []

    def enter(self, prompts: Sequence[list[int]]) -> None:
        """They take the slots from 0 on. Nothing is computed of them."""
        entering = []
        for slot, prompt in enumerate(prompts):
            own = self._order[slot * self._columns :][: self._columns].tolist()
            entering.append(EnteringSequence(slot, prompt, len(prompt), GREEDY, 0, 0, (own,)))
        self._execute((), 0, tuple(entering))
        self._lens = [len(prompt) for prompt in prompts]

    def decode(self) -> StepResult:
        """One token of each sequence: its last one is computed, the next one drawn."""
        slices = tuple(
            Slice(slot, length - 1, 1, length - 1, (slot,))
            for slot, length in enumerate(self._lens)
        )
        result = self._execute(slices, len(slices))
        self._lens = [length + 1 for length in self._lens]
        return result

    def prefill(self, start: int, end: int) -> StepResult:
        """Tokens of sequence 0; at its prompt's end one is drawn."""
        samples = (0,) if end == self._lens[0] else ()
        return self._execute((Slice(0, start, end - start, start, samples),), 0)

    @torch.inference_mode()
    def logits_after(self, prompt: list[int]) -> torch.Tensor:
        """Of the token that follows."""
        self.enter([prompt])
        one = Slice(0, 0, len(prompt), 0, (0,))
        batch = self._slots.batch([one], 0, Staging(self._device))
        last = torch.tensor([len(prompt) - 1], device=self._device)
        hidden = self.model.forward(batch, [self.slab], last)
        return self.model.logits(hidden)[0].float()

    def _execute(
        self,
        slices: tuple[Slice, ...],
        num_decode: int,
        entering: tuple[EnteringSequence, ...] = (),
    ) -> StepResult:
        self._step += 1
        num_tokens = sum(s.num_tokens for s in slices)
        plan = StepPlan(self._step, slices, num_decode, num_tokens, entering)
        return self._runner.finish(self._runner.launch(plan, lambda: None))
