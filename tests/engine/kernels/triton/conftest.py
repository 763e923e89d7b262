"""The same tests run on a card where there is one, otherwise in the interpreter of Triton."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from tests.interpreter import INTERPRETED, language_is_patched_once

__all__ = ["language_is_patched_once"]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    """torch.empty is NaN, so that an element that no kernel writes shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def quiet_overflow() -> Iterator[None]:
    """exp of a large number is infinite on purpose; numpy would warn."""
    with np.errstate(over="ignore"):
        yield


@pytest.fixture(autouse=True)
def bf16_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies the bit patterns of bf16 as integers; widen them first."""
    builder: Any = interpreter.InterpreterBuilder
    interpreted_dot = builder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return interpreted_dot(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(builder, "create_dot", create_dot)


@pytest.fixture(autouse=True)
def integers_to_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes an integer's value for the bit pattern of a bf16."""
    builder: Any = interpreter.InterpreterBuilder
    cast = builder.cast_impl

    def create_si_to_fp(self: Any, number: Any, kind: Any) -> Any:
        if kind.scalar != tl.bfloat16:
            return cast(self, number, kind)
        return cast(self, cast(self, number, tl.float32), kind)

    monkeypatch.setattr(builder, "create_si_to_fp", create_si_to_fp)


FP8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


@pytest.fixture(autouse=True)
def fp8_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter loses the carry of a mantissa that rounds up to the next power of two."""
    builder: Any = interpreter.InterpreterBuilder
    convert, cast = builder.create_fp_to_fp, builder.cast_impl

    def create_fp_to_fp(self: Any, number: Any, kind: Any, rounding: Any) -> Any:
        source, target = number.dtype.scalar, kind.scalar
        if source in FP8:
            wide = torch.from_numpy(number.data).view(FP8[source]).float().numpy()
            wide = interpreter.TensorHandle(wide, tl.float32)
            return wide if target == tl.float32 else cast(self, wide, kind)
        if source == tl.float32 and target in FP8:
            stored = torch.from_numpy(number.data).to(FP8[target]).view(torch.uint8)
            return interpreter.TensorHandle(stored.numpy(), target)
        return convert(self, number, kind, rounding)

    monkeypatch.setattr(builder, "create_fp_to_fp", create_fp_to_fp)
