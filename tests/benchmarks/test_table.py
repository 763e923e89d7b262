import pytest

from benchmarks.bounds import Limits
from benchmarks.table import as_text, rows

LIMITS = Limits(read_bytes_s=33e9, gemm_flops_s=434e9)


def answer(total_s: float, step_s: float) -> dict[str, object]:
    return {"total_s": total_s, "first_token_s": [0.2], "decode_step_s": [step_s] * 3}


def test_ratio_is_above_one_where_ours_is_better_and_medians_are_over_turns() -> None:
    ours = [answer(8.0, 0.03), answer(10.0, 0.04), answer(50.0, 0.05)]
    theirs = [answer(20.0, 0.02)] * 3
    rate, step = rows({"batch-512": {"kvrelay": ours, "vllm": theirs}}, LIMITS)
    assert rate["kvrelay"] == pytest.approx(4096 / 10)
    assert rate["ratio"] == pytest.approx(2.0)
    assert step["kvrelay"] == pytest.approx(40)
    assert step["ratio"] == pytest.approx(0.5)
    assert rate["share of limit"] < 1
    assert step["share of limit"] == pytest.approx(step["limit"] / 40)


def test_starts_stand_beside_the_cache_that_they_come_with() -> None:
    start = {"first_start_s": 9.0, "second_start_s": 2.5, "kv_bytes": 512 << 20}
    table = rows({"start": {"kvrelay": [start] * 2}}, LIMITS)
    assert [(row["unit"], row["kvrelay"]) for row in table] == [("s", 9), ("s", 2.5), ("MiB", 512)]
    assert table[-1]["values"] == {"kvrelay": [512, 512]}


def test_one_engine_alone_has_no_ratio() -> None:
    (row,) = rows({"overhead": {"kvrelay": [answer(1.0, 0.0012)]}}, LIMITS)
    assert row["vLLM"] is None
    assert row["limit"] is None
    last = as_text([row]).splitlines()[-1]
    assert [cell.strip() for cell in last.strip("|").split("|")] == [
        *("overhead", "median step", "ms", "1.20"),
        *("-", "-", "-", "-"),
    ]
