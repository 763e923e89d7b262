"""What a step of many sequences costs the host: scheduler, runner and answers, without a model.

    python -m benchmarks.host [--seqs 256] [--context 1024] [--steps 200]

A stub in place of the model gives logits of 512 tokens that were there before. `ahead` is with
`async_scheduling`: each step is planned and launched before the one before has ended.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine, table
from benchmarks.gpu.generation import add
from benchmarks.gpu.workload import Offline
from benchmarks.workloads import ModelShape
from engine.assemble import EngineInfo, assemble
from engine.config import EngineConfig
from engine.engine import Engine
from engine.generation_defaults import read_generation_defaults
from engine.kernels.interface import StepBatch
from engine.model_source import resolve_model
from engine.models.describe import describe
from engine.sizing import decide_shape, memory_of, size_cache
from kv_cache.slab import KvSlab

SHAPE = ModelShape("nothing", 64, 1, 4, 2, 64, 512)
WARM_UP = 20  # steps
PARTS = {
    "_scheduler.schedule": "planned in turn",
    "_scheduler.schedule_ahead": "planned ahead",
    "_runner.launch": "launched, with the draw",
    "_runner.finish": "samples taken",
    "_scheduler.complete": "tokens appended, answers made",
}
STEP = "step, whole"
Times = dict[str, list[float]]


class NoModel:
    """Computes nothing: the logits of a row are the same in every step."""

    vocab_size = SHAPE.vocab_size

    def __init__(self, num_seqs: int) -> None:
        self._hidden = torch.zeros(1, SHAPE.hidden)
        self._logits = torch.randn(num_seqs, SHAPE.vocab_size)

    def prepare(self, slabs: Sequence[KvSlab], max_num_seqs: int) -> None:
        """Is ready."""

    def forward(
        self, batch: StepBatch, slabs: Sequence[KvSlab], wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._hidden.expand(batch.num_tokens if wanted is None else len(wanted), -1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits[: len(hidden)]


def make_engine(folder: Path, num_seqs: int, max_len: int, ahead: bool) -> Engine:
    """All prompts are one step's."""
    (folder / "config.json").write_text(json.dumps(SHAPE.config()))
    source = resolve_model(str(folder), weights=False)
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        dtype="float32",
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_seqs * max_len,
        max_model_len=max_len,
        kv_cache_memory_bytes=2 * num_seqs * max_len * 2 * SHAPE.kv_token_bytes,
        async_scheduling=ahead,
    )
    model = describe(source)
    shape = decide_shape(config, model)
    info = EngineInfo(
        source=source,
        model=model,
        shape=shape,
        cache=size_cache(config, shape, model, memory_of(shape.device)),
        defaults=read_generation_defaults(source.folder),
        fingerprint="none",
    )
    return Engine(info, assemble(config, info, NoModel(num_seqs)), 0)


def timed(call: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    def measured(*arguments: Any) -> Any:
        started = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            times.append(time.perf_counter() - started)

    return measured


def measure(num_seqs: int, context: int, steps: int, ahead: bool) -> Times:
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(Path(folder), num_seqs, context + steps + 2 * WARM_UP, ahead)
    prompts = Offline(num_seqs, context, 0).prompts(SHAPE.vocab_size, seed=0)
    add(engine, prompts, steps + 2 * WARM_UP)
    answering: set[str] = set()
    while len(answering) < num_seqs:
        answering |= set(engine.step().updates)
    times: Times = defaultdict(list)
    for path, part in PARTS.items():
        owner_name, name = path.split(".")
        owner = getattr(engine, owner_name)
        setattr(owner, name, timed(getattr(owner, name), times[part]))
    step = timed(engine.step, times[STEP])
    for _ in range(WARM_UP):
        engine.step()
    for part_times in times.values():
        part_times.clear()
    for _ in range(steps):
        assert len(step().updates) == num_seqs
    engine.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host")
    parser.add_argument("--seqs", type=int, default=256)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("python -m benchmarks.host", *sys.argv[1:])
    print(machine.describe())
    print(f"{options.seqs} sequences at {options.context} tokens, one thread; ms")
    columns = [
        measure(options.seqs, options.context, options.steps, ahead) for ahead in (False, True)
    ]
    rows: list[tuple[str, ...]] = [("", "in turn, least", "median", "ahead, least", "median")]
    for part in (*PARTS.values(), STEP):
        cells = []
        for times in columns:
            found = [s * 1e3 for s in times[part]]
            cells += [f"{f(found):.2f}" if found else "-" for f in (min, statistics.median)]
        rows.append((part, *cells))
    print(table.lines(rows))


if __name__ == "__main__":
    main()
