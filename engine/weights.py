"""Brings weights from a checkpoint into tensors, of the wanted type and where they are wanted."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from engine.checkpoint import StoredTensor, open_checkpoint
from engine.errors import ModelError
from engine.memory import format_bytes

logger = logging.getLogger(__name__)

_TELL_S = 5.0  # between two words of how far it is

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class TensorSource(Protocol):
    """Fills tensors by name."""

    def read(self, name: str, out: torch.Tensor) -> None:
        """Fills a contiguous tensor of exactly the stored shape, whatever its type and device."""
        ...


class CheckpointTensors:
    """Tensors of a folder's safetensors files.

    Bytes are read straight into their destination: a memory-mapped file would count in the
    process's resident size, and a file that shrinks meanwhile would kill it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stored: Mapping[str, StoredTensor] = open_checkpoint(folder)
        self._num_read = 0
        self._told_at = time.monotonic()

    def read(self, name: str, out: torch.Tensor) -> None:
        stored = self.stored.get(name)
        if stored is None:
            raise ModelError(f"{self.folder}: {name}: missing in the checkpoint")
        if stored.shape != tuple(out.shape):
            raise ModelError(
                f"{stored.file}: {name}: has shape {list(stored.shape)},"
                f" the config asks for {list(out.shape)}"
            )
        dtype = _DTYPES.get(stored.dtype)
        if dtype is None:
            raise ModelError(
                f"{stored.file}: {name}: element type {stored.dtype} is not supported; supported"
                f" are {', '.join(_DTYPES)}"
            )
        if dtype is out.dtype and out.is_cpu:
            _read_bytes(stored, out)
        else:
            raw = torch.empty(stored.shape, dtype=dtype)
            _read_bytes(stored, raw)
            out.copy_(raw)
        self._tell(stored.size)

    def _tell(self, num_bytes: int) -> None:
        self._num_read += num_bytes
        now = time.monotonic()
        if now - self._told_at >= _TELL_S:
            self._told_at = now
            whole = sum(one.size for one in self.stored.values())
            done, all_of_it = format_bytes(self._num_read), format_bytes(whole)
            logger.info("%s of %s of weights are read", done, all_of_it)


def _read_bytes(stored: StoredTensor, out: torch.Tensor) -> None:
    if stored.size == 0:
        return
    target = out.view(-1).view(torch.uint8).numpy().data
    try:
        with stored.file.open("rb", buffering=0) as file:
            file.seek(stored.offset)
            while target:
                count = file.readinto(target)
                if not count:
                    raise ModelError(f"{stored.file}: {stored.name}: the file ends inside it")
                target = target[count:]
    except OSError as error:
        raise ModelError(f"{stored.file}: {stored.name}: cannot be read: {error}") from error
