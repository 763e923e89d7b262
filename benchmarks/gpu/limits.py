"""What the card does at most: bytes copied on the device, and bf16 products."""

import torch

from benchmarks.gpu.bench import COPY, GEMM, Bench


def run(bench: Bench) -> None:
    """On random numbers: products of zeros run faster."""
    num_bytes, size = (1 << 20, 64) if bench.smoke else (4 << 30, 8192)
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    copy_s = bench.seconds(lambda: target.copy_(source))
    bench.figure(COPY, "GB/s", 2 * num_bytes / copy_s / 1e9)
    read_s = bench.seconds(lambda: source.view(torch.int64).max())
    bench.figure("reads alone, a reduction", "GB/s", num_bytes / read_s / 1e9)
    x, y = torch.randn(2, size, size, device=bench.device).to(bench.dtype)
    product_s = bench.seconds(lambda: x @ y)
    bench.figure(GEMM, "TFLOP/s", 2 * size**3 / product_s / 1e12)
