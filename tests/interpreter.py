"""Triton's interpreter, made faster."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import triton.language as tl
from triton.runtime import interpreter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class _Nothing:
    def restore(self) -> None:
        pass


@pytest.fixture(autouse=True, scope="module")
def language_is_patched_once() -> Iterator[None]:
    """At every call of a function the interpreter goes through all of Triton's language for what
    it replaces. Once in a launch is enough: that takes as long as all that is computed."""
    if not INTERPRETED:  # on a GPU, where another version's interpreter may be another
        yield
        return
    patch: Callable[..., Any] = interpreter._patch_lang
    patched: set[int] = set()

    def patch_once(function: Any) -> Any:
        values = function.__globals__.values()
        seen = {id(value) for value in values if value is tl or value is tl.core}
        if seen <= patched:
            return _Nothing()
        scope, launches = patch(function), not patched
        patched.update(seen)
        if launches:
            restore = scope.restore

            def restored() -> None:
                restore()
                patched.clear()

            scope.restore = restored
        return scope

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
        yield


@pytest.fixture(autouse=True, scope="module")
def sums_are_not_checked_for_overflow() -> Iterator[None]:
    """For small tensors, on which no index comes near: every addition would be done twice. Where
    they are large it is done, see `test_addresses_are_64_bit`."""
    if not INTERPRETED:
        yield
        return
    builder: Any = interpreter.interpreter_builder
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        yield
