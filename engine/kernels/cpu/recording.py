"""Writing down the kernel calls of a function, for `replay.py` to repeat them, or to carry them out
at once when the function has made them all.

Such calls find what they were given at the same addresses. So whatever a kernel returns meanwhile
lies in memory of an `OutputPool`, where it stays.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from struct import Struct
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.kernels.cpu.emit import LINE_BYTES

PAGE_BYTES = 4096
# What never computes anything, of all that might give a view: `to` or `reshape` may copy.
_ATEN = torch.ops.aten
_VIEWS = (_ATEN.view, _ATEN.slice, _ATEN.select, _ATEN.alias, _ATEN.detach, _ATEN.transpose)

Shape = tuple[int, ...]


class Call(NamedTuple):
    code: int  # address of the machine code
    num_threads: int
    layout: Struct  # of the job, its own words included
    words: tuple[float, ...]


class _Piece:
    """Memory of a pool's, and which tensors look at it: those count in its storage."""

    def __init__(self, num_bytes: int) -> None:
        memory = np.empty(num_bytes + PAGE_BYTES, np.uint8)
        start = -memory.ctypes.data % PAGE_BYTES
        self.num_bytes = num_bytes
        self._bytes = torch.from_numpy(memory[start : start + num_bytes])
        self._storage = self._bytes.untyped_storage()
        self._whole: dict[torch.dtype, torch.Tensor] = {}
        self._num_own = _num_users(self._storage)

    @property
    def is_seen(self) -> bool:
        return _num_users(self._storage) > self._num_own

    def seen_as(self, shape: Shape, strides: Shape, dtype: torch.dtype) -> torch.Tensor:
        whole = self._whole.get(dtype)
        if whole is None:
            whole = self._whole[dtype] = self._bytes.view(dtype)
            self._num_own += 1
        return torch.as_strided(whole, shape, strides)


class OutputPool:
    """Memory for the outputs of recorded calls; recordings that use it do not run at once.

    Within a recording a piece is used again when no tensor looks at it any more.
    """

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []
        self._taken: list[_Piece] = []
        self._free: defaultdict[int, list[_Piece]] = defaultdict(list)  # by their size

    def begin(self) -> None:
        self._taken = []
        self._free.clear()
        for piece in self._pieces:
            self._free[piece.num_bytes].append(piece)

    def empty(self, shape: Shape, strides: Shape, dtype: torch.dtype) -> torch.Tensor:
        # None of this is for the mode under which it happens, which would take longer over it.
        with torch._C._DisableTorchDispatch():
            count = shape[0] * strides[0]
            if count == 0:  # as of a prompt's part that nobody wants a token of
                return torch.empty_strided(shape, strides, dtype=dtype)
            # Powers of two, so that batches of many sizes do with few pieces.
            num_bytes = 1 << (max(count * dtype.itemsize, PAGE_BYTES) - 1).bit_length()
            self._take_back()
            piece = self._take(num_bytes)
            return piece.seen_as(shape, strides, dtype)

    def _take_back(self) -> None:
        seen: list[_Piece] = []
        for piece in self._taken:
            place = seen if piece.is_seen else self._free[piece.num_bytes]
            place.append(piece)
        self._taken = seen

    def _take(self, num_bytes: int) -> _Piece:
        free = self._free[num_bytes]
        if free:
            piece = free.pop()
        else:
            piece = _Piece(num_bytes)
            self._pieces.append(piece)
        self._taken.append(piece)
        return piece


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
        self._computed: list[torch.UntypedStorage] = []  # by torch; calls may be its last readers

    def finish(self) -> None:
        calls, self.calls = self.calls, []
        if calls:
            _of_thread.recorder = None  # carrying them out is a call, too
            self._carry_out(calls)
            _of_thread.recorder = self
            # What somebody has may be given to further calls, and let go before those.
            self._computed = [storage for storage in self._computed if _num_users(storage) > 1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket in _VIEWS:
            return func(*args, **(kwargs or {}))
        self.finish()
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, tuple | list) else (result,)
        self._computed += [one.untyped_storage() for one in results if _has_storage(one)]
        return result


def _num_users(storage: torch.UntypedStorage) -> int:
    """Whoever asks, and all tensors. Torch has no word of its own for it; weak references took 3 us
    each to make."""
    return torch._C._storage_Use_Count(storage._cdata)


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


def empty(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """For what a kernel returns."""
    recorder = _of_thread.recorder
    if recorder is None:
        return torch.empty(shape, dtype=dtype)
    strides = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    return recorder.pool.empty(shape, strides, dtype)


def empty_rows(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """For rows that a product reads. From one to the next there is a line that nobody needs, or
    rows of some lengths would all lie in the same few places of the first cache level."""
    pitch = width + LINE_BYTES // dtype.itemsize
    recorder = _of_thread.recorder
    if recorder is None:
        return torch.empty((rows, pitch), dtype=dtype)[:, :width]
    return recorder.pool.empty((rows, width), (pitch, 1), dtype)
