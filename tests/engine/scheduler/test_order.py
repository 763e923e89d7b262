"""The shorter prompt first, and nobody overtaken by who came much later."""

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.sequence import QUEUED
from tests.engine.scheduler.test_scheduler import BLOCK, Bench

BOUND_S = 6.0


def shortest_first(**knobs: int) -> Bench:
    return Bench(num_blocks=40, max_overtake_s=BOUND_S, **knobs)  # type: ignore[arg-type]


def ends(bench: Bench) -> list[str]:
    order: list[str] = []
    while bench.scheduler.has_work:
        output = bench.step()
        assert output is not None
        order += output.updates
    return order


def test_of_those_that_wait_the_shortest_is_read_first() -> None:
    bench = shortest_first(budget=8)
    for name, length in (("long", 60), ("short", 5), ("middle", 30)):
        bench.add(name, [length % 7] * length, max_tokens=1, arrived_s=1.0)
    assert ends(bench) == ["short", "middle", "long"]


def test_what_is_cached_does_not_count() -> None:
    bench = shortest_first(budget=8)
    bench.add("before", [1] * 56, max_tokens=1)
    bench.run()
    bench.add("short", [2] * 20, max_tokens=1)
    bench.add("cached", [1] * 57, max_tokens=1)
    assert ends(bench) == ["cached", "short"]


def test_a_prompt_that_has_begun_lets_a_short_one_pass() -> None:
    bench = shortest_first(budget=8)
    bench.add("long", [1] * 60, max_tokens=1)
    bench.step()
    bench.add("short", [2] * 5, max_tokens=1, arrived_s=0.1)
    assert ends(bench) == ["short", "long"]


arrivals = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 8 * BLOCK), st.integers(1, 6)), max_size=25
)


@settings(max_examples=150)
@given(arrivals=arrivals, budget=st.sampled_from((4, 24)), num_seqs=st.integers(1, 3))
def test_nobody_waits_for_who_came_much_later(
    arrivals: list[tuple[int, int, int]], budget: int, num_seqs: int
) -> None:
    """One step a second. Who is admitted has overtaken all that wait and came before."""
    bench = shortest_first(budget=budget, max_num_seqs=num_seqs)
    arrived: dict[str, float] = {}
    now_s, rest = 0.0, list(arrivals)
    next_s = 0.0
    while rest or bench.scheduler.has_work:
        while rest and next_s <= now_s:
            pause_s, length, max_tokens = rest.pop(0)
            name = str(len(arrived))
            arrived[name] = now_s
            bench.add(name, [length % 7] * length, max_tokens=max_tokens, arrived_s=now_s)
            next_s = now_s + pause_s
        waiting = waiting_names(bench)
        bench.step()
        now_s += 1.0
        left = waiting_names(bench)
        for name in waiting - left:
            assert all(arrived[name] - arrived[other] < BOUND_S for other in left & arrived.keys())


def waiting_names(bench: Bench) -> set[str]:
    sequences = bench.scheduler._roster.sequences()
    return {s.request.source.request_id for s in sequences if s.state in QUEUED}
