"""The name of a block: what its tokens are and all that came before them.

A name is BLAKE2b-128 over the block's token ids, keyed by its parent's name. The root is
keyed by what else decides the bytes of a cache: the model's fingerprint with the format, the
tenant's salt and the adapter. Equal on every machine, whatever its byte order; the version
changes with the function. Only full blocks have names.

Imports neither torch nor numpy: the router and the ingress name blocks too.
"""

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NewType

BlockName = NewType("BlockName", bytes)

NAMES_VERSION = 1
NAME_BYTES = 16
_PERSON = b"kvrelay.block.%d" % NAMES_VERSION


def cache_identity(fingerprint: str, kv_format: str, block_size: int) -> str:
    """The `fingerprint` of `root_name`, of a model and the format that its cache has."""
    return f"{fingerprint}/{kv_format}/{block_size}"


def root_name(fingerprint: str, salt: str = "", adapter: str = "") -> BlockName:
    """The parent of every first block under this model and format, tenant and adapter."""
    digest = blake2b(digest_size=NAME_BYTES, person=_PERSON)
    for part in (fingerprint, salt, adapter):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return BlockName(digest.digest())


def name_blocks(parent: BlockName, token_ids: Sequence[int], block_size: int) -> list[BlockName]:
    """Names of the full blocks of `token_ids`, which begin right after `parent`'s block."""
    tokens = array("I", token_ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    data = memoryview(tokens.tobytes())
    step = block_size * tokens.itemsize
    names: list[BlockName] = []
    for start in range(0, len(data) - step + 1, step):
        block = data[start : start + step]
        parent = BlockName(
            blake2b(block, digest_size=NAME_BYTES, key=parent, person=_PERSON).digest()
        )
        names.append(parent)
    return names


class SequenceNames:
    """The names of one growing sequence; each is computed once, when its block is full."""

    def __init__(self, root: BlockName, block_size: int) -> None:
        self.names: list[BlockName] = []
        self._parent = root
        self._block_size = block_size

    def grow(self, token_ids: Sequence[int]) -> list[BlockName]:
        """Names what is full now; `token_ids` are those of the whole sequence so far."""
        start = len(self.names) * self._block_size
        if len(token_ids) - start >= self._block_size:
            self.names += name_blocks(self._parent, token_ids[start:], self._block_size)
            self._parent = self.names[-1]
        return self.names

    def fork(self) -> "SequenceNames":
        """For a second sequence that begins with the same tokens."""
        twin = SequenceNames(self._parent, self._block_size)
        twin.names = self.names.copy()
        return twin
