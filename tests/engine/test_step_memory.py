"""What is kept free for a step on a GPU is what its tensors take, counted on a CPU."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from engine.kernels.triton.kernels import TritonKernels
from engine.kernels.triton.launch import Launch
from engine.model_source import resolve_model
from engine.models.describe import describe
from engine.models.load import load_model
from engine.sampler.interface import Draws, History
from engine.sampler.table import SamplingTable
from engine.sampler.triton import TritonSampler
from engine.sampling import SamplingParams
from engine.step_memory import FIXED_BYTES, SAMPLING_BYTES, row_elements, step_bytes
from kv_cache.layout import KV_FORMATS, BlockLayout
from kv_cache.slab import KvSlab
from tests.engine.kernels.cases import step_batch
from tests.engine.models_on_disk import make_tiny

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="a GPU's allocator keeps counts of its own"
)


def peak_bytes(run: Callable[[], object]) -> int:
    """Of what torch allocates meanwhile."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return int(np.cumsum(sizes).max())


@torch.inference_mode()
@pytest.mark.parametrize("mlp_size", [24, 512])  # attention is the wider part, and the MLP
def test_activations_of_a_step(
    tmp_path: Path, mlp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are not run: the interpreter keeps what the last ones were given."""
    monkeypatch.setattr(Launch, "run", lambda launch: None)
    make_tiny("llama", tmp_path, intermediate_size=mlp_size)
    source, num_tokens = resolve_model(str(tmp_path)), 60
    model = describe(source)
    loaded = load_model(source, model, TritonKernels(num_programs=2), torch.float32, CPU)
    (group,) = model.groups
    slab = KvSlab.allocate(BlockLayout(group, 16, KV_FORMATS["fp32"]), 6, CPU)
    batch, _ = step_batch([(num_tokens, num_tokens)], [[1, 2, 3, 4]], 16)
    expected = num_tokens * row_elements(model) * 4
    assert 0.8 * expected < peak_bytes(lambda: loaded.forward(batch, [slab])) <= expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_draw_takes_for_each_logit(dtype: torch.dtype) -> None:
    """Of requests that edit what they can, and report."""
    rows, vocab = 4, 4096
    slots = np.arange(rows, dtype=np.int32)
    params = SamplingParams(
        repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={3: 2.0}, logprobs=3
    )
    edited, plain = SamplingTable(rows, vocab), SamplingTable(rows, vocab)
    for slot in range(rows):
        edited.enter(slot, params, slot, 0, 2)
        plain.enter(slot, SamplingParams(logprobs=3), slot, 0, 2)
    history = History(torch.ones(rows, 9, dtype=torch.int32), torch.full((rows,), 9).int())
    logits = torch.randn(rows, vocab).to(dtype)
    mask = torch.full((rows, vocab // 32), -1, dtype=torch.int32)
    most = 0
    for table in (edited, plain):
        sampler = TritonSampler(table)
        for bits in (None, mask):
            taken = peak_bytes(lambda: sampler.sample(logits, Draws(slots, slots), history, bits))  # noqa: B023
            most = max(most, taken)
        most = max(most, peak_bytes(lambda: sampler.token_logprobs(logits, history.num_tokens, 3)))  # noqa: B023
    assert 0.8 * SAMPLING_BYTES < most / (rows * vocab) <= SAMPLING_BYTES


def test_it_follows_from_the_shapes(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    model = describe(resolve_model(str(tmp_path)))
    fixed = step_bytes(model, 2, 0, 0)
    assert fixed == FIXED_BYTES
    for_tokens = step_bytes(model, 2, 4000, 200) - step_bytes(model, 2, 2000, 200)
    assert for_tokens == 2000 * row_elements(model) * 2
    rows = {n: step_bytes(model, 2, 2000, n) - n * row_elements(model) * 2 for n in (1, 128, 256)}
    assert rows[1] == rows[128], "a prompt's logprobs take as many rows at a time"
    assert rows[256] - rows[128] == 128 * model.vocab_size * (2 + SAMPLING_BYTES)
