"""The identity of a model's weights: what the names of cached blocks are rooted in.

Equal on every machine that has the same weights, different for any others; so a path, a time
or a file's owner is never part of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import BinaryIO

from engine.checkpoint import StoredTensor, read_safetensors_header, weight_files
from engine.errors import ModelError
from engine.model_source import ModelSource
from engine.models.interface import LoadFormat

DIGEST_BYTES = 16
# A tensor up to their product is hashed whole: every norm, bias and small matrix. 100 GB in
# 1,000 tensors cost 64 MB of reads.
SAMPLES_PER_TENSOR = 16
SAMPLE_BYTES = 4096


def fingerprint(source: ModelSource, load_format: LoadFormat, seed: int, variant: str = "") -> str:
    """`variant` is `ModelDescription.variant`, with the max_model_len that will be served."""
    weights = _weights(source, load_format, seed)
    return f"{weights}+{variant}" if variant else weights


def differs(fingerprint: str, source: ModelSource) -> str | None:
    """What the fingerprint would begin with if it were of these weights, where it is known not
    to be. A folder's and the hub's, of which one may be a copy of the other, tell nothing of
    each other, nor does a folder without weights.
    """
    try:
        ours = _weights(source, "auto", 0)
    except ModelError:
        return None
    theirs = fingerprint.partition("+")[0]
    same_kind = ours.partition(":")[0] == theirs.partition(":")[0]
    return ours if same_kind and ours != theirs else None


def _weights(source: ModelSource, load_format: LoadFormat, seed: int) -> str:
    if load_format == "dummy":
        return f"dummy:{_hash_config(source.config_values, seed).hexdigest()}"
    if source.commit is not None:
        return f"hub:{source.commit}"
    digest = _hash_config(source.config_values, None)
    for path in weight_files(source.folder):
        stored = read_safetensors_header(path)
        digest.update(f"{path.name}:{stored.size}:{len(stored.header)}:".encode())
        digest.update(stored.header)
        try:
            with path.open("rb") as file:
                for tensor in stored.tensors.values():
                    _hash_samples(digest, file, tensor)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error}") from error
    return f"folder:{digest.hexdigest()}"


def _hash_config(values: Mapping[str, object], seed: int | None) -> hashlib.blake2b:
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(f"{seed}:{canonical}\n".encode(), digest_size=DIGEST_BYTES)


def same_samples(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors are the same, as far as samples of them tell."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    digests = []
    for tensor in (one, other):
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        try:
            with tensor.file.open("rb") as file:
                _hash_samples(digest, file, tensor)
        except OSError as error:
            raise ModelError(f"{tensor.file}: cannot be read: {error}") from error
        digests.append(digest.digest())
    return digests[0] == digests[1]


def _hash_samples(digest: hashlib.blake2b, file: BinaryIO, tensor: StoredTensor) -> None:
    """All of a small tensor; of a large one samples from its first byte to its last."""
    if tensor.size <= SAMPLES_PER_TENSOR * SAMPLE_BYTES:
        spans = [(0, tensor.size)]
    else:
        last = tensor.size - SAMPLE_BYTES
        gaps = SAMPLES_PER_TENSOR - 1
        spans = [(last * i // gaps, SAMPLE_BYTES) for i in range(SAMPLES_PER_TENSOR)]
    for start, size in spans:
        file.seek(tensor.offset + start)
        digest.update(file.read(size))
