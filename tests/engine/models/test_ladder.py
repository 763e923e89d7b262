"""Steps that are repeated by a recording of more rows than they have sequences."""

from collections.abc import Callable, Sequence

import pytest
import torch

from engine.kernels.interface import Replay, StepBatch
from engine.kernels.reference import ReferenceKernels
from engine.models.describe import describe
from engine.models.load import load_model
from engine.models.replayed import ON_A_LADDER, ReplayedDecoder, rung
from kv_cache.slab import KvSlab
from tests.engine.models.cases import NATIVE_CASES
from tests.engine.models.conftest import SavedModels
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


def test_rungs_hold_their_sequences_and_are_few() -> None:
    sizes = [rung(count) for count in range(1, 257)]
    assert all(size >= count for count, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert all(rung(size) == size for size in sizes)
    assert len(set(sizes)) == 19
    assert max(size / count for count, size in enumerate(sizes, 1) if count > 32) < 1.25
