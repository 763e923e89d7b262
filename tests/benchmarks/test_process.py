"""Our engine in a process of its own, on the model that costs next to nothing."""

import sys
from pathlib import Path

import pytest
import torch

from benchmarks.model_folder import write_model
from benchmarks.peers.kvrelay_offline import settle
from benchmarks.process import Child, ChildError
from benchmarks.sides import Folders, ours
from benchmarks.workloads import THIN, WORKLOADS
from kv_cache import slab as slab_module
from kv_cache.layout import KV_FORMATS, BlockLayout, KvGroup
from kv_cache.slab import KvSlab
from tests.populating import resident_bytes


def test_our_engine_answers_with_a_run(tmp_path: Path) -> None:
    write_model(tmp_path / THIN.name, THIN)
    side = ours()
    child = side.start(THIN, Folders(tmp_path, tmp_path), settled=True)
    try:
        answer = child.ask("overhead", seed=0)
    finally:
        child.close()
    workload = WORKLOADS["overhead"]
    assert answer["num_output_tokens"] == workload.num_seqs * workload.output_len
    assert len(answer["first_token_s"]) == workload.num_seqs
    assert len(answer["decode_step_s"]) >= workload.output_len // 2
    assert child.info["weights_bytes"] == 2 * THIN.num_parameters


@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3"])
def test_a_cache_is_in_memory_also_where_the_system_cannot_be_told_so(
    format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab_module, "_populate", lambda start, size: False)
    layout = BlockLayout(KvGroup((0, 1), 2, (16, 16)), 16, KV_FORMATS[format])
    slab = KvSlab.allocate(layout, (64 << 20) // layout.blob_bytes, torch.device("cpu"))
    before = resident_bytes()
    settle([slab])
    assert resident_bytes() - before > 0.9 * slab.data.nbytes


def test_a_dead_engine_says_its_last_words(tmp_path: Path) -> None:
    code = "import sys; sys.exit('no such model')"
    with pytest.raises(ChildError, match="no such model"):
        Child([sys.executable, "-c", code], {}, tmp_path / "log")
