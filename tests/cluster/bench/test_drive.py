"""When conversations begin, in a time that passes only while everybody waits."""

import asyncio
from collections.abc import Callable, Iterator
from itertools import islice
from statistics import mean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.bench.arrivals import Arrivals, ClosedLoop, OpenLoop, Recorded
from cluster.bench.drive import drive
from cluster.bench.lengths import Fixed
from cluster.bench.workload import Conversation, Synthetic
from tests.cluster.bench.virtual_time import now, pass_time, run_virtually


class Server:
    """Answers after a time of its own, while it is there; knows who came when."""

    def __init__(self, answer_s: float, is_there: Callable[[], bool] = lambda: True) -> None:
        self.begun: list[tuple[int, float]] = []
        self.most_at_once = 0
        self._answer_s = answer_s
        self._is_there = is_there
        self._at_once = 0

    async def converse(self, conversation: Conversation, due_s: float | None, end_s: float) -> bool:
        if due_s is not None:
            await asyncio.sleep(due_s - now())
        self.begun.append((conversation.number, now()))
        if not self._is_there():
            return False
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        await asyncio.sleep(self._answer_s)
        self._at_once -= 1
        return True

    @property
    def times(self) -> list[float]:
        """Since the first one."""
        return [at_s - self.begun[0][1] for _, at_s in self.begun]


def conversations(num: int) -> Iterator[Conversation]:
    return islice(Synthetic(Fixed(1), Fixed(1)).conversations(), num)


def recorded(times: list[float]) -> Iterator[Conversation]:
    return (Conversation(number, (), at_s) for number, at_s in enumerate(times))


def driven(
    what: Iterator[Conversation],
    arrivals: Arrivals,
    answer_s: float,
    duration_s: float | None = None,
) -> Server:
    server = Server(answer_s)
    run_virtually(drive(what, arrivals, server.converse, now, duration_s=duration_s))
    return server


@given(st.integers(1, 9), st.integers(0, 40))
def test_a_closed_loop_keeps_so_many_under_way(concurrency: int, num: int) -> None:
    server = driven(conversations(num), ClosedLoop(concurrency), 1.0)
    assert [number for number, _ in server.begun] == list(range(num))
    assert server.most_at_once == min(concurrency, num)
    assert [round(at_s) for _, at_s in server.begun] == [n // concurrency for n in range(num)]


def test_a_closed_loop_sends_nothing_after_its_time() -> None:
    server = driven(conversations(10**6), ClosedLoop(2), 1.0, duration_s=4.5)
    assert [round(at_s) for _, at_s in server.begun] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_a_closed_loop_leaves_a_server_that_has_gone() -> None:
    server = Server(1.0, lambda: now() < 4.5)
    driving = drive(conversations(10**6), ClosedLoop(2), server.converse, now, duration_s=60.0)
    assert not run_virtually(driving)
    # The last answer comes after the first failure, and the count begins anew.
    assert [round(at_s) for _, at_s in server.begun] == [n // 2 for n in range(2 * (5 + 10) + 1)]


def test_a_closed_loop_goes_on_with_a_server_that_is_back() -> None:
    server = Server(1.0, lambda: not 4.5 < now() < 13.5)
    driving = drive(conversations(60), ClosedLoop(2), server.converse, now)
    assert run_virtually(driving)
    assert len(server.begun) == 60


def test_an_open_loop_does_not_wait_for_answers() -> None:
    server = driven(conversations(50), OpenLoop(10.0, None), 100.0)
    assert server.most_at_once == 50
    assert server.times == pytest.approx([number / 10 for number in range(50)])


def test_an_open_loop_sends_nothing_after_its_time() -> None:
    server = driven(conversations(10**6), OpenLoop(10.0, None), 0.0, duration_s=2.05)
    assert len(server.begun) == 21


def test_a_rate_that_cannot_be_kept_ends_in_time_too() -> None:
    def made_slowly() -> Iterator[Conversation]:
        for conversation in conversations(10**6):
            pass_time(0.1)
            yield conversation

    server = driven(made_slowly(), OpenLoop(1e9, None), 0.0, duration_s=0.55)
    assert len(server.begun) == 8  # in the 0.25 s before it begins, too


def test_a_trace_is_sent_when_it_was_recorded() -> None:
    server = driven(recorded([0.0, 0.0, 3.0, 4.5]), Recorded(), 1.0)
    assert server.times == pytest.approx([0.0, 0.0, 3.0, 4.5])
    faster = driven(recorded([0.0, 0.0, 3.0, 4.5]), Recorded(speed=3.0), 1.0)
    assert faster.times == pytest.approx([0.0, 0.0, 1.0, 1.5])


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_intervals_have_their_rate_and_burstiness(burstiness: float) -> None:
    times = list(islice(OpenLoop(50.0, burstiness).times(seed=3), 20_001))
    gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    assert times[0] == 0.0
    assert min(gaps) >= 0.0
    assert mean(gaps) == pytest.approx(1 / 50, rel=0.05)
    # of a gamma distribution the deviation is the mean over the root of the shape
    assert pstdev(gaps) / mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)


@given(st.integers())
def test_arrivals_depend_on_the_seed_alone(seed: int) -> None:
    def first(seed: int) -> list[float]:
        return list(islice(OpenLoop(3.0, 0.5).times(seed), 5))

    assert first(seed) == first(seed)
    assert first(seed) != first(seed + 1)
