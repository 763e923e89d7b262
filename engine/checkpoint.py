"""Where the tensors of a checkpoint lie: the safetensors files of a folder and their headers.

Reads no tensor and imports no torch. Every problem is a ModelError that names file and tensor.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from engine.errors import ModelError
from engine.models.json_config import read_json_object

logger = logging.getLogger(__name__)

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit

ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor's place: `size` bytes at `offset` of the file."""

    file: Path
    name: str
    dtype: str  # as safetensors spells it: F32, BF16, ...
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class SafetensorsFile:
    path: Path
    size: int
    header: bytes
    tensors: Mapping[str, StoredTensor]


def read_safetensors_header(path: Path) -> SafetensorsFile:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise ModelError(f"{path}: truncated, or not a safetensors file")
            header = file.read(length)
    except FileNotFoundError:
        raise ModelError(f"{path}: missing") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: its header is not valid JSON: {error}") from error
    if not isinstance(entries, dict):
        raise ModelError(f"{path}: its header is not an object")
    data = 8 + length
    tensors = {
        name: _stored_tensor(path, name, entry, data, size)
        for name, entry in entries.items()
        if name != "__metadata__"
    }
    return SafetensorsFile(path, size, header, tensors)


def _stored_tensor(path: Path, name: str, entry: object, data: int, size: int) -> StoredTensor:
    where = f"{path}: {name}"
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise ModelError(f"{where}: its entry in the header is malformed")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ModelError(f"{where}: unknown element type {dtype!r}")
    start, end = offsets
    if end - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ModelError(f"{where}: {end - start} bytes do not hold {dtype} {shape}")
    if data + end > size:
        raise ModelError(f"{where}: lies beyond the end of the file, which is truncated")
    return StoredTensor(path, name, dtype, tuple(shape), data + start, end - start)


def _are_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def is_no_weight(tensor: StoredTensor) -> bool:
    """Whether it is one that old checkpoints hold beside weights, and every class makes for itself.
    What masks are called may be a bias elsewhere, so their shapes have to be those of masks."""
    if tensor.name.endswith((".attn.bias", ".attention.bias")):
        return len(tensor.shape) == 4 and tensor.shape == (1, 1, *tensor.shape[-1:] * 2)
    if tensor.name.endswith(".masked_bias"):
        return math.prod(tensor.shape) == 1
    return tensor.name.endswith("rotary_emb.inv_freq")


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files that make up a checkpoint, in a fixed order. One file goes before an
    index: save_pretrained leaves either in its folder when it writes the other, and transformers,
    whose classes read some checkpoints for us, looks in this order."""
    if (folder / SINGLE_FILE).exists():
        return (folder / SINGLE_FILE,)
    if (folder / INDEX_FILE).exists():
        return tuple(sorted({folder / file for file in _index(folder).values()}))
    raise ModelError(f"{folder}: {no_weights_message(p.name for p in folder.iterdir())}")


def no_weights_message(names: Iterable[str]) -> str:
    others = sorted(
        n for n in names if n.endswith((".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"))
    )
    message = f"no weights: {SINGLE_FILE} or {INDEX_FILE} is needed"
    if others:
        shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        message += f"; these formats are not supported: {shown}"
    return message


def open_checkpoint(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder's checkpoint by name, all headers checked."""
    tensors: dict[str, StoredTensor] = {}
    files = weight_files(folder)
    for path in files:
        tensors.update(read_safetensors_header(path).tensors)
    if files == (folder / SINGLE_FILE,):
        if (folder / INDEX_FILE).exists():
            logger.warning("%s: %s is read, and %s is not", folder, SINGLE_FILE, INDEX_FILE)
    else:
        for name, file in _index(folder).items():
            if name not in tensors or tensors[name].file.name != file:
                raise ModelError(f"{folder / file}: {name}: missing, {INDEX_FILE} says it is here")
    return tensors


def _index(folder: Path) -> dict[str, str]:
    path = folder / INDEX_FILE
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path}: weight_map: missing, a file for each tensor is needed")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelError(f"{path}: weight_map: {name}: {file!r} is not a file of this folder")
    return weight_map
