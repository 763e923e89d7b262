"""Names are a wire format: their bytes are pinned, and computed here a second time."""

import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache.names import SequenceNames, name_blocks, root_name

ROOT = Path(__file__).parents[2]
PERSON = b"kvrelay.block.1"
TOKENS = [0, 1, 2, 3, 2**31, 2**32 - 1, 128_000, 7, 5]
GOLDEN = {
    "root": "8570400a15e86ca25a6e54c89c7a6708",
    "salted": "ff669407f585baa0c1d8b4a73e053f9e",
    "names": ["5fbfcb786b10a8f39f32eb5c639cc25c", "fcc99ed97aadd6881c79a53f6013b40f"],
}

SCRIPT = """
import json
from kv_cache.names import name_blocks, root_name
root = root_name("llama bf16", "tenant", "adapter")
names = name_blocks(root_name("llama bf16"), {tokens}, 4)
print(json.dumps({{"root": root_name("llama bf16").hex(), "salted": root.hex(),
                   "names": [n.hex() for n in names]}}))
"""


def oracle_root(*parts: str) -> bytes:
    data = b"".join(struct.pack("<Q", len(p.encode())) + p.encode() for p in parts)
    return hashlib.blake2b(data, digest_size=16, person=PERSON).digest()


def oracle_name(parent: bytes, tokens: list[int]) -> bytes:
    data = struct.pack(f"<{len(tokens)}I", *tokens)
    return hashlib.blake2b(data, digest_size=16, key=parent, person=PERSON).digest()


def test_names_are_the_pinned_bytes() -> None:
    assert root_name("llama bf16").hex() == GOLDEN["root"]
    assert root_name("llama bf16", "tenant", "adapter").hex() == GOLDEN["salted"]
    names = name_blocks(root_name("llama bf16"), TOKENS, 4)
    assert [n.hex() for n in names] == GOLDEN["names"]


def test_names_are_what_hashlib_makes_of_the_definition() -> None:
    root = oracle_root("llama bf16", "tenant", "")
    assert root_name("llama bf16", "tenant") == root
    first = oracle_name(root, TOKENS[:4])
    names = name_blocks(root_name("llama bf16", "tenant"), TOKENS, 4)
    assert names == [first, oracle_name(first, TOKENS[4:8])]


@pytest.mark.parametrize("hash_seed", ["0", "12345"])
def test_names_do_not_depend_on_the_process(hash_seed: str) -> None:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    script = SCRIPT.format(tokens=TOKENS)
    output = subprocess.check_output([sys.executable, "-c", script], cwd=ROOT, env=env)
    assert json.loads(output) == GOLDEN


def test_names_do_not_depend_on_the_byte_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """There these ids lie in memory as those with their bytes turned lie here."""
    turned = [int.from_bytes(token.to_bytes(4, "little"), "big") for token in TOKENS]
    here = name_blocks(root_name("llama bf16"), TOKENS, 4)
    monkeypatch.setattr(sys, "byteorder", "big" if sys.byteorder == "little" else "little")
    assert name_blocks(root_name("llama bf16"), turned, 4) == here


def test_what_decides_the_bytes_of_a_cache_decides_the_root() -> None:
    roots = [
        root_name("a"),
        root_name("b"),
        root_name("a", "s"),
        root_name("a", "", "s"),
        root_name("as"),
        root_name("", "as"),
    ]
    assert len(set(roots)) == len(roots)


def test_a_name_implies_all_that_came_before_and_partial_blocks_have_none() -> None:
    root = root_name("m")
    one, two = name_blocks(root, [1] * 8, 4), name_blocks(root, [2] * 4 + [1] * 4, 4)
    assert one[1] != two[1]
    assert one[0] != one[1]
    assert name_blocks(root, [1] * 11, 4) == one
    assert name_blocks(root, [1] * 3, 4) == []


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.data())
def test_a_growing_sequence_is_named_as_a_whole_one(tokens: list[int], data: st.DataObject) -> None:
    root = root_name("m")
    growing = SequenceNames(root, 4)
    cuts = data.draw(st.lists(st.integers(0, len(tokens)), max_size=5))
    for cut in [*sorted(cuts), len(tokens)]:
        assert growing.grow(tokens[:cut]) == name_blocks(root, tokens[:cut], 4)
    twin = growing.fork()
    tail = [1, 2, 3, 4]
    assert twin.grow(tokens + tail) == name_blocks(root, tokens + tail, 4)
    assert growing.names == name_blocks(root, tokens, 4), "the fork is a copy"


def test_policies_are_imported_without_torch_or_numpy() -> None:
    files = (ROOT / "kv_cache").glob("*.py")
    modules = [f"kv_cache.{f.stem}" for f in files if f.stem not in ("__init__", "slab")]
    assert len(modules) >= 10
    script = (
        f"import sys, {', '.join(modules)}\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'a policy imports an array library'"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
