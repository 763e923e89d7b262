"""The CPU kernels against the limits of the machine, on the shapes of a 100 M Llama.

    python -m benchmarks.cpu_kernels [linear] [decode] [prefill] [small] [calls] [formats]

Weights and caches of all twelve layers take turns, as they do in a step: one layer alone would
stay in the caches. Every round runs each variant once, so that a busy neighbour hits them all;
printed are medians (and minima) and the share of what the machine did in the same rounds: a
stream of reads, or torch's product of two matrices of 2048, in bf16 or in fp32, as is faster.
"""

import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.model_folder import write_model
from benchmarks.workloads import SMALL
from engine.kernels.cpu.features import CpuFeatures
from engine.kernels.cpu.kernels import CpuKernels
from engine.kernels.cpu.linear import (
    OnednnLinear,
    PlainLinear,
    make_linear,
    product_of,
    reorders,
)
from engine.kernels.cpu.packing import WeightMemory
from engine.kernels.interface import (
    Activation,
    AttentionSpec,
    GroupBatch,
    Linear,
    Rotary,
    StepBatch,
)
from engine.model_source import resolve_model
from engine.models.describe import describe
from engine.models.interface import CausalModel
from engine.models.load import load_model
from kv_cache.layout import KV_FORMATS, BlockLayout, KvGroup
from kv_cache.slab import KvSlab

LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, MLP, VOCAB = 12, 768, 12, 4, 64, 2048, 32000
BLOCK = 16
SPEC = AttentionSpec(HEADS, KV_HEADS, DIM, DIM, DIM**-0.5)
LAYER_SHAPES = [
    ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
    (HIDDEN, HEADS * DIM),
    (2 * MLP, HIDDEN),
    (HIDDEN, MLP),
]
Variants = dict[str, Callable[[], object]]


def timed(variants: Variants, rounds: int = 9, rest_s: float = 0.03) -> dict[str, list[float]]:
    """Seconds of each variant in each round, every time after a run that does not count.

    The rest lets the threads of torch's OpenMP fall asleep: they spin for milliseconds after
    their last work, on the cores that the next variant needs.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            time.sleep(rest_s)
            run()
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return times


def read_stream() -> Callable[[], object]:
    data = torch.ones(50_000_000)  # 200 MB, far beyond the caches
    return lambda: data.sum()


def bf16_product() -> Callable[[], object]:
    x, w = torch.randn(2, 2048, 2048).bfloat16()
    packed = torch.ops.mkldnn._reorder_linear_weight(w, 64)
    return lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def fp32_product() -> Callable[[], object]:
    x, w = torch.randn(2, 2048, 2048)
    return lambda: x @ w


def report(name: str, variants: Variants, num_bytes: float, flops: float) -> None:
    products = {"fp32": fp32_product()}
    if reorders(torch.bfloat16):
        products["bf16"] = bf16_product()
    times = timed({**variants, "reads": read_stream(), **products})
    read_rate = 200e6 / statistics.median(times.pop("reads"))
    product_rate = 2 * 2048**3 / min(statistics.median(times.pop(name)) for name in products)
    for variant, seconds in times.items():
        median = statistics.median(seconds)
        print(
            f"{name:26} {variant:8} {median * 1e3:8.2f} ms (min {min(seconds) * 1e3:8.2f}) "
            f"{num_bytes / median / 1e9:6.1f} GB/s = {num_bytes / median / read_rate:4.0%} "
            f"{flops / median / 1e9:6.0f} GF/s = {flops / median / product_rate:4.0%}",
            flush=True,
        )


def linears(kernels: CpuKernels) -> None:
    shapes = LAYER_SHAPES * LAYERS + [(VOCAB, HIDDEN)]
    weights = [torch.randn(shape).mul_(0.02).bfloat16() for shape in shapes]
    theirs = OnednnLinear if reorders(torch.bfloat16) else PlainLinear
    sides: dict[str, Sequence[Linear]] = {
        "ours": [kernels.linear(weight, None) for weight in weights],
        "torch": [theirs(weight, None) for weight in weights],
    }
    features = CpuFeatures.of_this_machine()
    own = features.wide_registers or features.narrow_registers
    if own and not features.bf16_tiles:  # ours are of twelve bits
        product = product_of(features.element(torch.bfloat16))._replace(short=None)
        place = WeightMemory()
        sides["16 bits"] = [make_linear(product, place, weight, None) for weight in weights]
    elements = sum(weight.numel() for weight in weights)
    del weights

    def run(linears: Sequence[Linear], inputs: dict[int, torch.Tensor]) -> None:
        for linear, (_, width) in zip(linears, shapes, strict=True):
            linear(inputs[width])

    for rows in (1, 2, 4, 8, 16, 32, 64, 512):
        inputs = {width: torch.randn(rows, width).bfloat16() for width in (HIDDEN, MLP)}
        variants: Variants = {name: partial(run, side, inputs) for name, side in sides.items()}
        report(f"linears, {rows} rows", variants, 2 * elements, 2 * elements * rows)


def paged_batch(
    kernels: CpuKernels, lengths: list[tuple[int, int]], layers: int, format: str = "bf16"
) -> tuple[KvSlab, StepBatch, GroupBatch]:
    """Sequences of (query_len, kv_len) in randomly scattered blocks."""
    blocks = [-(-kv_len // BLOCK) for _, kv_len in lengths]
    layout = BlockLayout(
        KvGroup(tuple(range(layers)), KV_HEADS, (DIM, DIM)), BLOCK, KV_FORMATS[format]
    )
    slab = KvSlab.allocate(layout, sum(blocks) + 1, torch.device("cpu"))
    slots = torch.arange(slab.num_blocks * BLOCK)
    rows = torch.randn(len(slots), KV_HEADS, DIM).bfloat16()
    for layer in range(layers):
        kernels.write_kv(rows, rows, slab, layer, slots)
    order = iter((torch.randperm(sum(blocks)) + 1).tolist())
    tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    for row, count in zip(tables, blocks, strict=True):
        row[:count] = torch.tensor([next(order) for _ in range(count)])
    query_lens, kv_lens = zip(*lengths, strict=True)
    tokens = sum(query_lens)
    group = GroupBatch(tables, torch.full((tokens,), -1))
    batch = StepBatch(
        torch.zeros(tokens, dtype=torch.int64),
        torch.zeros(tokens, dtype=torch.int64),
        torch.tensor([0, *query_lens]).cumsum(0).int(),
        torch.tensor(kv_lens, dtype=torch.int32),
        (group,),
        sum(length == 1 for length in query_lens),
        max(query_lens),
        max(kv_lens),
    )
    return slab, batch, group


def decode(kernels: CpuKernels) -> None:
    for sequences, length in ((1, 544), (1, 2048), (1, 8192), (8, 544), (8, 2048), (32, 544)):
        slab, batch, group = paged_batch(kernels, [(1, length)] * sequences, LAYERS)
        q = torch.randn(sequences, HEADS, DIM).bfloat16()
        num_bytes = LAYERS * sequences * length * KV_HEADS * DIM * 4
        flops = LAYERS * sequences * length * HEADS * DIM * 4
        run = partial(attend_layers, kernels, q, slab, batch, group)
        report(f"decode, {sequences} x {length}", {"ours": run}, num_bytes, flops)


def attend_layers(
    kernels: CpuKernels, q: torch.Tensor, slab: KvSlab, batch: StepBatch, group: GroupBatch
) -> None:
    for layer in range(LAYERS):
        kernels.attention(q, SPEC, slab, layer, batch, group)


def prefill(kernels: CpuKernels) -> None:
    for new, total in ((512, 512), (2048, 2048), (512, 2048), (512, 8192)):
        slab, batch, group = paged_batch(kernels, [(new, total)], 1)
        q = torch.randn(new, HEADS, DIM).bfloat16()
        k, v = torch.randn(2, 1, KV_HEADS, total, DIM).bfloat16()
        mask = torch.ones(new, total, dtype=torch.bool).tril(total - new)
        dense = q.transpose(0, 1)[None]
        theirs = partial(scaled_dot_product_attention, attn_mask=mask, enable_gqa=True)
        variants: Variants = {
            "ours": partial(kernels.attention, q, SPEC, slab, 0, batch, group),
            "torch": partial(theirs, dense, k, v),
        }
        flops = 4 * HEADS * DIM * new * (total - new + new / 2)
        report(f"prefill, {new} of {total}", variants, total * KV_HEADS * DIM * 4, flops)


def formats(kernels: CpuKernels) -> None:
    """Whole decode steps, with their logits, over caches of each format."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), SMALL)
        source = resolve_model(folder)
        model = load_model(source, describe(source), kernels, torch.bfloat16, torch.device("cpu"))
    for sequences, length in ((8, 2048), (32, 544), (32, 2048)):
        variants: Variants = {}
        for format in ("bf16", "fp8_e4m3", "fp8_e5m2", "int8"):
            slab, batch, group = paged_batch(kernels, [(1, length)] * sequences, LAYERS, format)
            group.slots.copy_(group.block_tables[:, -1] * BLOCK + BLOCK - 1)
            batch.positions.fill_(length - 1)
            variants[format] = partial(decode_step, model, batch, slab)
        limit = {"reads": read_stream()}
        times = {name: statistics.median(t) for name, t in timed({**variants, **limit}).items()}
        read_rate = 200e6 / times.pop("reads")
        for format, seconds in times.items():
            print(
                f"a step of {sequences} x {length}, {format:8}: {seconds * 1e3:6.2f} ms,"
                f" {times['bf16'] / seconds:4.2f} of bf16's rate; reads {read_rate / 1e9:.1f} GB/s",
                flush=True,
            )


def decode_step(model: CausalModel, batch: StepBatch, slab: KvSlab) -> None:
    model.logits(model.forward(batch, [slab]))


def small(kernels: CpuKernels) -> None:
    """Microseconds of one call, with the layers' activations in the cache as in a step."""
    slab, _, _ = paged_batch(kernels, [(1, 1024)], 1)
    rotary = Rotary(torch.ones(1024, DIM // 2), torch.zeros(1024, DIM // 2))
    weight = torch.ones(HIDDEN)
    for rows in (1, 8, 32, 512):
        x, residual = torch.randn(2, rows, HIDDEN).bfloat16()
        gate_up = torch.randn(rows, 2 * MLP).bfloat16()
        qkv = torch.randn(rows, LAYER_SHAPES[0][0]).bfloat16()
        positions, slots = torch.arange(rows), torch.arange(rows) + BLOCK
        rotate = partial(kernels.rotate_and_write, qkv, positions, rotary, None, SPEC)
        variants: Variants = {
            "add_norm": partial(kernels.add_rms_norm, x, residual, weight, 1e-6),
            "silu_mul": partial(kernels.gated_activation, gate_up, Activation.SILU),
            "rotate": partial(rotate, slab, 0, slots),
        }
        report_calls(f"{rows} rows", variants)


def calls(kernels: CpuKernels) -> None:
    """What a call costs beside its work: tensors of next to nothing."""
    x, weight = torch.randn(1, 16).bfloat16(), torch.ones(16)
    linear = kernels.linear(torch.randn(64, 16).bfloat16(), None)
    slab, batch, group = paged_batch(kernels, [(1, 1)], 1)
    q = torch.randn(1, HEADS, DIM).bfloat16()
    variants: Variants = {
        "norm": partial(kernels.rms_norm, x, weight, 1e-6),
        "linear": partial(linear, x),
        "attention": partial(kernels.attention, q, SPEC, slab, 0, batch, group),
    }
    report_calls("a call", variants)


def report_calls(name: str, variants: Variants) -> None:
    for variant, seconds in timed(variants, 400, 0.0).items():
        median, least = statistics.median(seconds) * 1e6, min(seconds) * 1e6
        print(f"{name:10} {variant:10} {median:7.1f} us (min {least:7.1f})", flush=True)


PARTS = {
    "linear": linears,
    "decode": decode,
    "prefill": prefill,
    "small": small,
    "calls": calls,
    "formats": formats,
}


def main() -> None:
    chosen = sys.argv[1:] or list(PARTS)
    unknown = set(chosen) - set(PARTS)
    if unknown:
        sys.exit(f"unknown part {', '.join(sorted(unknown))}, must be of {', '.join(PARTS)}")
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    threads = torch.get_num_threads()
    print(f"{platform.processor() or platform.machine()}, {threads} threads, {platform.platform()}")
    print("command: python -m benchmarks.cpu_kernels", *chosen)
    kernels = CpuKernels()
    for part in chosen:
        PARTS[part](kernels)


if __name__ == "__main__":
    main()
