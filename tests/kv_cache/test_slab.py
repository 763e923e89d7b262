"""A slab's strides, and its blobs beyond 4 GiB."""

import ctypes
import mmap
import os
import platform
import re
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch

from kv_cache.layout import KV_FORMATS, BlockLayout, KvGroup
from kv_cache.slab import ELEMENT_DTYPES, KvSlab
from tests.populating import may_populate, resident_bytes

CPU = torch.device("cpu")
GIB = 2**30
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HAS_HUGE_PAGES = HUGE_PAGES.exists() and "[never]" not in HUGE_PAGES.read_text()


def make_layout(format: str = "bf16", widths: tuple[int, ...] = (16, 8)) -> BlockLayout:
    group = KvGroup(layers=(0, 2, 3), num_kv_heads=2, widths=widths)
    return BlockLayout(group, 16, KV_FORMATS[format])


@pytest.mark.parametrize("format", sorted(ELEMENT_DTYPES))
def test_an_element_lies_where_the_layout_says(format: str) -> None:
    layout = make_layout(format)
    slab = KvSlab.allocate(layout, 3, CPU)
    size = slab.data.itemsize
    slab.data.view(torch.uint8).copy_(torch.arange(slab.data.nbytes) % 251)
    for head in range(2):
        for layer in range(3):
            for plane, width in enumerate(layout.group.widths):
                for token in (0, 5, 15):
                    index = (
                        2 * slab.block_stride
                        + head * slab.head_stride
                        + layer * slab.layer_stride
                        + slab.plane_offsets[plane]
                        + token * width
                    )
                    start = layout.offset(head, layer, plane, token)
                    row = slab.blob(2)[start : start + width * size].view(slab.data.dtype)
                    there = slab.data[index : index + width]
                    assert torch.equal(row.view(torch.uint8), there.view(torch.uint8))


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_a_scale_lies_where_the_layout_says(format: str) -> None:
    layout = make_layout(format)
    slab = KvSlab.allocate(layout, 3, CPU)
    slab.data.view(torch.uint8).copy_(torch.arange(slab.data.nbytes) % 127)
    for place in product(range(2), range(3), range(2), (0, 5, 15)):
        head, layer, plane, token = place
        index = 2 * slab.scale_block_stride + head * slab.scale_head_stride
        index += slab.scale_offset(layer, plane) + token
        start = layout.scale_offset(*place)
        scale = slab.blob(2)[start : start + 4].view(torch.float32)
        assert torch.equal(scale, slab.scales[index : index + 1])


def test_only_quantised_formats_have_scales() -> None:
    with pytest.raises(AssertionError, match="bf16 has no scales"):
        KvSlab.allocate(make_layout(), 1, CPU).scales  # noqa: B018


def test_a_new_slab_is_zero_and_has_its_blocks() -> None:
    slab = KvSlab.allocate(make_layout(), 5, CPU)
    assert slab.num_blocks == 5
    assert slab.blob(4).shape == (slab.layout.blob_bytes,)
    assert not slab.data.any()


def test_a_new_quantised_slab_reads_as_zeros() -> None:
    slab = KvSlab.allocate(make_layout("fp8_e4m3"), 2, CPU)
    assert slab.data.nbytes == 2 * slab.layout.blob_bytes
    assert not slab.data.any()
    assert not slab.scales.any()


def test_a_blob_shares_the_slabs_memory_and_no_other_blob() -> None:
    slab = KvSlab.allocate(make_layout(), 3, CPU)
    slab.blob(1).fill_(255)
    assert not slab.blob(0).any()
    assert not slab.blob(2).any()
    assert slab.blob(1).data_ptr() - slab.blob(0).data_ptr() == slab.layout.blob_bytes


def test_blobs_beyond_4_gib_are_addressed_right(tmp_path: Path) -> None:
    """In a sparse file, of which only the pages that are touched exist. The number of its
    elements does not fit 31 bits, nor do their offsets in bytes fit 32."""
    layout = make_layout("fp16", widths=(128, 128))
    num_blocks = 5 * GIB // layout.blob_bytes
    with (tmp_path / "slab").open("w+b") as file:
        file.truncate(num_blocks * layout.blob_bytes)
        memory = mmap.mmap(file.fileno(), num_blocks * layout.blob_bytes)
    slab = KvSlab(layout, torch.frombuffer(memory, dtype=torch.float16))
    assert slab.num_blocks == num_blocks
    assert slab.data.numel() > 2**31
    for block in (4 * GIB // layout.blob_bytes + 1, num_blocks - 1):
        start = block * layout.blob_bytes
        memory[start : start + 4] = b"\x01\x02\x03\x04"
        assert slab.blob(block)[:4].tolist() == [1, 2, 3, 4]
        slab.blob(block)[-2:] = 7
        end = start + layout.blob_bytes
        assert memory[end - 3 : end] == b"\x00\x07\x07"
        wrapped = (start % 2**32) // layout.blob_bytes
        assert not slab.blob(wrapped).any(), "the offset was cut to 32 bits"


def test_a_touched_slab_is_in_memory_and_holds_what_it_held() -> None:
    layout = make_layout()
    slab = KvSlab.allocate(layout, (64 << 20) // layout.blob_bytes, CPU)
    slab.blob(5).fill_(3)
    before = resident_bytes()
    assert slab.touch() == may_populate()
    assert (resident_bytes() - before > 0.9 * slab.data.nbytes) == may_populate()
    assert (slab.blob(5) == 3).all()
    assert not slab.blob(6).any()


def test_touching_ends_when_it_is_told_to() -> None:
    layout = make_layout()
    slab = KvSlab.allocate(layout, (64 << 20) // layout.blob_bytes, CPU)
    before = resident_bytes()
    slab.touch(stop=lambda: True)
    assert resident_bytes() - before < slab.data.nbytes / 2


def test_nobody_waits_long_for_what_is_touched() -> None:
    """Until a piece is there nothing else of the process is mapped."""
    layout = make_layout()
    slab = KvSlab.allocate(layout, (64 << 20) // layout.blob_bytes, CPU)
    asked_at = []

    def ask() -> bool:
        asked_at.append(resident_bytes())
        return False

    slab.touch(ask)
    steps = [after - before for before, after in pairwise(asked_at)]
    assert max(steps) <= 4 << 20


def test_nobody_is_inside_the_function_that_ucx_writes_over() -> None:
    """In a process whose `madvise` cannot be gone through any more."""
    layout = make_layout()
    expected = may_populate()
    child = os.fork()
    if not child:
        right = False
        try:
            _overwrite(ctypes.CDLL(None).madvise)
            slab = KvSlab(layout, torch.frombuffer(mmap.mmap(-1, 8 << 20), dtype=torch.float32))
            before = resident_bytes()
            touched = slab.touch()
            right = touched == expected == (resident_bytes() - before > 4 << 20)
        finally:
            os._exit(0 if right else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0


def _overwrite(function: Any) -> None:
    """With what no CPU carries out."""
    illegal = {"x86_64": b"\x0f\x0b", "aarch64": bytes(4)}[platform.machine()]
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    page, size = address & -mmap.PAGESIZE, 2 * mmap.PAGESIZE  # it may lie on an edge
    mode = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    assert not ctypes.CDLL(None).mprotect(ctypes.c_void_p(page), ctypes.c_size_t(size), mode)
    ctypes.memmove(address, illegal, len(illegal))


@pytest.mark.skipif(not HAS_HUGE_PAGES, reason="a system without transparent huge pages")
def test_a_slab_lies_in_huge_pages() -> None:
    layout = make_layout()
    slab = KvSlab.allocate(layout, (64 << 20) // layout.blob_bytes, CPU)
    slab.touch()
    kilobytes = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= slab.data.data_ptr() < int(bounds[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            kilobytes = int(line.split()[1])
    assert kilobytes << 10 > slab.data.nbytes / 2
