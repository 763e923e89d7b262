"""The matrix products of a step alone, as cuBLAS does them: what bounds a step from below."""

import torch
import torch.nn.functional as F

from benchmarks.gpu.bench import Bench, free_memory
from benchmarks.workloads import ModelShape

ROWS = (1, 64, 256, 2048, 8192)


def run(bench: Bench) -> None:
    shape = bench.shape
    shapes = layer_shapes(shape) * shape.num_layers
    weights = [
        torch.randn(rows, columns, device=bench.device, dtype=bench.dtype).mul_(0.02)
        for rows, columns in shapes
    ]
    elements = sum(w.numel() for w in weights)
    for rows in (1, 3) if bench.smoke else ROWS:
        inputs = {
            width: torch.randn(rows, width, device=bench.device, dtype=bench.dtype)
            for width in {columns for _, columns in shapes}
        }

        def multiply(inputs: dict[int, torch.Tensor] = inputs) -> None:
            for weight in weights:
                F.linear(inputs[weight.shape[1]], weight)

        limits = bench.limits
        read_s = elements * bench.dtype.itemsize / limits.read_bytes_s
        limit_s = max(read_s, 2 * elements * rows / limits.gemm_flops_s)
        seconds = bench.seconds(multiply, repeats=5)
        name = f"{shape.num_layers} layers, {rows} rows"
        bench.figure(name, "ms", seconds * 1e3, limit=limit_s * 1e3)
        free_memory()


def layer_shapes(shape: ModelShape) -> list[tuple[int, int]]:
    heads = shape.num_heads + 2 * shape.num_kv_heads
    return [
        (heads * shape.head_dim, shape.hidden),
        (shape.hidden, shape.hidden),
        (2 * shape.mlp, shape.hidden),
        (shape.hidden, shape.mlp),
    ]
