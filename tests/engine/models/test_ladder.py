"""Steps that are repeated by a recording of more rows than they have sequences."""

from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch

from engine.kernels.interface import AttentionSpec, GroupBatch, Replay, StepBatch
from engine.kernels.reference import ReferenceKernels
from engine.kernels.triton.tiles import prefill_tiles
from engine.models.describe import describe
from engine.models.load import load_model
from engine.models.replayed import ON_A_LADDER, ReplayedDecoder, rung
from engine.sizing import DEFAULT_BLOCK_SIZE
from kv_cache.layout import KV_FORMATS, BlockLayout
from kv_cache.slab import KvSlab
from tests.engine.models.cases import NATIVE_CASES
from tests.engine.models.conftest import SavedModels
from tests.engine.models.driver import Driver
from tests.engine.models.test_replayed import decoded

CPU, FP32 = torch.device("cpu"), torch.float32


class RecordingKernels(ReferenceKernels):
    """Repeats as a CUDA graph does: the same calls, their result in the same place."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.num_replays = 0

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay | None]:
        result = run()
        self.rows.append(result.shape[0])

        def replay() -> None:
            self.num_replays += 1
            result.copy_(run())

        return result, replay


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rows_without_a_sequence_change_nothing(saved_models: SavedModels, name: str) -> None:
    saved = saved_models(next(c for c in NATIVE_CASES if c.name.startswith(name)))
    kernels = RecordingKernels()
    plain = load_model(saved.source, describe(saved.source), ReferenceKernels(), FP32, CPU)
    assert isinstance(plain, ReplayedDecoder)
    model = ReplayedDecoder(plain._decoder, kernels, ON_A_LADDER)
    ours = decoded(model, saved, FP32)
    assert kernels.rows == [4, 2]  # three sequences and two, recorded when seen again
    assert kernels.num_replays == 12 + 5 + 4 - 2 * 2
    torch.testing.assert_close(ours, decoded(plain, saved, FP32), rtol=0, atol=1e-4)


def test_steps_over_a_cache_that_has_the_place_of_another_are_others(
    saved_models: SavedModels,
) -> None:
    """As a GPU's memory is given out again, to a cache of another format."""
    saved = saved_models(next(c for c in NATIVE_CASES if c.name.startswith("llama")))
    description = describe(saved.source)
    plain = load_model(saved.source, description, ReferenceKernels(), FP32, CPU)
    assert isinstance(plain, ReplayedDecoder)
    answers = []
    for model in (ReplayedDecoder(plain._decoder, RecordingKernels(), ON_A_LADDER), plain):
        wide, narrow = Driver(model, description), Driver(model, description, format="int8")
        ((there,), (slab,)) = wide.slabs, narrow.slabs
        place = there.data.view(torch.int8)[: slab.data.numel()]
        narrow.slabs = [KvSlab(slab.layout, place)]
        answers.append([greedy_steps(driver, saved.prompts[0]) for driver in (wide, narrow)])
    for ours, expected in zip(*answers, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


def greedy_steps(driver: Driver, prompt: Sequence[int]) -> torch.Tensor:
    for slab in driver.slabs:
        slab.data.zero_()
    sequence = driver.start(prompt)
    rows = driver.step([(sequence, len(prompt))])
    for _ in range(5):
        sequence.tokens.append(int(rows[-1][-1].argmax()))
        rows += driver.step([(sequence, 1)])
    return torch.cat(rows)


class PreparedDecoder(ReplayedDecoder):
    """Made ready for the slabs that its first step brings, as an engine does at its start."""

    def forward(
        self, batch: StepBatch, slabs: Sequence[KvSlab], wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not self._steps:
            before = [slab.data.clone() for slab in slabs]
            self.prepare(slabs, 3)
            assert all(map(torch.equal, before, (slab.data for slab in slabs)))
        return super().forward(batch, slabs, wanted)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_steps_recorded_ahead_serve_the_first_ones(saved_models: SavedModels, name: str) -> None:
    saved = saved_models(next(c for c in NATIVE_CASES if c.name.startswith(name)))
    kernels = RecordingKernels()
    plain = load_model(saved.source, describe(saved.source), ReferenceKernels(), FP32, CPU)
    assert isinstance(plain, ReplayedDecoder)
    ours = decoded(PreparedDecoder(plain._decoder, kernels, ON_A_LADDER), saved, FP32)
    assert kernels.rows == [4, 2, 1]  # largest first, before any step
    assert kernels.num_replays == 12 + 5 + 4
    torch.testing.assert_close(ours, decoded(plain, saved, FP32), rtol=0, atol=1e-4)


class NotingKernels(RecordingKernels):
    """How many queries attention was asked for at once, beside those of one token each."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: set[int] = set()

    def attention(
        self,
        q: torch.Tensor,
        spec: AttentionSpec,
        slab: KvSlab,
        layer: int,
        batch: StepBatch,
        group: GroupBatch,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if batch.num_seqs > batch.num_decode:
            self.lengths.add(batch.max_query_len)
        return super().attention(q, spec, slab, layer, batch, group, sinks)


def test_no_prompt_wants_tiles_that_were_not_wanted_before_it(saved_models: SavedModels) -> None:
    """A user would wait for a compiler; a long prompt's are wanted by what an engine warms up
    with."""
    saved = saved_models(next(c for c in NATIVE_CASES if c.name.startswith("llama")))
    kernels = NotingKernels()
    model = load_model(saved.source, describe(saved.source), kernels, FP32, CPU)
    assert isinstance(model, ReplayedDecoder)
    layout = BlockLayout(describe(saved.source).groups[0], 16, KV_FORMATS["fp32"])
    slab = KvSlab.allocate(layout, 2, CPU)
    ReplayedDecoder(model._decoder, kernels, ON_A_LADDER).prepare([slab], 1)
    warmed_up = kernels.lengths | {4 * DEFAULT_BLOCK_SIZE["cuda"] + 1}
    for members, width, itemsize, quantised in product(
        (1, 2, 4, 5, 8, 32), (64, 96, 128, 256), (2, 4), (False, True)
    ):
        wanted, there = (
            {prefill_tiles(n * members, width, width, itemsize, quantised) for n in lengths}
            for lengths in (range(2, 600), warmed_up)
        )
        assert wanted == there


def test_rungs_hold_their_sequences_and_are_few() -> None:
    sizes = [rung(count) for count in range(1, 257)]
    assert all(size >= count for count, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert all(rung(size) == size for size in sizes)
    assert len(set(sizes)) == 19
    assert max(size / count for count, size in enumerate(sizes, 1) if count > 32) < 1.25
