"""What a quantised cache is worth: decode attention, whole steps, and how many sequences fit."""

import tempfile
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.bench import Bench, free_memory
from benchmarks.gpu.decode_attention import (
    CASES,
    GOAL,
    LLAMA,
    SMOKE_CASES,
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
from engine.step_memory import step_bytes
from kv_cache.layout import KV_FORMATS

FP8 = "fp8_e4m3"
# of the copy rate; int8, whose elements take more instructions to convert, has none of its own
GOALS = {FP8: GOAL, "fp8_e5m2": GOAL}
OUTPUT_GOAL, FITTING_GOAL = 1.6, 1.9  # times as much as with elements as wide as the model's
MEMORY_SHARE = 0.9  # for weights and cache, as the engine has it
STEP_TOKENS, MOST_SEQS = 2048, 256  # of a step that memory is kept for
STEPS = 10
SPARE = 64  # tokens that a sequence may grow by


def run(bench: Bench) -> None:
    """Of the model's own format the attention is a part before this one."""
    for num_seqs, context, layers in SMOKE_CASES if bench.smoke else CASES:
        for kv_format in QUANTISED if num_seqs > 1 else ():
            _attention(bench, kv_format, num_seqs, context, layers)
    num_seqs, context = (2, 40) if bench.smoke else (96, 8192)
    with tempfile.TemporaryDirectory() as folder:
        source = write_config(Path(folder), bench.shape, 16384)
        model, description = make_model(bench, source, bench.dtype, 16384)
    own = FORMATS[bench.dtype]
    fitting = {name: _fitting(bench, description, name, context) for name in (own, FP8)}
    num_seqs = min(num_seqs, fitting[own])  # on a card smaller than an H200
    output = {
        name: _output(bench, model, description, name, num_seqs, context) for name in (own, FP8)
    }
    for name, unit, found, goal in (
        (f"{FP8}, output, B {num_seqs} at {context}", "tokens/s", output, OUTPUT_GOAL),
        (f"{FP8}, sequences of {context} that fit", "sequences", fitting, FITTING_GOAL),
    ):
        share = found[FP8] / found[own]
        bench.figure(name, unit, found[FP8], share=share, share_of=own, goal=goal)


def _attention(bench: Bench, kv_format: str, num_seqs: int, context: int, layers: int) -> None:
    spec, kernels = SMOKE_SPEC if bench.smoke else LLAMA, bench.kernels()
    name = f"decode attention, {kv_format}, B {num_seqs} at {context}, a layer"
    made = full_cache(bench, spec, num_seqs, context, layers, kv_format)
    q = random_queries(spec, num_seqs, bench.dtype, bench.device)
    check(bench, name, kernels, q, spec, made)
    seconds = bench.seconds(partial(attend, kernels, q, spec, made, layers)) / layers
    num_bytes = kv_bytes(spec, num_seqs * context, bench.dtype, kv_format)
    limit_s = num_bytes / bench.limits.read_bytes_s
    bench.figure(name, "us", seconds * 1e6, limit=limit_s * 1e6, goal=GOALS.get(kv_format))
    del made, q
    free_memory()


def _fitting(bench: Bench, description: ModelDescription, kv_format: str, context: int) -> int:
    """What the engine would make of this card."""
    total = 1 << 30 if bench.smoke else torch.cuda.mem_get_info()[1]
    weights = description.num_parameters * bench.dtype.itemsize
    steps = step_bytes(description, bench.dtype.itemsize, STEP_TOKENS, MOST_SEQS)
    budget = total // 2 if bench.smoke else int(total * MEMORY_SHARE) - weights - steps
    plan = plan_cache(
        description.groups,
        KV_FORMATS[kv_format],
        BLOCK_SIZE,
        budget,
        context,
        min(context, STEP_TOKENS),
    )
    num_seqs = plan.num_sequences(context)
    bench.figure(f"{kv_format}, sequences of {context} by the plan", "sequences", num_seqs)
    return num_seqs


def _output(
    bench: Bench,
    model: CausalModel,
    description: ModelDescription,
    kv_format: str,
    num_seqs: int,
    context: int,
) -> float:
    """Tokens a second."""
    max_len = context + SPARE
    rig = Rig(bench, model, description, bench.dtype, num_seqs, max_len, format=kv_format)
    vocab = bench.shape.vocab_size
    rig.enter([torch.randint(3, vocab, (context,)).tolist() for _ in range(num_seqs)])
    for _ in range(1 if bench.smoke else 4):  # computed call by call, then recorded
        rig.decode()
    seconds = bench.seconds_of_calls(rig.decode, STEPS)
    bench.figure(f"decode step, {kv_format}, B {num_seqs} at {context}", "ms", seconds * 1e3)
    del rig
    free_memory()
    return num_seqs / seconds
