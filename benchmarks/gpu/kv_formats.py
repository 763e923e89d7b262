"""What a quantised cache is worth: decode attention, whole steps, and how many sequences fit."""

import tempfile
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.bench import Bench, free_memory
from benchmarks.gpu.decode_attention import (
    LLAMA,
    SMOKE_SPEC,
    attend,
    check,
    full_cache,
    kv_bytes,
)
from benchmarks.gpu.inputs import FORMATS, QUANTISED, random_queries
from benchmarks.gpu.models import make_model, write_config
from benchmarks.gpu.rig import BLOCK_SIZE, Rig
from engine.memory import plan_cache
from engine.models.interface import CausalModel, ModelDescription
from engine.sizing import GPU_STEP_BYTES
from kv_cache.layout import KV_FORMATS

GOAL = 0.80  # of the copy rate, for bytes that have to be converted
CASES = ((64, 2048, 32), (64, 8192, 32))  # (sequences, context, layers)
SMOKE_CASES = ((2, 70, 2),)
MEMORY_SHARE = 0.9  # for weights and cache, as the engine has it
STEPS = 10
SPARE = 64  # tokens that a sequence may grow by


def run(bench: Bench) -> None:
    for num_seqs, context, layers in SMOKE_CASES if bench.smoke else CASES:
        for kv_format in (FORMATS[bench.dtype], *QUANTISED):
            _attention(bench, kv_format, num_seqs, context, layers)
    num_seqs, context = (2, 40) if bench.smoke else (96, 8192)
    with tempfile.TemporaryDirectory() as folder:
        source = write_config(Path(folder), bench.shape, 16384)
        model, description = make_model(bench, source, bench.dtype, 16384)
    for kv_format in (FORMATS[bench.dtype], "fp8_e4m3"):
        _fitting(bench, description, kv_format, context)
        _steps(bench, model, description, kv_format, num_seqs, context)
        free_memory()


def _attention(bench: Bench, kv_format: str, num_seqs: int, context: int, layers: int) -> None:
    spec, kernels = SMOKE_SPEC if bench.smoke else LLAMA, bench.kernels()
    name = f"decode attention, {kv_format}, B {num_seqs} at {context}, a layer"
    made = full_cache(bench, spec, num_seqs, context, layers, kv_format)
    q = random_queries(spec, num_seqs, bench.dtype, bench.device)
    check(bench, name, kernels, q, spec, made)
    seconds = bench.seconds(partial(attend, kernels, q, spec, made, layers)) / layers
    num_bytes = kv_bytes(spec, num_seqs * context, bench.dtype, kv_format)
    limit_s = num_bytes / bench.limits.read_bytes_s
    bench.figure(name, "us", seconds * 1e6, limit=limit_s * 1e6, goal=GOAL)
    del made, q
    free_memory()


def _fitting(bench: Bench, description: ModelDescription, kv_format: str, context: int) -> None:
    """What the engine would make of this card."""
    total = 1 << 30 if bench.smoke else torch.cuda.mem_get_info()[1]
    weights = description.num_parameters * bench.dtype.itemsize
    budget = total // 2 if bench.smoke else int(total * MEMORY_SHARE) - weights - GPU_STEP_BYTES
    plan = plan_cache(
        description.groups, KV_FORMATS[kv_format], BLOCK_SIZE, budget, context, min(context, 2048)
    )
    name = f"{kv_format}, sequences of {context} that fit"
    bench.figure(name, "sequences", plan.num_sequences(context))


def _steps(
    bench: Bench,
    model: CausalModel,
    description: ModelDescription,
    kv_format: str,
    num_seqs: int,
    context: int,
) -> None:
    name = f"decode step, {kv_format}, B {num_seqs} at {context}"
    max_len = context + SPARE
    try:
        rig = Rig(bench, model, description, bench.dtype, num_seqs, max_len, format=kv_format)
    except torch.OutOfMemoryError:
        bench.say(f"{name}: its cache does not fit this card")
        return
    vocab = bench.shape.vocab_size
    rig.enter([torch.randint(3, vocab, (context,)).tolist() for _ in range(num_seqs)])
    for _ in range(1 if bench.smoke else 4):  # computed call by call, then recorded
        rig.decode()
    seconds = bench.seconds_of_calls(rig.decode, STEPS)
    bench.figure(name, "ms", seconds * 1e3)
    bench.figure(f"{name}, output", "tokens/s", num_seqs / seconds)
