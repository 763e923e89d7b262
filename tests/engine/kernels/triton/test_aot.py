"""The kernels compile for sm_90 without a GPU, and the machine code is what it should be."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.kernels.triton.shapes import SHAPES

Facts = dict[str, Any]
SHARED_OF_SM = 227 * 1024
REGISTERS_OF_SM = 64 * 1024
PROGRAMS_PER_SM = 2  # of decode attention
# Others take as many registers and more, but for two in prefilling by blocks of 16: head size 256
# is there without a window and quantised with and without one, a byte an element in each format,
# blocks of 16 as int8, a soft cap on head size 256, and of sizes below 128 the one that is no power
# of two.
EASIER = (
    "gemma-2-9b local",
    "gemma-2-27b global",
    "llama, block 16",
    "llama, fp8_e4m3",
    "llama-3.2-1b",
)


def test_machine_code() -> None:
    """All of it in one test: compiling takes a minute or two the first time on a machine, which
    test processes do not share. Triton keeps it, under all that it is made of."""
    compiled = compiled_for_sm_90()
    check_that_all_are_there_and_none_spills(compiled)
    check_that_every_format_is_there(compiled)
    check_that_programs_of_decode_attention_are_resident_together(compiled)
    check_that_attention_uses_the_matrix_units(compiled)
    check_that_draws_round_every_operation(compiled)


def compiled_for_sm_90() -> Sequence[Facts]:
    """In a process of its own: here the kernels are interpreted."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "engine.kernels.triton.aot", "--json", "--without", *EASIER],
        env=env,
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def of_kernel(compiled: Sequence[Facts], name: str) -> list[Facts]:
    found = [facts for facts in compiled if facts["kernel"] == f"{name}_kernel"]
    assert found, name
    return found


def check_that_all_are_there_and_none_spills(compiled: Sequence[Facts]) -> None:
    kernels = {facts["kernel"].removesuffix("_kernel") for facts in compiled}
    rows = {"norm", "gated", "rotate", "write", "draw"}
    assert kernels == rows | {"decode", "merge", "prefill"}
    assert [facts for facts in compiled if facts["stack_bytes"]] == []


def check_that_every_format_is_there(compiled: Sequence[Facts]) -> None:
    """In each kernel that reads a cache: bytes are widened in code of their own."""
    formats = {shape.name: shape.format for shape in SHAPES}
    for kernel in ("decode", "prefill"):
        found = {formats[facts["shape"]] for facts in of_kernel(compiled, kernel)}
        assert found == set(formats.values()), kernel


def check_that_programs_of_decode_attention_are_resident_together(
    compiled: Sequence[Facts],
) -> None:
    """Work is dealt out once, so a program that has to wait for a place would double the time."""
    for facts in of_kernel(compiled, "decode"):
        assert facts["shared_bytes"] * PROGRAMS_PER_SM <= SHARED_OF_SM, facts
        threads = facts["num_warps"] * 32 * PROGRAMS_PER_SM
        assert facts["registers"] * threads <= REGISTERS_OF_SM, facts
        assert facts["wide_copies"] > 0, facts


def check_that_attention_uses_the_matrix_units(compiled: Sequence[Facts]) -> None:
    for facts in of_kernel(compiled, "prefill"):
        assert (facts["wgmma"] > 0) == ("fp32" not in facts["shape"]), facts
        assert facts["shared_bytes"] <= SHARED_OF_SM, facts
    for facts in of_kernel(compiled, "decode"):
        assert (facts["mma"] > 0) == ("fp32" not in facts["shape"]), facts


def check_that_draws_round_every_operation(compiled: Sequence[Facts]) -> None:
    """Or they would differ from those of a CPU. Edited logits are fp32."""
    assert [facts["inexact"] for facts in of_kernel(compiled, "draw")] == [0, 0]
