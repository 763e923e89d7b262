"""An NCCL communicator of two, by NCCL's own interface.

torch's groups are static, and their watchdog ends the process when a peer dies. Here nothing
watches: whoever waits looks at the communicator's state, and aborts it, which ends what was posted.
"""

import ctypes
import time
from collections import deque
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from kv_transfer.carrier import End
from kv_transfer.collective_rendezvous import Rendezvous
from kv_transfer.errors import ConnectorUnavailable

_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1
_SPIN_S = 200e-6  # then it naps, as whoever waits for a READ does
_NAP_S = 50e-6


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


class _Config(ctypes.Structure):
    """ncclConfig_t as of 2.14; a later library takes its defaults for what came after."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


_Comm = ctypes.c_void_p
_Stream = ctypes.c_void_p
_SIGNATURES: dict[str, tuple[object, ...]] = {
    "ncclGetUniqueId": (ctypes.POINTER(UniqueId),),
    "ncclCommInitRankConfig": (
        ctypes.POINTER(_Comm),
        ctypes.c_int,
        UniqueId,
        ctypes.c_int,
        ctypes.POINTER(_Config),
    ),
    "ncclCommGetAsyncError": (_Comm, ctypes.POINTER(ctypes.c_int)),
    "ncclCommAbort": (_Comm,),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    **dict.fromkeys(
        ("ncclSend", "ncclRecv"),
        (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _Comm, _Stream),
    ),
}


@cache
def load() -> ctypes.CDLL:
    """The library that torch has loaded."""
    if not torch.cuda.is_available():
        raise ConnectorUnavailable("memory: 'cuda', torch finds no GPU")
    try:
        library = ctypes.CDLL("libnccl.so.2")
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
        library.ncclGetErrorString.argtypes = (ctypes.c_int,)
        library.ncclGetErrorString.restype = ctypes.c_char_p
    except (OSError, AttributeError) as e:
        raise ConnectorUnavailable(f"memory: 'cuda', NCCL cannot be loaded: {e}") from e
    return library


class NcclGroup:
    """One thread owns it; `interrupt` is for any thread.

    Every call is made without blocking, so that each wait has a deadline. What is posted has a
    stream of its own, and an event that tells its end.
    """

    def __init__(
        self, unique: UniqueId, rank: int, device: int, form_s: float, num_ranks: int = 2
    ) -> None:
        self._nccl = load()
        self._other = num_ranks - 1 - rank
        self._device = torch.device("cuda", device)
        self._form_s = form_s
        self._interrupted = False
        self._posted: deque[torch.cuda.Event] = deque()
        self._comm = _Comm()
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21400, blocking=0)
        with torch.cuda.device(self._device):
            status = self._nccl.ncclCommInitRankConfig(
                ctypes.byref(self._comm), num_ranks, unique, rank, ctypes.byref(config)
            )
        try:
            self._settle(status)
        except OSError:
            self.close()
            raise

    def send(self, data: Tensor) -> None:
        self._post(self._nccl.ncclSend, data)

    def receive(self, data: Tensor) -> None:
        self._post(self._nccl.ncclRecv, data)

    def wait(self, seconds: float) -> None:
        self._until(self._posted[0].query, seconds)
        self._posted.popleft()

    def interrupt(self) -> None:
        self._interrupted = True

    def close(self) -> None:
        """Kernels that wait for the peer end; then nothing of theirs is left on the stream."""
        comm, self._comm = self._comm, _Comm()
        if comm:
            self._nccl.ncclCommAbort(comm)
            self._stream.synchronize()

    def _post(self, act: Callable[..., int], data: Tensor) -> None:
        with torch.cuda.device(self._device):
            self._settle(
                act(
                    data.data_ptr(),
                    data.numel(),
                    _UINT8,
                    self._other,
                    self._comm,
                    self._stream.cuda_stream,
                )
            )
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._posted.append(event)

    def _settle(self, status: int) -> None:
        """Until what was called has been done, or launched."""
        if status != _IN_PROGRESS:
            check(status)
        self._until(lambda: self._state() == _SUCCESS, self._form_s)

    def _until(self, reached: Callable[[], bool], seconds: float) -> None:
        started = time.monotonic()
        while not reached():
            self._state()
            waited = time.monotonic() - started
            if self._interrupted or waited > seconds:
                raise ConnectionError("the peer does not answer, or is not wanted any more")
            if waited > _SPIN_S:
                time.sleep(_NAP_S)

    def _state(self) -> int:
        """Success, or in progress."""
        state = ctypes.c_int()
        check(self._nccl.ncclCommGetAsyncError(self._comm, ctypes.byref(state)))
        if state.value != _IN_PROGRESS:
            check(state.value)
        return state.value


def check(status: int) -> None:
    if status != _SUCCESS:
        raise ConnectionError(f"NCCL: {load().ncclGetErrorString(status).decode()}")


def new_id() -> UniqueId:
    unique = UniqueId()
    check(load().ncclGetUniqueId(ctypes.byref(unique)))
    return unique


def shared_id(end: End, rendezvous: Rendezvous) -> UniqueId:
    """The reader's, which both ends use."""
    if end is End.READER:
        rendezvous.put("nccl", bytes(new_id()))
    told = rendezvous.get("nccl")
    if len(told) != ctypes.sizeof(UniqueId):
        raise ConnectionError("the peer's id is none of NCCL's")
    return UniqueId.from_buffer_copy(told)
