"""Whole steps of Llama-3.1-8B with random weights, by the engine's own runner."""

import tempfile
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import bounds
from benchmarks.gpu.bench import Bench, free_memory, synchronize
from benchmarks.gpu.models import make_model, write_config
from benchmarks.gpu.rig import BLOCK_SIZE, Rig
from benchmarks.gpu.watched import WatchedModel
from benchmarks.workloads import WEIGHT_BYTES, ModelShape

DECODE_GOALS = {1: 0.75, 64: 0.80, 256: 0.80}
PREFILL_GOAL = 0.70
WARM_UP = 4  # steps: the first is computed call by call, the second recorded
STEPS = 20
SPARE = 64  # tokens that a sequence may grow by


def run(bench: Bench) -> None:
    context = 40 if bench.smoke else 2048
    prompts = (4, 7) if bench.smoke else (2048, 8192)
    batches = (1, 3) if bench.smoke else (1, 64, 256)
    with tempfile.TemporaryDirectory() as folder:
        source = write_config(Path(folder), bench.shape, 16384)
        model, description = make_model(bench, source, bench.dtype, 16384)
    watched = WatchedModel(model, bench.device)
    slab, max_len, sizes = None, context + SPARE, []
    for batch in reversed(batches):  # the largest cache first, the others use it again
        num_seqs = bench.fitting(batch, sequence_bytes(bench, max_len)) if slab is None else batch
        rig = Rig(bench, watched, description, bench.dtype, num_seqs, max_len, slab)
        slab = rig.slab
        sizes.append(num_seqs)
        _decode(bench, rig, watched, num_seqs, context, DECODE_GOALS.get(batch))
    for length in prompts:
        whole = Rig(bench, watched, description, bench.dtype, 1, length + SPARE, slab)
        _prefill(bench, whole, length)
    # last: what a profiler has once hooked into may be slower from then on
    for num_seqs in sizes if bench.device.type == "cuda" else ():
        rig = Rig(bench, watched, description, bench.dtype, num_seqs, max_len, slab)
        _profile(bench, rig, num_seqs, context)
    free_memory()


def sequence_bytes(bench: Bench, max_len: int) -> int:
    """Of the cache, in a rig."""
    return (max_len // BLOCK_SIZE + 1) * BLOCK_SIZE * bench.shape.kv_token_bytes


def _enter(bench: Bench, rig: Rig, num_seqs: int, context: int) -> None:
    vocab = bench.shape.vocab_size
    rig.enter([torch.randint(3, vocab, (context,)).tolist() for _ in range(num_seqs)])
    for _ in range(1 if bench.smoke else WARM_UP):
        rig.decode()


def _decode(
    bench: Bench, rig: Rig, watched: WatchedModel, num_seqs: int, context: int, goal: float | None
) -> None:
    _enter(bench, rig, num_seqs, context)
    watched.reset()
    seconds = bench.seconds_of_calls(rig.decode, STEPS)
    limit_s = _bytes(bench.shape, num_seqs * context) / bench.limits.read_bytes_s
    name = f"decode step, B {num_seqs} at {context}"
    bench.figure(name, "ms", seconds * 1e3, limit=limit_s * 1e3, goal=goal)
    device_s = watched.median_s()
    bench.figure(f"{name}, layers and logits", "ms", device_s * 1e3, limit=limit_s * 1e3)
    rest = seconds - device_s
    bench.figure(f"{name}, the rest", "ms", rest * 1e3, share=rest / seconds, share_of="the step")


def _bytes(shape: ModelShape, kv_tokens: int) -> int:
    """Of all weights but the embedding's, and of the cache: what a step reads once."""
    parameters = shape.num_layers * shape.layer_parameters + shape.head_parameters
    return parameters * WEIGHT_BYTES + kv_tokens * shape.kv_token_bytes


def _prefill(bench: Bench, rig: Rig, length: int) -> None:
    """At once, and in chunks as a server computes it beside decode steps."""
    limit_s = bounds.prefill_s(bench.shape, bench.limits, length)
    rig.enter([torch.randint(3, bench.shape.vocab_size, (length,)).tolist()])
    chunks = {length: "", max(length // 4, 1): f" in chunks of {max(length // 4, 1)}"}
    for chunk, how in chunks.items():
        ends = [*range(chunk, length, chunk), length]
        run_all = partial(_chunks, rig, ends)
        seconds = bench.seconds_of_calls(run_all, 5)
        goal = PREFILL_GOAL if chunk == length else None
        name = f"prefill of {length}{how}"
        bench.figure(name, "ms", seconds * 1e3, limit=limit_s * 1e3, goal=goal)


def _chunks(rig: Rig, ends: list[int]) -> None:
    for start, end in zip([0, *ends], ends, strict=False):
        rig.prefill(start, end)


def _profile(bench: Bench, rig: Rig, num_seqs: int, context: int) -> None:
    """Where the device's time goes, into the log."""
    _enter(bench, rig, num_seqs, context)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        for _ in range(3):
            rig.decode()
        synchronize(bench.device)
    averages = recorded.key_averages()
    table = averages.table(sort_by="self_device_time_total", row_limit=16, max_name_column_width=60)
    bench.say(f"three decode steps, B {num_seqs} at {context}:\n{table}")
