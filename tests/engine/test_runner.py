"""What of a step on a device has ended when its launch has failed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.grammar.table import GrammarTable
from engine.runner import ModelRunner
from engine.sampler.reference import ReferenceSampler
from engine.sampler.table import SamplingTable
from engine.sampling import SamplingParams
from engine.slots import SlotTable
from engine.staging import Staging
from engine.step import EnteringSequence, Slice, StepPlan
from kv_cache.layout import KV_FORMATS, BlockLayout, KvGroup
from kv_cache.slab import KvSlab

LAYOUT = BlockLayout(KvGroup((0, 1), 2, (16, 16)), 16, KV_FORMATS["bf16"])


def test_a_step_that_cannot_be_launched_writes_no_more_when_it_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its blocks are free then, and a peer may fill them past the device's order. The device has no
    memory, and its events tell when they are waited for."""
    log: list[str] = []

    class Event:
        def record(self) -> None:
            log.append("after all that is queued")

        def synchronize(self) -> None:
            log.append("waited for")

    def forward(*_: Any) -> torch.Tensor:
        log.append("layers are queued")
        return torch.zeros(1, 8)

    def logits(_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("the device is full")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Staging, "put", lambda _, arrays: [torch.from_numpy(a) for a in arrays])
    model: Any = SimpleNamespace(forward=forward, logits=logits)
    parameters = SamplingTable(1, 32)
    runner = ModelRunner(
        model,
        ReferenceSampler(parameters),
        parameters,
        SlotTable(1, 64, 16, 1),
        GrammarTable(32, ()),
        [KvSlab.allocate(LAYOUT, 3, torch.device("meta"))],
        [],
        (),
    )
    entering = EnteringSequence(0, [5], 1, SamplingParams(), 0, 0, ([1],))
    plan = StepPlan(1, (Slice(0, 0, 1, 0, (0,)),), 1, 1, (entering,))
    with pytest.raises(torch.OutOfMemoryError):
        runner.launch(plan, lambda: None)
    assert log == ["layers are queued", "after all that is queued", "waited for"]
