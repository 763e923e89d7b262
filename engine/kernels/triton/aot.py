"""Compiles the kernels for sm_90 where no GPU is, and reads what they take off the machine code.

    python -m engine.kernels.triton.aot [--json] [--without SHAPE ...]

prints registers, stack, shared memory and matrix instructions of every kernel, for the shapes
that serve. The arguments are those of real launches, made over tensors without memory.

Instructions are counted in PTX, of which the assembler makes one each: to disassemble a kernel
takes 0.7 s, more than most take to compile. Where it matters what the assembler made of them,
in the sampler, it is disassembled.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels.triton.launch import Launch
from engine.kernels.triton.shapes import SHAPES, draws, launches_of

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
HEADER = (
    "shape", "kernel", "warps", "regs", "stack", "shared", "wgmma", "mma", "copies", "inexact",
)  # fmt: skip


class Resources(NamedTuple):
    """Of one compiled kernel; the counts are instructions."""

    num_warps: int
    registers: int  # of a thread
    stack_bytes: int  # where registers are spilt to, too
    shared_bytes: int
    wgmma: int  # the warp-group matrix unit
    mma: int  # the warp matrix unit
    wide_copies: int  # 16 bytes from global to shared memory, asynchronous
    inexact: int | None  # fused or flushing, where nothing is to be; None where that may be


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
    binary = triton.compile(source_of(launch), target=TARGET, options=launch.options)
    found, ptx = _dumped(binary.asm["cubin"], "-res-usage"), binary.asm["ptx"]
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", found)
    assert usage is not None, "cuobjdump says nothing about resources"

    def count(instruction: str) -> int:
        return len(re.findall(instruction, ptx))

    return Resources(
        num_warps=launch.num_warps,
        registers=int(usage[1]),
        stack_bytes=int(usage[2]) + int(usage[3]),
        shared_bytes=binary.metadata.shared,
        wgmma=count(r"\bwgmma\.mma_async\b"),
        mma=count(r"\bmma\.sync\b"),
        wide_copies=count(r"\bcp\.async\.cg\.shared\.global\b.*, 0x10\b"),
        inexact=None if launch.fused else _inexact(_dumped(binary.asm["cubin"], "-sass")),
    )


def _dumped(cubin: bytes, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _inexact(code: str) -> int:
    assert len(re.findall(r"\bFMUL\b", code)) > 50, "this is not the code of a draw"
    return len(re.findall(r"\bFFMA|\.FTZ", code))


def compiled_all(without: Sequence[str] = ()) -> Iterator[tuple[str, str, Resources]]:
    for shape in SHAPES:
        if shape.name in without:
            continue
        for launch in launches_of(shape):
            yield shape.name, launch.kernel.__name__, compiled(launch)
    for name, launch in draws():
        yield name, launch.kernel.__name__, compiled(launch)


def _cell(fact: object) -> object:
    return "-" if fact is None else fact


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m engine.kernels.triton.aot")
    parser.add_argument("--json", action="store_true", help="one object a line instead of a table")
    names = [shape.name for shape in SHAPES]
    parser.add_argument("--without", nargs="+", default=[], choices=names, metavar="SHAPE")
    args = parser.parse_args()
    as_json = args.json
    if triton.knobs.runtime.interpret:
        sys.exit("TRITON_INTERPRET is set: interpreted kernels cannot be compiled")
    line = "{:<18} {:<16}" + " {:>7}" * 8
    if not as_json:
        sys.stdout.write(line.format(*HEADER) + "\n")
    for shape, kernel, resources in compiled_all(args.without):
        facts = {"shape": shape, "kernel": kernel, **resources._asdict()}
        row = json.dumps(facts) if as_json else line.format(*map(_cell, facts.values()))
        sys.stdout.write(row + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
