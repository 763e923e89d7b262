"""Compiles the kernels for sm_90 where no GPU is, and reads what they take off the machine code.

    python -m engine.kernels.triton.aot [--json]

prints registers, spills, shared memory and matrix instructions of every kernel, for the shapes
that serve. The arguments are those of real launches, made over tensors without memory.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels.triton.launch import OPTIONS, Launch
from engine.kernels.triton.shapes import SHAPES, launches_of

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
HEADER = ("shape", "kernel", "warps", "regs", "spills", "stack", "shared", "wgmma", "mma", "copies")


class Resources(NamedTuple):
    """Of one compiled kernel; the counts are instructions in its machine code."""

    num_warps: int
    registers: int  # of a thread
    spills: int  # loads and stores of local memory
    stack_bytes: int
    shared_bytes: int
    wgmma: int  # the warp-group matrix unit
    mma: int  # the warp matrix unit
    wide_copies: int  # 16 bytes from global to shared memory, asynchronous


def source_of(launch: Launch) -> ASTSource:
    """What the just-in-time compiler would see: types, and which numbers 16 divides."""
    kernel = launch.kernel
    signature: dict[str, str] = {}
    constants = dict(launch.constants)
    divisible = {}
    for i, (param, arg) in enumerate(zip(kernel.params, launch.args, strict=False)):
        if isinstance(arg, torch.Tensor):
            signature[param.name] = POINTERS[arg.dtype]
            divisible[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(arg, int):
            signature[param.name] = "i32" if arg < 1 << 31 else "i64"
            if arg % 16 == 0 and not param.do_not_specialize:
                divisible[(i,)] = [["tt.divisibility", 16]]
        else:
            assert arg is None, f"{param.name} is neither tensor nor int"
            signature[param.name] = "constexpr"
            constants[param.name] = None
    signature |= dict.fromkeys(launch.constants, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    return ASTSource(kernel, signature, constexprs=constants, attrs=divisible)


def compiled(launch: Launch) -> Resources:
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, **OPTIONS}
    binary = triton.compile(source_of(launch), target=TARGET, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        dump = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", dump)
    assert usage is not None, "cuobjdump says nothing about resources"

    def count(instruction: str) -> int:
        return len(re.findall(rf"\b{instruction}\b", dump))

    return Resources(
        num_warps=launch.num_warps,
        registers=int(usage[1]),
        spills=count("LDL") + count("STL"),
        stack_bytes=int(usage[2]),
        shared_bytes=binary.metadata.shared,
        wgmma=count("HGMMA"),
        mma=count("HMMA"),
        wide_copies=count(r"LDGSTS\.E\.\S*128"),
    )


def compiled_all() -> Iterator[tuple[str, str, Resources]]:
    for shape in SHAPES:
        for launch in launches_of(shape):
            yield shape.name, launch.kernel.__name__, compiled(launch)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m engine.kernels.triton.aot")
    parser.add_argument("--json", action="store_true", help="one object a line instead of a table")
    as_json = parser.parse_args().json
    if triton.knobs.runtime.interpret:
        sys.exit("TRITON_INTERPRET is set: interpreted kernels cannot be compiled")
    line = "{:<18} {:<16}" + " {:>7}" * 8
    if not as_json:
        sys.stdout.write(line.format(*HEADER) + "\n")
    for shape, kernel, resources in compiled_all():
        facts = {"shape": shape, "kernel": kernel, **resources._asdict()}
        row = json.dumps(facts) if as_json else line.format(*facts.values())
        sys.stdout.write(row + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
