"""Writing down the kernel calls of a function, for `replay.py` to repeat them, or to carry them out
at once when the function has made them all.

Such calls find what they were given at the same addresses. So whatever a kernel returns meanwhile
lies in memory of an `OutputPool`, where it stays.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from struct import Struct
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from engine.kernels.cpu.emit import LINE_BYTES

PAGE_BYTES = 4096
# What never computes anything, of all that might give a view: `to` or `reshape` may copy.
_ATEN = torch.ops.aten
_VIEWS = (_ATEN.view, _ATEN.slice, _ATEN.select, _ATEN.alias, _ATEN.detach, _ATEN.transpose)

Memory = npt.NDArray[np.uint8]


class Call(NamedTuple):
    code: int  # address of the machine code
    num_threads: int
    layout: Struct  # of the job, its own words included
    words: tuple[float, ...]


class OutputPool:
    """Memory for the outputs of recorded calls; recordings that use it do not run at once.

    Within a recording a piece is used again when no tensor looks at it any more.
    """

    def __init__(self) -> None:
        self._pieces: list[Memory] = []
        self._taken: list[tuple[Memory, StorageWeakRef]] = []
        self._free: list[Memory] = []

    def begin(self) -> None:
        self._taken, self._free = [], list(self._pieces)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = int(np.prod(shape))
        if count == 0:  # as of a prompt's part that nobody wants a token of
            return torch.empty(shape, dtype=dtype)
        # Powers of two, so that batches of many sizes do with few pieces.
        num_bytes = 1 << (max(count * dtype.itemsize, PAGE_BYTES) - 1).bit_length()
        self._take_back()
        piece = next((p for p in self._free if p.nbytes == num_bytes), None)
        if piece is None:
            memory = np.empty(num_bytes + PAGE_BYTES, np.uint8)
            start = -memory.ctypes.data % PAGE_BYTES
            piece = memory[start : start + num_bytes]
            self._pieces.append(piece)
        else:
            self._free = [p for p in self._free if p is not piece]
        flat = torch.frombuffer(piece, dtype=dtype, count=count)
        self._taken.append((piece, StorageWeakRef(flat.untyped_storage())))
        return flat.view(shape)

    def _take_back(self) -> None:
        alive = []
        for piece, storage in self._taken:
            if storage.expired():
                self._free.append(piece)
            else:
                alive.append((piece, storage))
        self._taken = alive


class _Noting(TorchDispatchMode):
    """Takes note of the calls."""

    defers = False  # they are carried out later

    def __init__(self, pool: OutputPool) -> None:
        super().__init__()
        self.pool = pool
        self.calls: list[Call] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would import its compiler to keep it off, which takes a second and 50 MB."""
        return False


_N = TypeVar("_N", bound=_Noting)


class Recorder(_Noting):
    """For calls that are carried out as ever; sees whether anything but kernels computed."""

    def __init__(self, pool: OutputPool) -> None:
        super().__init__(pool)
        self.complete = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable or not _is_view(result, args):
            self.complete = False
        return result


class _Collector(_Noting):
    """For calls that are carried out together: at the end, and before torch computes anything.

    Between two calls that are carried out at once another Python thread may take the interpreter,
    and all threads of the kernels wait until it gives that back.
    """

    defers = True

    def __init__(self, pool: OutputPool, carry_out: Callable[[Sequence[Call]], None]) -> None:
        super().__init__(pool)
        self._carry_out = carry_out
        self._computed: list[Any] = []  # by torch: the calls may read it when nobody else does

    def finish(self) -> None:
        calls, self.calls = self.calls, []
        if calls:
            _of_thread.recorder = None  # carrying them out is a call, too
            self._carry_out(calls)
            _of_thread.recorder = self
        self._computed.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket in _VIEWS:
            return func(*args, **(kwargs or {}))
        self.finish()
        result = func(*args, **(kwargs or {}))
        self._computed.append(result)
        return result


def _is_view(result: Any, args: Sequence[Any]) -> bool:
    if not _has_storage(result):
        return False
    sources = {a.untyped_storage().data_ptr() for a in args if _has_storage(a)}
    return result.untyped_storage().data_ptr() in sources


def _has_storage(thing: Any) -> bool:
    """Weights in a layout of oneDNN's own have none to look at."""
    return isinstance(thing, torch.Tensor) and thing.layout is torch.strided


class _OfThread(threading.local):
    recorder: _Noting | None = None


_of_thread = _OfThread()


@contextmanager
def recording(pool: OutputPool) -> Iterator[Recorder]:
    """All kernel calls of this thread are taken note of, and carried out as ever."""
    assert _of_thread.recorder is None
    with _noting(Recorder(pool)) as recorder:
        yield recorder


@contextmanager
def collecting(pool: OutputPool, carry_out: Callable[[Sequence[Call]], None]) -> Iterator[None]:
    """The kernel calls of this thread are given to `carry_out`, together where that may be. What
    they read and write, but for what kernels and torch make meanwhile, must stay until the end.
    While a recording is made they are carried out as ever."""
    if _of_thread.recorder is not None:
        yield
        return
    with _noting(_Collector(pool, carry_out)) as collector:
        yield
        collector.finish()


@contextmanager
def _noting(noting: _N) -> Iterator[_N]:
    noting.pool.begin()
    _of_thread.recorder = noting
    try:
        with noting:
            yield noting
    finally:
        _of_thread.recorder = None


def current_recorder() -> _Noting | None:
    return _of_thread.recorder


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """For what a kernel returns."""
    recorder = _of_thread.recorder
    if recorder is None:
        return torch.empty(shape, dtype=dtype)
    return recorder.pool.empty(shape, dtype)


def empty_rows(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """For rows that a product reads. From one to the next there is a line that nobody needs, or
    rows of some lengths would all lie in the same few places of the first cache level."""
    return empty((rows, width + LINE_BYTES // dtype.itemsize), dtype)[:, :width]
