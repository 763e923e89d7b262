"""A prompt's prefix that comes from elsewhere, case by case."""

import pytest

from engine.errors import RequestError, StepError
from engine.handoff import ComputeHere, Delivered, PromptEnd, Reservation
from engine.request import HandOver, PromptTimes, RemotePrefix, RequestId
from engine.step import TokenLogprobs
from kv_cache.layout import KvGroup
from tests.engine.scheduler.fake_runner import answer
from tests.engine.scheduler.prefixes import fill
from tests.engine.scheduler.test_cases import report
from tests.engine.scheduler.test_hand_over import (
    PROMPT,
    R,
    chunks_of,
    drop,
    end,
    first_tokens,
    held,
    news_of,
    reserve,
)
from tests.engine.scheduler.test_scheduler import BLOCK, FULL, WINDOW, Bench

BOTH = (FULL, WINDOW)


def deliver(bench: Bench, reservation: Reservation, to: int) -> None:
    fill(bench.runner, reservation, to)
    end(bench, reservation, Delivered(end=to, times=PromptTimes(transfer_s=2.5)))
    bench.scheduler.check_integrity()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("groups", [(FULL,), (WINDOW,), BOTH])
def test_what_follows_the_prefix_is_computed(groups: tuple[KvGroup, ...], n: int) -> None:
    bench = Bench(groups=groups, num_blocks=20, budget=8)
    bench.add("r", PROMPT, prefix=RemotePrefix(24), n=n, max_tokens=4)
    reservation = reserve(bench)
    assert reservation.of_prefix
    assert (reservation.held.start, reservation.held.end) == (0, 24)
    assert not bench.scheduler.has_work
    deliver(bench, reservation, 24)
    assert len(list(bench.cache._tree.stored())) > 0, "what has arrived can be found"
    steps = bench.num_steps
    bench.run()
    assert bench.num_steps == steps + 2 + 3, "eleven tokens in two steps, and then three more"
    for choice in range(n):
        assert bench.tokens["r", choice] == answer(PROMPT, 1, choice, 4)
    assert report(bench, "r").num_cached_tokens == 24
    assert report(bench, "r").times == PromptTimes(transfer_s=2.5)


def test_only_the_window_seen_from_the_prefixs_end_is_reserved() -> None:
    """The window is 11: from 24 on, tokens from 14 on are seen; from 32 on, those from 22."""
    bench = Bench(groups=BOTH, num_blocks=20)
    bench.add("r", PROMPT, prefix=RemotePrefix(24), max_tokens=1)
    runs = reserve(bench).held.runs
    assert [(run.group, run.first_entry, len(run.blocks)) for run in runs] == [(0, 0, 3), (1, 1, 2)]


@pytest.mark.parametrize("arrived", [0, 8, 16])
def test_less_than_was_promised(arrived: int) -> None:
    bench = Bench()
    bench.add("r", PROMPT, prefix=RemotePrefix(24), max_tokens=4)
    deliver(bench, reserve(bench), arrived)
    assert bench.scheduler.stats().num_running == 1, "its blocks stay its own"
    bench.run()
    assert bench.tokens["r", 0] == answer(PROMPT, 1, 0, 4)
    assert report(bench, "r").num_cached_tokens == arrived


@pytest.mark.parametrize("cached", [0, 8])
@pytest.mark.parametrize("arrived", [8, 16])
def test_of_a_window_less_than_was_promised_is_nothing(arrived: int, cached: int) -> None:
    """What is seen from an earlier end was not reserved, so it did not come."""
    bench = Bench(groups=BOTH, num_blocks=20)
    if cached:
        bench.add("warm", PROMPT[:cached], max_tokens=1)
        bench.run()
    bench.add("r", PROMPT, prefix=RemotePrefix(32), max_tokens=4)
    deliver(bench, reserve(bench), arrived)
    assert bench.scheduler.stats().num_waiting == 1
    bench.run()
    assert bench.tokens["r", 0] == answer(PROMPT, 1, 0, 4)
    assert report(bench, "r").num_cached_tokens == cached
    assert report(bench, "r").times == PromptTimes(), (
        "it waited meanwhile, and is not told so twice"
    )


def test_a_prefix_that_is_hardly_longer_than_what_is_cached_is_computed() -> None:
    bench = Bench()
    bench.add("warm", PROMPT[:8], max_tokens=1)
    bench.run()
    bench.add("r", PROMPT, prefix=RemotePrefix(24, above=16), max_tokens=1)
    bench.run()
    assert report(bench, "r").num_cached_tokens == 8
    bench.cache.reset()
    bench.add("r2", PROMPT, prefix=RemotePrefix(24, above=16), max_tokens=1)
    assert reserve(bench).held.end == 24


@pytest.mark.parametrize(("above", "of_prefix"), [(10, False), (11, True)])
def test_what_nobody_has_decides_where_it_is_computed(above: int, of_prefix: bool) -> None:
    """Eleven tokens follow the prefix."""
    bench = Bench()
    bench.add("r", PROMPT, prefix=RemotePrefix(24), fetch_above=above, max_tokens=4)
    reservation = reserve(bench)
    assert reservation.of_prefix == of_prefix
    end(bench, reservation, ComputeHere())
    again = reserve(bench)
    assert again.of_prefix != of_prefix, "one way has failed, the other is left"
    end(bench, again, ComputeHere())
    bench.run()
    assert bench.tokens["r", 0] == answer(PROMPT, 1, 0, 4)


def test_prompt_logprobs_read_no_cache_of_others_either() -> None:
    bench = Bench()
    bench.add("r", PROMPT, prefix=RemotePrefix(24), prompt_logprobs=0, max_tokens=1)
    bench.run()
    assert report(bench, "r").num_cached_tokens == 0


@pytest.mark.parametrize("groups", [(FULL,), (WINDOW,), BOTH])
@pytest.mark.parametrize("first_token", [0, 8, 32])
def test_a_prompt_that_is_handed_over_begins_with_it(
    groups: tuple[KvGroup, ...], first_token: int
) -> None:
    bench = Bench(groups=groups, num_blocks=20, budget=8)
    bench.add("r", PROMPT, prefix=RemotePrefix(24), hand_over=HandOver(first_token))
    reservation = reserve(bench)
    fill(bench.runner, reservation, 24)
    output, _ = bench.scheduler.end_fetch(reservation, Delivered())
    told = [*output.hand_overs.get(R, ()), *news_of(bench)]
    ranges = [(chunk.held.start, chunk.held.end) for chunk in chunks_of(told)]
    expected = [(0, 24), (24, 32), (32, 35)]
    assert ranges == [(max(a, first_token), b) for a, b in expected if b > first_token]
    assert told[-1] == PromptEnd((first_tokens(0)[0],), 24)
    drop(bench, told)
    assert held(bench) == 0


@pytest.mark.parametrize("draw", [True, False])
def test_a_whole_prompt_from_elsewhere_is_handed_over(draw: bool) -> None:
    prompt = PROMPT[: 4 * BLOCK]
    bench = Bench()
    bench.add("r", prompt, prefix=RemotePrefix(32), hand_over=HandOver(draw=draw))
    reservation = reserve(bench)
    fill(bench.runner, reservation, 32)
    output, _ = bench.scheduler.end_fetch(reservation, Delivered())
    told = [*output.hand_overs[R], *(news_of(bench) if draw else ())]
    assert [(c.held.start, c.held.end) for c in chunks_of(told)] == [(0, 32)]
    assert isinstance(told[-1], PromptEnd)
    assert [t.token_id for t in told[-1].first_tokens] == answer(prompt, 1, 0, 1)[: int(draw)]
    assert not bench.scheduler.has_work
    assert len(list(bench.cache._tree.stored())) == 4
    drop(bench, told)
    assert held(bench) == 0


def test_an_aborted_prefix_keeps_its_blocks_until_it_is_ended() -> None:
    bench = Bench()
    bench.add("r", PROMPT, prefix=RemotePrefix(24), hand_over=HandOver())
    reservation = reserve(bench)
    bench.scheduler.abort(R)
    bench.scheduler.check_integrity()
    assert held(bench) == 3
    end(bench, reservation, Delivered())
    assert held(bench) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        Delivered(first_tokens(0)),
        Delivered((), [TokenLogprobs(1, -1.0, 1, ())]),
        Delivered(end=32),
        Delivered(end=-8),
    ],
)
def test_what_is_no_prefix_fails_the_request(wrong: Delivered) -> None:
    bench = Bench()
    bench.add("r", PROMPT, prefix=RemotePrefix(24))
    end(bench, reserve(bench), wrong)
    assert isinstance(bench.failures["r"], StepError)
    assert held(bench) == 0


def test_who_gives_up_its_blocks_spares_those_on_their_way_from_the_host() -> None:
    """A swapped sequence comes back before the next chunk of a longer prompt, which then finds no
    block and is preempted: not into the places that the first one is still read from."""
    bench = Bench(groups=(WINDOW,), num_blocks=10, max_overtake_s=100.0, swap_blocks=30)
    answers = {"first": ([4] * 8, 40), "short": ([5] * 5, 20), "late": ([6] * 6, 12)}
    arrivals = {"first": -200.0, "short": 1.0, "late": -150.0}

    def add(name: str) -> None:
        prompt, max_tokens = answers[name]
        bench.add(name, prompt, max_tokens=max_tokens, ignore_eos=True, arrived_s=arrivals[name])

    add("first")
    add("short")
    bench.step()
    bench.add("long", [1, 2, 3] * 20, prefix=RemotePrefix(24), max_tokens=3, arrived_s=2.0)
    reservation = reserve(bench)
    add("late")
    while ("late", 0) not in bench.reasons:
        bench.step()
    assert bench.scheduler.stats().num_swapped_blocks, "to make room for the late one"
    preemptions = bench.scheduler.stats().num_preemptions
    deliver(bench, reservation, 24)
    bench.step()
    assert bench.scheduler.stats().num_preemptions == preemptions + 1
    bench.run()
    for name, (prompt, max_tokens) in {**answers, "long": ([1, 2, 3] * 20, 3)}.items():
        assert bench.tokens[name, 0] == answer(prompt, 1, 0, max_tokens)


def test_a_part_of_a_prompt_is_no_prompt() -> None:
    bench = Bench()
    bench.add("r", PROMPT, fetch_above=0)
    end(bench, reserve(bench), Delivered(end=24))
    assert isinstance(bench.failures["r"], StepError)


@pytest.mark.parametrize(
    "wrong",
    [(0, 0), (3, 0), (40, 0), (-8, 0), ("8", 0), (8, -1), (8, "0")],
)
def test_what_cannot_be_is_refused(wrong: tuple[int, int]) -> None:
    bench = Bench()
    with pytest.raises(RequestError) as caught:
        bench.add("r", PROMPT, prefix=RemotePrefix(*wrong))
    assert caught.value.field == "prefix"
    assert RequestId("r") not in bench.scheduler._roster
