"""The offline workload through the whole engine, and what the host takes of a step at B 256."""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import bounds
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.generation import add, generate
from benchmarks.gpu.models import make_engine, write_config
from benchmarks.gpu.watched import WatchedModel
from benchmarks.gpu.workload import OFFLINE, OUTPUT, SMOKE_OFFLINE, Offline
from benchmarks.workloads import Workload
from engine.engine import Engine
from engine.models.interface import CausalModel
from engine.request import RequestId
from engine.step_memory import step_bytes

HOST_GOAL = 0.05
MOST_SEQS, MOST_TOKENS = 256, 8192  # of a step
# tokens of a sequence: 33 steps read the prompts, in which those that started first draw already
MOST_OUTPUT = 256
REPEATS = 2


def run(bench: Bench) -> None:
    work = SMOKE_OFFLINE if bench.smoke else OFFLINE
    watched: list[WatchedModel] = []

    def watch(model: CausalModel) -> CausalModel:
        watched.append(WatchedModel(model, bench.device))
        return watched[0]

    with tempfile.TemporaryDirectory() as folder:
        source = write_config(Path(folder), bench.shape, 4096)
        engine = make_engine(
            bench,
            source,
            wrap=watch,
            dtype=str(bench.dtype).removeprefix("torch."),
            max_num_seqs=4 if bench.smoke else MOST_SEQS,
            max_num_batched_tokens=64 if bench.smoke else MOST_TOKENS,
            max_model_len=2048,
            # what the card has beside weights and steps: all 256 sequences, on an H100 too
            kv_cache_memory_bytes=None if bench.device.type == "cuda" else 1 << 24,
            async_scheduling=True,
        )
    free = _free_bytes(bench)
    _throughput(bench, engine, work)
    _host(bench, engine, watched[0])
    _memory(bench, engine, free - _free_bytes(bench))
    engine.close()


def _free_bytes(bench: Bench) -> int:
    return 0 if bench.device.type == "cpu" else torch.cuda.mem_get_info()[0]


def _memory(bench: Bench, engine: Engine, taken: int) -> None:
    """What steps took, code that they loaded included: torch gives nothing back."""
    info = engine.info
    kept = step_bytes(info.model, info.shape.dtype.itemsize, MOST_TOKENS, MOST_SEQS)
    bench.figure(
        "memory of steps", "MiB", taken / (1 << 20), share=taken / kept,
        share_of="what is kept for them", goal=1.0, goal_is_most=True,
    )  # fmt: skip


def _throughput(bench: Bench, engine: Engine, work: Offline) -> None:
    vocab, best = bench.shape.vocab_size, float("inf")
    if not bench.smoke:
        generate(engine, work.prompts(vocab, seed=0), 4)  # compiles, and records the step
    for seed in range(1, 2 if bench.smoke else 1 + REPEATS):
        prompts = work.prompts(vocab, seed)
        started = time.perf_counter()
        answers = generate(engine, prompts, work.output_len)
        best = min(best, time.perf_counter() - started)
        assert all(len(answer) == work.output_len for answer in answers)
    num_tokens = work.num_seqs * work.output_len
    least_s = bounds.total_s(
        Workload(work.name, bench.shape, work.num_seqs, work.prompt_len, work.output_len),
        bench.limits,
    )
    bench.figure(f"{work.name}, whole", "s", best, limit=least_s)
    bench.figure(OUTPUT, "tokens/s", num_tokens / best)


def _host(bench: Bench, engine: Engine, watched: WatchedModel) -> None:
    """What a step takes beside layers and logits: the draw, and what of scheduler, batch and
    answers is not done while the device is at the step before."""
    num_seqs, context = (2, 4) if bench.smoke else (256, 1024)
    prompts = Offline(num_seqs, context, 0).prompts(bench.shape.vocab_size, seed=99)
    times = times_of_all(engine, prompts, 2 if bench.smoke else 40, watched.reset)
    step_s = statistics.median(times)
    host_s = step_s - watched.median_s()
    name = f"engine's step, B {num_seqs} at {context}"
    bench.figure(name, "ms", step_s * 1e3)
    bench.figure(
        f"{name}, beside layers and logits", "ms", host_s * 1e3, share=host_s / step_s,
        share_of="the step", goal=HOST_GOAL, goal_is_most=True,
    )  # fmt: skip


def times_of_all(
    engine: Engine, prompts: list[list[int]], num_steps: int, begins: Callable[[], None]
) -> list[float]:
    """Of steps in which every prompt's sequence gets a token, each launched ahead."""
    add(engine, prompts, MOST_OUTPUT)
    started: set[str] = set()
    while len(started) < len(prompts):
        started |= set(engine.step().updates)
    for _ in range(3):
        engine.step()
    begins()
    first, first_ahead = engine.num_steps, engine.num_steps_ahead
    times = []
    for _ in range(num_steps):
        before = time.perf_counter()
        updates = engine.step().updates
        times.append(time.perf_counter() - before)
        assert len(updates) == len(prompts), f"{len(updates)} of {len(prompts)} got a token"
    assert engine.num_steps_ahead - first_ahead == engine.num_steps - first, "one was not ahead"
    for number in range(len(prompts)):
        engine.abort(RequestId(str(number)))
    while engine.has_work:
        engine.step()
    return times
