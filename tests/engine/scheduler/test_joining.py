"""Where many answers are under way, prompts that come within a moment begin together."""

import pytest

from engine.scheduler.scheduler import MANY
from tests.engine.scheduler.test_scheduler import BLOCK, Bench

JOIN_S = 0.01


def _bench(num_running: int) -> Bench:
    """So many answers under way, the last of which began at 1 s."""
    bench = Bench(num_blocks=8 * MANY, max_num_seqs=4 * MANY, budget=64 * MANY)
    for i in range(num_running):
        bench.add(f"running {i}", [i] * BLOCK, max_tokens=30)
    assert _begun(bench, 1.0) == num_running
    return bench


def _begun(bench: Bench, now_s: float) -> int:
    """Prompts that are read in the next step."""
    step = bench.scheduler.schedule(now_s, join_s=JOIN_S)
    assert step is not None
    flight = bench.launch(step)
    assert flight is not None
    bench.take(bench.end(flight))
    return len(step.plan.entering)


def test_who_comes_within_a_moment_of_others_waits_for_more() -> None:
    bench = _bench(MANY)
    bench.add("first", [31] * BLOCK)
    assert _begun(bench, 1.004) == 0
    bench.add("second", [32] * BLOCK)
    assert _begun(bench, 1.009) == 0
    assert _begun(bench, 1.0101) == 2
    bench.add("third", [33] * BLOCK)
    assert _begun(bench, 1.015) == 0
    assert _begun(bench, 1.0202) == 1


@pytest.mark.parametrize(
    ("num_running", "now_s"),
    [
        pytest.param(MANY - 1, 1.001, id="few"),
        pytest.param(MANY, 1.0101, id="nobody came lately"),
    ],
)
def test_who_need_not_wait_begins_at_once(num_running: int, now_s: float) -> None:
    bench = _bench(num_running)
    bench.add("new", [31] * BLOCK)
    assert _begun(bench, now_s) == 1


def test_a_moment_in_which_nobody_came_counts_for_nobody() -> None:
    bench = _bench(MANY)
    assert _begun(bench, 1.0201) == 0
    bench.add("new", [31] * BLOCK)
    assert _begun(bench, 1.0202) == 1
