"""The same tests run on a card where there is one, otherwise in the interpreter of Triton."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


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
