"""Steps that are planned before the one before has ended say what steps in turn say."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import EngineError, StepError
from engine.request import FinishReason, GenerationRequest, RequestId
from engine.sampling import SamplingParams
from tests.engine.models_on_disk import make_tiny
from tests.engine.test_exact import BASE, Answer, greedy, random_prompts, run

Jobs = dict[str, tuple[list[int], SamplingParams]]
PROMPTS = random_prompts(6, 4, 40, seed=21)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Engine]:
    folder = str(make_tiny("llama", tmp_path_factory.mktemp("llama")).folder)

    def engine(ahead: bool = True, **knobs: Any) -> Engine:
        options = {**BASE, "async_scheduling": ahead, **knobs}
        return Engine.create(EngineConfig(model=folder, **options))

    return engine


@pytest.fixture(scope="module")
def in_turn(make: Callable[..., Engine]) -> Engine:
    return make(ahead=False)


@pytest.fixture
def ahead(make: Callable[..., Engine]) -> Engine:
    return make()


def check_idle(engine: Engine) -> None:
    assert not engine.has_work
    engine.check_integrity()
    assert all(group.held == 0 for group in engine.cache_stats().groups)


def test_on_a_cpu_they_are_not_unless_told_to(make: Callable[..., Engine]) -> None:
    assert not make(ahead=None).info.shape.async_scheduling


def test_a_steady_batch_is_planned_ahead_from_its_first_step_on(ahead: Engine) -> None:
    prompts = random_prompts(4, 8, 8, seed=2)
    run(ahead, {str(i): (prompt, greedy(24)) for i, prompt in enumerate(prompts)})
    assert (ahead.num_steps, ahead.num_steps_ahead) == (24, 23)
    check_idle(ahead)


def of_all_kinds(seen: dict[str, Answer]) -> Jobs:
    """`seen` is what they say without stop tokens: each is stopped at another place."""
    hot = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=30)
    kinds = [
        greedy(30),
        replace(hot, seed=1, logprobs=3),
        replace(hot, seed=2, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.7),
        replace(hot, seed=3, top_p=0.8, top_k=20, min_p=0.01),
        replace(hot, seed=4, logit_bias={3: 4.0, 5: -100.0}, max_tokens=9),
        replace(hot, seed=5, n=2, repetition_penalty=1.2),
    ]
    jobs = {str(i): (PROMPTS[i], params) for i, params in enumerate(kinds)}
    for number, (name, answer) in enumerate(seen.items()):
        stop = (answer.tokens[0][2 + 3 * number % 7],)
        for least in (0, 9):
            params = replace(jobs[name][1], stop_token_ids=stop, min_tokens=least)
            jobs[f"{name} stops from {least} on"] = (jobs[name][0], params)
    return jobs


def check_equal(mine: dict[str, Answer], yours: dict[str, Answer]) -> None:
    assert mine.keys() == yours.keys()
    for name, answer in mine.items():
        assert answer.tokens == yours[name].tokens, name
        assert answer.reasons == yours[name].reasons, name
        for choice, entries in answer.logprobs.items():
            for entry, other in zip(entries, yours[name].logprobs[choice], strict=True):
                assert (entry.token_id, entry.rank) == (other.token_id, other.rank)
                assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.parametrize("knobs", [{}, {"max_num_batched_tokens": 9}, {"block_size": 8}])
def test_every_kind_of_request_gets_the_same_answer(
    make: Callable[..., Engine], in_turn: Engine, knobs: dict[str, Any]
) -> None:
    """Batches mix and change: more requests than may run, ends and stops in the midst of them."""
    jobs = of_all_kinds(run(in_turn, of_all_kinds({})))
    expected = run(in_turn, jobs)
    assert {FinishReason.STOP, FinishReason.LENGTH} == {
        reason for answer in expected.values() for reason in answer.reasons.values()
    }
    engine = make(**knobs)
    check_equal(run(engine, jobs), expected)
    assert engine.num_steps_ahead > engine.num_steps / 4
    assert engine.figures().num_drawn_tokens == sum(
        len(tokens) for answer in expected.values() for tokens in answer.tokens.values()
    )
    check_idle(engine)


def test_what_is_aborted_or_stopped_in_flight_is_gone(ahead: Engine, in_turn: Engine) -> None:
    jobs: Jobs = {str(i): (prompt, greedy(20)) for i, prompt in enumerate(PROMPTS[:4])}
    expected = run(in_turn, jobs)
    for name, (prompt, params) in jobs.items():
        ahead.add(GenerationRequest(RequestId(name), prompt, params))
    said: dict[str, list[int]] = {name: [] for name in jobs}
    ended = {"1": 3, "2": 7}
    for step in range(100):
        if not ahead.has_work:
            break
        for name, update in ahead.step().updates.items():
            assert step < ended.get(name, 100)
            said[name] += update.deltas[0].token_ids
        if step == 2:
            ahead.abort(RequestId("1"))
            # at once, and it may take the place of the first one's last step
            ahead.add(GenerationRequest(RequestId("1"), PROMPTS[4], greedy(5)))
            ahead.abort(RequestId("1"))
        if step == 6:
            ahead.stop_choice(RequestId("2"), 0)
        ahead.check_integrity()
    for name, tokens in said.items():
        assert tokens == expected[name].tokens[0][: len(tokens)]
        assert len(tokens) == ended.get(name, 20)
    assert ahead.num_steps_ahead > 10
    check_idle(ahead)


@pytest.mark.parametrize("which", ["launch", "finish"])
def test_a_step_that_fails_takes_its_requests_along_and_leaves_nothing(
    ahead: Engine, in_turn: Engine, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """The step that failed, or the one that was in flight with it."""
    runner = ahead._runner
    whole, calls = getattr(runner, which), []

    def fail_once(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 5:
            raise RuntimeError("no more memory")
        return whole(*arguments)

    monkeypatch.setattr(runner, which, fail_once)
    jobs = {str(i): (prompt, greedy(20)) for i, prompt in enumerate(PROMPTS[:3])}
    for name, (prompt, params) in jobs.items():
        ahead.add(GenerationRequest(RequestId(name), prompt, params))
    failures: dict[RequestId, EngineError] = {}
    while ahead.has_work:
        failures |= ahead.step().failures
        ahead.check_integrity()
    assert failures.keys() == jobs.keys()
    assert all(isinstance(error, StepError) for error in failures.values())
    check_idle(ahead)
    check_equal(run(ahead, jobs), run(in_turn, jobs))


def test_who_comes_joins_without_a_gap(ahead: Engine) -> None:
    """Also a prompt's step is launched while the one before it runs."""
    for i, prompt in enumerate(PROMPTS[:4]):
        ahead.add(GenerationRequest(RequestId(str(i)), prompt[:10], greedy(12)))
        for _ in range(3):
            ahead.step()
    while ahead.has_work:
        ahead.step()
    assert ahead.num_steps_ahead == ahead.num_steps - 1
