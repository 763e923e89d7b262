"""What the scheduler promises, case by case."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from engine.errors import QueueFullError, RequestError, StepError
from engine.request import ChoiceSoFar, FinishReason, GenerationRequest, PromptReport, RequestId
from engine.sampling import SamplingParams
from engine.step import NO_TOKEN_LEFT, NOT_FINITE
from kv_cache.config import blocks_needed
from kv_cache.events import Removed, Stored
from kv_cache.layout import KvGroup
from tests.engine.scheduler.fake_runner import TOLD, VOCAB, answer
from tests.engine.scheduler.test_scheduler import BLOCK, FULL, WINDOW, Bench


def report(bench: Bench, name: str) -> PromptReport:
    found = bench.prompts[name]
    assert isinstance(found, PromptReport)
    return found


def test_a_whole_prompt_hit_computes_one_token() -> None:
    bench = Bench()
    prompt = list(range(4 * BLOCK))
    bench.add("first", prompt, max_tokens=1)
    bench.run()
    bench.add("second", prompt, max_tokens=1)
    step = bench.scheduler.schedule()
    assert step is not None
    (part,) = step.plan.slices
    assert (part.start, part.num_tokens) == (len(prompt) - 1, 1)
    assert part.write_start == len(prompt), "the shared block is not written again"
    bench.scheduler.complete(step, bench.runner.execute(step.plan))
    assert bench.scheduler.figures().num_cached_tokens == len(prompt) - 1


def test_a_prompt_is_read_in_chunks_beside_running_sequences() -> None:
    bench = Bench(num_blocks=40, budget=10)
    bench.add("runs", [1, 2, 3], max_tokens=8)
    bench.step()
    bench.add("long", [4] * 25, max_tokens=1)
    sizes = []
    while bench.scheduler.has_work:
        step = bench.scheduler.schedule()
        assert step is not None
        sizes.append([s.num_tokens for s in step.plan.slices])
        bench.scheduler.complete(step, bench.runner.execute(step.plan))
    assert sizes[:3] == [[1, 9], [1, 9], [1, 7]]


def test_prompt_tokens_are_queued_until_they_are_computed_here() -> None:
    bench = Bench(num_blocks=40, budget=10, max_num_seqs=2)
    bench.add("runs", [1, 2, 3], max_tokens=20)
    counts = [bench.scheduler.stats().num_queued_tokens]
    bench.step()
    bench.add("long", [4] * 25, max_tokens=2)
    bench.add("waits", [5] * 7, max_tokens=1)
    bench.add("fetched", [6] * 30, fetch_above=8, max_tokens=1)
    bench.add("fetched if longer", [7] * 8, fetch_above=8, max_tokens=1)
    for _ in range(4):
        counts.append(bench.scheduler.stats().num_queued_tokens)
        bench.step()
    assert counts == [3, 25 + 15, 16 + 15, 7 + 15, 15]


def test_of_an_answer_that_goes_on_what_was_sent_is_queued_like_the_prompt() -> None:
    bench = Bench(num_blocks=40, budget=10)
    bench.add("r", [1, 2, 3], max_tokens=30, sent=(ChoiceSoFar([4] * 22),))
    counts = []
    for _ in range(4):
        counts.append(bench.scheduler.stats().num_queued_tokens)
        bench.step()
    assert counts == [25, 15, 5, 0]


def test_order_is_by_arrival_and_a_preempted_sequence_goes_first() -> None:
    bench = Bench(num_blocks=9, max_num_seqs=3)
    bench.add("a", [1] * 20, max_tokens=30)
    bench.add("b", [2] * 20, max_tokens=30)
    bench.add("c", [3] * 30, max_tokens=2)
    ends: list[str] = []
    while bench.scheduler.has_work:
        output = bench.step()
        assert output is not None
        ends += [r for r, u in output.updates.items() if u.deltas[-1].finish_reason]
    assert bench.scheduler.stats().num_preemptions > 0
    assert ends == ["a", "b", "c"]


def test_a_lower_priority_number_is_served_sooner() -> None:
    bench = Bench(max_num_seqs=1, by_priority=True)
    bench.add("later", [1, 2], priority=5, max_tokens=2)
    bench.add("sooner", [1, 2], priority=-1, max_tokens=2)
    bench.step()
    assert ("sooner", 0) in bench.tokens
    assert ("later", 0) not in bench.tokens
    bench.run()
    assert len(bench.tokens["later", 0]) == 2


@pytest.mark.parametrize("swap_blocks", [0, 40])
def test_the_urgent_keep_their_blocks_though_they_came_last(swap_blocks: int) -> None:
    """A preempted one would miss a step, and end after the other."""
    bench = Bench(num_blocks=9, swap_blocks=swap_blocks, by_priority=True)
    prompts = {"patient": [1] * 20, "urgent": [2] * 20}
    bench.add("patient", prompts["patient"], max_tokens=30)
    bench.step()
    bench.add("urgent", prompts["urgent"], priority=-1, max_tokens=30)
    for num_tokens in range(1, 31):
        bench.step()
        assert len(bench.tokens["urgent", 0]) == num_tokens
    assert bench.reasons.keys() == {("urgent", 0)}
    assert bench.scheduler.stats().num_preemptions > 0
    bench.run()
    for name, prompt in prompts.items():
        assert bench.tokens[name, 0] == answer(prompt, 1, 0, 30)


@pytest.mark.parametrize("swap_blocks", [0, 40])
def test_preempted_sequences_lose_nothing(swap_blocks: int) -> None:
    bench = Bench(num_blocks=9, swap_blocks=swap_blocks, prefix_caching=False)
    prompts = {name: [i] * 20 for i, name in enumerate("abc")}
    for name, prompt in prompts.items():
        bench.add(name, prompt, max_tokens=30)
    swapped_in = 0
    while bench.scheduler.has_work:
        step = bench.scheduler.schedule()
        assert step is not None
        swapped_in += len(step.plan.swap_in)
        output = bench.scheduler.complete(step, bench.runner.execute(step.plan))
        for request_id, update in output.updates.items():
            bench.tokens.setdefault((request_id, 0), []).extend(update.deltas[0].token_ids)
    assert bench.scheduler.stats().num_preemptions > 0
    assert (swapped_in > 0) == (swap_blocks > 0)
    assert bench.scheduler.stats().num_swapped_blocks == 0
    for name, prompt in prompts.items():
        assert bench.tokens[name, 0] == answer(prompt, 1, 0, 30)


def test_who_finds_no_room_on_the_host_for_one_group_is_computed_again() -> None:
    """Three blocks of the window's would fit, and four of the others would not."""
    bench = Bench(groups=(FULL, WINDOW), num_blocks=9, swap_blocks=3, prefix_caching=False)
    prompts = {name: [i] * 20 for i, name in enumerate("ab")}
    for name, prompt in prompts.items():
        bench.add(name, prompt, max_tokens=30, ignore_eos=True)
    while bench.scheduler.stats().num_preemptions == 0:
        bench.step()
    assert bench.scheduler.stats().num_swapped_blocks == 0
    bench.run()
    for name, prompt in prompts.items():
        assert bench.tokens[name, 0] == answer(prompt, 1, 0, 30)


def test_choices_share_the_prompt_and_copy_what_they_write() -> None:
    bench = Bench(num_blocks=40)
    prompt = [1, 2, 3] * 4  # one and a half blocks
    bench.add("r", prompt, n=3, max_tokens=2)
    bench.step()
    assert bench.cache.stats().groups[0].held == 2, "three choices hold the prompt's two blocks"
    step = bench.scheduler.schedule()
    assert step is not None
    assert len(step.plan.copies) == 2, "the last one to write has the block for itself"
    bench.scheduler.complete(step, bench.runner.execute(step.plan))
    for choice in range(3):
        assert bench.tokens["r", choice] == answer(prompt, 1, choice, 1)


def test_blocks_behind_the_window_are_freed() -> None:
    bench = Bench(groups=(WINDOW,), num_blocks=40, max_model_len=200)
    bench.add("r", [1], max_tokens=150, ignore_eos=True)
    most = 0
    while bench.scheduler.has_work:
        bench.step()
        most = max(most, bench.cache.stats().groups[0].held)
    assert most <= 4
    assert bench.tokens["r", 0] == answer([1], 1, 0, 150)


def test_a_failing_step_ends_its_own_requests_only() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add("runs", [1, 2, 3], max_tokens=5)
    bench.add("waits", [1, 2, 3], max_tokens=5)
    bench.step()
    bench.runner.fail_next = True
    bench.step()
    assert set(bench.failures) == {"runs"}
    bench.run()
    assert bench.tokens["waits", 0] == answer([1, 2, 3], 1, 0, 5)


def test_a_failing_step_ends_whom_it_was_to_swap_out() -> None:
    """Nobody knows which of its blocks are on the host."""
    bench = Bench(num_blocks=9, swap_blocks=40, prefix_caching=False)
    for name in "ab":
        bench.add(name, [1] * 20, max_tokens=30, ignore_eos=True)
    while (step := bench.scheduler.schedule()) and not step.plan.swap_out:
        bench.take(bench.scheduler.complete(step, bench.runner.execute(step.plan)))
    assert step is not None
    assert len(step.parts) == 1
    bench.take(bench.scheduler.fail(step, StepError(TOLD)))
    assert bench.failures.keys() == {"a", "b"}
    assert bench.scheduler.stats().num_swapped_blocks == 0
    assert not bench.scheduler.has_work


def test_what_is_not_finite_is_not_found_again() -> None:
    bench = Bench()
    prompt = list(range(3 * BLOCK))
    bench.add("poisoned", prompt, max_tokens=3)
    step = bench.scheduler.schedule()
    assert step is not None
    result = replace(bench.runner.execute(step.plan), failed_slots={step.plan.slices[0].slot: "x"})
    assert set(bench.scheduler.complete(step, result).failures) == {"poisoned"}
    bench.add("next", prompt, max_tokens=1)
    bench.run()
    assert report(bench, "next").num_cached_tokens == 0


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("num_choices", [1, 2])
def test_what_a_request_saw_that_is_not_finite_is_not_found_again(
    ahead: bool, num_choices: int
) -> None:
    """An earlier chunk of it may be what is wrong, or of whoever left that in the cache. What
    others hold is found as long as they do."""
    bench = Bench(num_blocks=40, budget=2 * BLOCK, ahead=ahead)
    prompt = list(range(3 * BLOCK))
    poisoned = [*prompt, *range(3 * BLOCK), VOCAB - 1]
    bench.add("before", prompt, max_tokens=1)
    bench.run()
    bench.add("beside", [*prompt, 1], max_tokens=20, ignore_eos=True)
    bench.step()
    bench.add("poisoned", poisoned, max_tokens=3, n=num_choices)
    bench.runner.poison = VOCAB - 1
    while "poisoned" not in bench.failures:
        bench.step()
    assert NOT_FINITE in str(bench.failures["poisoned"])
    bench.runner.poison = None
    assert ("beside", 0) not in bench.reasons
    bench.add("again", poisoned, max_tokens=1)
    bench.run()
    assert report(bench, "again").num_cached_tokens == len(prompt)


def test_what_is_in_doubt_is_forgotten_when_nobody_holds_it() -> None:
    bench = Bench(num_blocks=40)
    prompt = list(range(2 * BLOCK))
    for name in ("before", "poisoned"):
        bench.add(name, prompt, max_tokens=1)
        bench.run()
        bench.runner.poison = prompt[-1]
    assert set(bench.failures) == {"poisoned"}
    bench.runner.poison = None
    bench.add("after", prompt, max_tokens=1)
    bench.run()
    assert report(bench, "after").num_cached_tokens == 0


def test_what_one_choice_found_not_finite_is_in_doubt_whatever_ends_the_others() -> None:
    bench = Bench(num_blocks=40)
    prompt = list(range(2 * BLOCK))
    sent = tuple(ChoiceSoFar([token]) for token in (1, 2))
    bench.add("r", prompt, sent=sent, n=2, max_tokens=9)
    bench.step()
    step = bench.scheduler.schedule()
    assert step is not None
    first, second = (part.slot for part in step.plan.slices)
    failed = {first: NOT_FINITE, second: NO_TOKEN_LEFT}
    result = replace(bench.runner.execute(step.plan), failed_slots=failed)
    bench.take(bench.scheduler.complete(step, result))
    bench.add("after", prompt, max_tokens=1)
    bench.run()
    assert report(bench, "after").num_cached_tokens == 0


def test_one_after_the_other_does_not_keep_what_is_in_doubt() -> None:
    """Each would find what the one before it held."""
    bench = Bench(num_blocks=40, ahead=True)
    prompt = list(range(2 * BLOCK))
    bench.add("before", prompt, max_tokens=1)
    bench.run()
    bench.add("beside", [1], max_tokens=60, ignore_eos=True)
    bench.step()
    bench.runner.poison = prompt[-1]
    for number in range(8):
        bench.add(str(number), [*prompt, number], max_tokens=9)
        bench.step()
    assert bench.failures
    bench.runner.poison = None
    bench.add("after", [*prompt, 1], max_tokens=1)
    bench.run()
    assert report(bench, "after").num_cached_tokens == 0
    assert bench.num_steps_ahead


def test_who_is_to_be_forked_does_not_wait_for_the_end_of_all_others() -> None:
    bench = Bench(ahead=True)
    bench.add("runs", [1], max_tokens=60, ignore_eos=True)
    bench.step()
    bench.add("forks", [2], max_tokens=3, n=3)
    for _ in range(7):
        bench.step()
    assert [len(bench.tokens["forks", choice]) for choice in range(3)] == [3, 3, 3]


def test_a_sequence_that_ended_keeps_its_place_while_a_step_is_in_flight() -> None:
    said = answer([1, 2, 3], 1, 0, 10)
    bench = Bench(max_num_seqs=1, ahead=True)
    bench.add("stops", [1, 2, 3], stop_token_ids=(said[2],), max_tokens=10)
    bench.add("waits", [4], max_tokens=1)
    while ("stops", 0) not in bench.reasons:
        bench.step()
    assert bench.in_flight is not None
    assert bench.cache.stats().groups[0].held == 1
    bench.step()
    assert bench.cache.stats().groups[0].held == 0
    bench.run()
    assert bench.scheduler.counts.num_drawn == said.index(said[2]) + 2


def test_who_reaches_max_tokens_has_no_part_in_the_next_step() -> None:
    bench = Bench(ahead=True)
    bench.add("short", [1], max_tokens=3, ignore_eos=True)
    bench.add("long", [2], max_tokens=9, ignore_eos=True)
    bench.run()
    assert (bench.num_steps, bench.num_steps_ahead) == (9, 8)


def test_equal_sequences_are_not_ahead_where_they_share_a_block() -> None:
    """One of them goes over to the other's block; its own must not be read any more."""
    bench = Bench(ahead=True)
    for name in "ab":
        bench.add(name, [1, 2, 3], max_tokens=20)
    bench.run()
    assert bench.num_steps - bench.num_steps_ahead == 3  # the first one, and two full blocks


def test_stop_tokens_end_a_choice_after_min_tokens() -> None:
    prompt = [1, 2, 3]
    said = answer(prompt, 1, 0, 10)
    bench = Bench()
    bench.add("stop", prompt, stop_token_ids=(said[2],), max_tokens=10)
    bench.add("min", prompt, stop_token_ids=(said[2],), min_tokens=4, max_tokens=10)
    bench.run()
    first = said.index(said[2])
    assert bench.tokens["stop", 0] == said[: first + 1]
    assert bench.reasons["stop", 0] is FinishReason.STOP
    assert len(bench.tokens["min", 0]) >= 4


def test_the_models_end_tokens_end_a_choice_that_does_not_ignore_them() -> None:
    prompt = [1, 2, 3]
    said = answer(prompt, 1, 0, 10)
    eos = (said[6], said[2])
    assert [said.index(token) for token in eos] == [6, 2]
    bench = Bench(eos_token_ids=eos)
    bench.add("ends", prompt, max_tokens=10)
    bench.add("ends with n", prompt, max_tokens=3)
    bench.add("ends too soon", prompt, max_tokens=2)
    bench.add("ignores", prompt, ignore_eos=True, max_tokens=10)
    bench.add("min", prompt, min_tokens=4, max_tokens=10)
    bench.add("just old enough", prompt, min_tokens=3, max_tokens=10)
    bench.add("names it", prompt, stop_token_ids=(said[2],), ignore_eos=True, max_tokens=10)
    bench.run()
    stop, length = FinishReason.STOP, FinishReason.LENGTH
    assert {
        name: (len(bench.tokens[name, 0]), reason, bench.stops[name, 0])
        for (name, _), reason in bench.reasons.items()
    } == {
        "ends": (3, stop, None),
        "ends with n": (3, stop, None),
        "ends too soon": (2, length, None),
        "ignores": (10, length, None),
        "min": (7, stop, None),
        "just old enough": (3, stop, None),
        "names it": (3, stop, said[2]),
    }


@pytest.mark.parametrize(
    ("field", "prompt", "params"),
    [
        ("prompt", [], {}),
        ("prompt", [VOCAB], {}),
        ("prompt", [-1], {}),
        ("prompt", [1] * 80, {}),
        ("max_tokens", [1] * 70, {"max_tokens": 11}),
        ("n", [1], {"n": 5}),
        ("logit_bias", [1], {"logit_bias": {VOCAB: 1.0}}),
        ("stop_token_ids", [1], {"stop_token_ids": (VOCAB,)}),
    ],
)
def test_what_can_never_run_is_refused(field: str, prompt: list[int], params: object) -> None:
    bench = Bench()
    with pytest.raises(RequestError) as caught:
        bench.add("r", prompt, **params)  # type: ignore[arg-type]
    assert caught.value.field == field
    assert not bench.scheduler.has_work


def test_a_prompt_larger_than_the_cache_is_refused() -> None:
    bench = Bench(num_blocks=5)
    with pytest.raises(RequestError, match="never fit"):
        bench.add("r", [1] * 60, max_tokens=1)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_an_answer_larger_than_the_cache_is_refused(prefix_caching: bool) -> None:
    """It would be preempted for good: nobody else is left to give it blocks."""
    bench = Bench(num_blocks=5, prefix_caching=prefix_caching)
    with pytest.raises(RequestError, match="never fit") as caught:
        bench.add("r", [1] * 8, max_tokens=18)
    assert caught.value.field == "max_tokens"
    bench.add("r", [1] * 8, max_tokens=17)  # the last token is not written
    bench.run()
    assert len(bench.tokens["r", 0]) == 17


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("prompt", {"prompt_token_ids": [1.5]}),
        ("prompt", {"prompt_token_ids": ["1"]}),
        ("prompt", {"prompt_token_ids": [None]}),
        ("prompt", {"prompt_token_ids": "12"}),
        ("prompt", {"prompt_token_ids": 7}),
        ("prompt", {"prompt_token_ids": [2**70]}),
        ("priority", {"priority": "high"}),
        ("priority", {"priority": 0.5}),
        ("cache_salt", {"cache_salt": "\ud800"}),
        ("cache_salt", {"cache_salt": b"mine"}),
    ],
)
def test_what_would_break_a_step_is_refused(field: str, wrong: dict[str, Any]) -> None:
    bench = Bench(by_priority=True)
    request = GenerationRequest(RequestId("r"), [1], SamplingParams(max_tokens=1))
    with pytest.raises(RequestError) as caught:
        bench.scheduler.add(replace(request, **wrong), seed=0)
    assert caught.value.field == field
    assert not bench.scheduler.has_work


@pytest.mark.parametrize("groups", [(WINDOW,), (FULL, WINDOW)])
def test_a_hit_in_the_smallest_cache_is_no_obstacle(groups: tuple[KvGroup, ...]) -> None:
    """The hit's window blocks are a part of what the sequence holds at once, not beside it."""
    budget, prompt = 24, [i % 7 for i in range(56)]
    longer = prompt + [3] * 40
    sizes = [blocks_needed(g, BLOCK, len(longer) + 3, budget) for g in groups]
    bench = Bench(groups=groups, num_blocks=tuple(n + 1 for n in sizes), max_model_len=100)
    bench.add("first", prompt, max_tokens=1)
    bench.run()
    bench.add("second", longer, max_tokens=3)
    bench.run()
    assert bench.tokens["second", 0] == answer(longer, 1, 0, 3)
    assert report(bench, "second").num_cached_tokens == len(prompt)


def test_requests_that_were_given_up_are_not_kept_in_the_queue() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add("runs", [1], max_tokens=60, ignore_eos=True)
    bench.step()
    bench.add("waits", [1], max_tokens=1)
    for i in range(200):
        bench.add(str(i), [1])
        bench.scheduler.abort(RequestId(str(i)))
    assert len(bench.scheduler._roster.waiting._heap) < 40
    bench.run()
    assert len(bench.tokens["waits", 0]) == 1


def test_priority_needs_its_policy() -> None:
    with pytest.raises(RequestError, match="priority"):
        Bench().add("r", [1], priority=1)


def test_an_id_can_be_used_again_once_its_request_has_ended() -> None:
    bench = Bench()
    bench.add("r", [1], max_tokens=1)
    with pytest.raises(RequestError, match="request_id"):
        bench.add("r", [1], max_tokens=1)
    bench.run()
    bench.prompts.clear()
    bench.add("r", [1], max_tokens=1)
    bench.run()
    assert len(bench.tokens["r", 0]) == 2


class Prompt(list[int]):
    """One that can be watched."""


@pytest.fixture
def no_collector() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    yield
    if enabled:
        gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("n", "aborted"), [(1, False), (3, False), (3, True)])
def test_what_has_ended_does_not_wait_for_the_collector(n: int, aborted: bool, ahead: bool) -> None:
    bench = Bench(num_blocks=40, ahead=ahead)
    prompt = Prompt(range(20))
    left = weakref.ref(prompt)
    bench.add("r", prompt, n=n, max_tokens=5)
    del prompt
    bench.step()
    if aborted:
        bench.scheduler.abort(RequestId("r"))
    bench.run()
    assert left() is None


def test_the_queue_is_bounded() -> None:
    bench = Bench(max_queued=2)
    bench.add("a", [1])
    bench.add("b", [1])
    with pytest.raises(QueueFullError):
        bench.add("c", [1])
    bench.scheduler.abort(RequestId("a"))
    bench.add("c", [1])


def test_an_answer_that_has_begun_is_not_refused_where_as_many_wait_as_may() -> None:
    """Its worker died or left, and its client has a part of it."""
    bench = Bench(max_queued=1)
    bench.add("a", [1])
    bench.add("moved", [1], sent=(ChoiceSoFar([2]),))
    with pytest.raises(QueueFullError):
        bench.add("b", [1])


def test_prompt_logprobs_read_no_cache() -> None:
    bench = Bench()
    prompt = list(range(3 * BLOCK))
    bench.add("warm", prompt, max_tokens=1)
    bench.run()
    bench.add("r", prompt, max_tokens=1, prompt_logprobs=0)
    bench.run()
    told = report(bench, "r")
    assert told.num_cached_tokens == 0
    assert told.logprobs is not None
    assert len(told.logprobs) == len(prompt)


def test_tenants_share_nothing() -> None:
    bench = Bench(groups=(FULL,))
    prompt = list(range(3 * BLOCK))
    bench.add("mine", prompt, max_tokens=1)
    bench.run()
    request = GenerationRequest(RequestId("yours"), prompt, SamplingParams(max_tokens=1))
    bench.scheduler.add(replace(request, cache_salt="you"), seed=0)
    bench.run()
    assert report(bench, "yours").num_cached_tokens == 0


def test_a_step_is_one_batch_of_events_with_what_it_evicted() -> None:
    bench = Bench(num_blocks=9, budget=64)
    events = bench.cache.events
    bench.add("before", list(range(4 * BLOCK)), max_tokens=1)
    bench.run()
    for name in "ab":
        bench.add(name, [ord(name) % VOCAB] * (2 * BLOCK + 4), max_tokens=6)
    batches: list[list[list[type]]] = []  # of each step
    while bench.scheduler.has_work:
        before = events.latest
        bench.step()
        closed = events.since(before)
        assert isinstance(closed, list)
        batches.append([[type(event) for event in batch.events] for batch in closed])
    assert batches == [
        [[Removed] * 2 + [Stored] * 4],  # two blocks of each are full
        [],
        [],
        [],
        [[Stored] * 2],  # and the third
        [[Removed] * 2],  # for the fourth
    ]
