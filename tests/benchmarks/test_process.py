"""Our engine in a process of its own, on the model that costs next to nothing."""

import sys
from pathlib import Path

import pytest

from benchmarks.model_folder import write_model
from benchmarks.process import Child, ChildError
from benchmarks.sides import Folders, ours
from benchmarks.workloads import THIN, WORKLOADS


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


def test_a_dead_engine_says_its_last_words(tmp_path: Path) -> None:
    code = "import sys; sys.exit('no such model')"
    with pytest.raises(ChildError, match="no such model"):
        Child([sys.executable, "-c", code], {}, tmp_path / "log")
