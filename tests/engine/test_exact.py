"""Token for token: whatever the engine does to be fast changes no answer (fp32, CPU kernels)."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.memory import bytes_needed
from engine.request import FinishReason, GenerationRequest, PromptReport, RequestId
from engine.sampler.interface import Draws, History
from engine.sampler.reference import ReferenceSampler
from engine.sampler.table import SamplingTable
from engine.sampling import SamplingParams
from engine.step import TokenLogprobs
from tests.engine.models_on_disk import CONFIGS, VOCAB, TinyModel, make_tiny

BASE: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 16,
    "max_model_len": 192,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 4 << 20,
    "num_threads": 1,  # the other cores have other tests to run
    "max_pause_s": 1000.0,  # or a step that waited for a core has prompts cut to less
}
# By family and whether steps are launched ahead. Every budget, mode and caching is once with each
# family and each of the two, and every mode with and without caching.
BUDGETS = {
    ("gemma3", False): (8, 1024),
    ("gemma3", True): (17,),
    ("llama", False): (17,),
    ("llama", True): (8, 1024),
    ("mistral", False): (8,),
    ("mistral", True): (17, 1024),
}
PREEMPTED = {
    ("gemma3", False): ("recompute", True),
    ("gemma3", True): ("swap", False),
    ("llama", False): ("swap", True),
    ("llama", True): ("recompute", False),
    ("mistral", False): ("recompute", False),
    ("mistral", True): ("swap", True),
}


@dataclass
class Answer:
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    prompt: PromptReport | None = None


def run(engine: Engine, jobs: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, Answer]:
    for name, (prompt, params) in jobs.items():
        engine.add(GenerationRequest(RequestId(name), prompt, params))
    answers = {name: Answer() for name in jobs}
    while engine.has_work:
        output = engine.step()
        assert not output.failures
        engine.check_integrity()
        for name, update in output.updates.items():
            answer = answers[name]
            answer.prompt = update.prompt or answer.prompt
            for delta in update.deltas:
                answer.tokens.setdefault(delta.choice, []).extend(delta.token_ids)
                answer.logprobs.setdefault(delta.choice, []).extend(delta.logprobs or ())
                if delta.finish_reason is not None:
                    answer.reasons[delta.choice] = delta.finish_reason
    return answers


def greedy(max_tokens: int = 24, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more)


def random_prompts(count: int, low: int, high: int, seed: int = 3) -> list[list[int]]:
    source = random.Random(seed)
    return [
        [source.randrange(VOCAB) for _ in range(source.randint(low, high))] for _ in range(count)
    ]


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=[False, True], ids=["in turn", "ahead"])
def ahead(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def make(tiny: TinyModel, ahead: bool) -> Callable[..., Engine]:
    num_threads = 2 if tiny.name == "llama" else 1
    base = {**BASE, "async_scheduling": ahead, "num_threads": num_threads}
    return lambda **knobs: Engine.create(EngineConfig(model=str(tiny.folder), **{**base, **knobs}))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """From one token to several windows and chunks; one is a whole number of blocks."""
    return [[5], *random_prompts(4, 30, 110), random_prompts(1, 48, 48, seed=8)[0]]


@pytest.fixture(scope="module")
def expected(tiny: TinyModel, prompts: list[list[int]]) -> list[list[int]]:
    return tiny.greedy(prompts, 24)


def check(answers: dict[str, Answer], expected: list[list[int]]) -> None:
    for number, tokens in enumerate(expected):
        assert answers[str(number)].tokens[0] == tokens, f"prompt {number}"


def jobs_of(prompts: list[list[int]]) -> dict[str, tuple[list[int], SamplingParams]]:
    return {str(i): (prompt, greedy()) for i, prompt in enumerate(prompts)}


def test_paged_is_dense(
    make: Callable[..., Engine], prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """All in one batch, each alone, and with a warm cache: as transformers without any cache."""
    engine = make()
    check(run(engine, jobs_of(prompts)), expected)
    assert engine.figures().num_cached_tokens == 0
    for number, prompt in enumerate(prompts):
        alone = run(engine, {"x": (prompt, greedy())})["x"]
        assert alone.tokens[0] == expected[number]
        assert alone.prompt is not None
        if len(prompt) > 16:
            assert alone.prompt.num_cached_tokens >= len(prompt) // 16 * 16 - 1
    assert engine.figures().num_cached_tokens > 0


def test_chunked_is_one_shot(
    make: Callable[..., Engine],
    tiny: TinyModel,
    ahead: bool,
    prompts: list[list[int]],
    expected: list[list[int]],
) -> None:
    for budget in BUDGETS[tiny.name, ahead]:
        check_chunked(make, prompts, expected, budget)


def check_chunked(
    make: Callable[..., Engine], prompts: list[list[int]], expected: list[list[int]], budget: int
) -> None:
    engine = make(max_num_batched_tokens=budget, enable_prefix_caching=False)
    check(run(engine, jobs_of(prompts)), expected)


@pytest.fixture(scope="module")
def growing(tiny: TinyModel) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts that are short when they are admitted, and what they grow into."""
    prompts = random_prompts(8, 4, 12, seed=5)
    return prompts, tiny.greedy(prompts, 48)


def test_preempted_is_uninterrupted(
    make: Callable[..., Engine],
    tiny: TinyModel,
    ahead: bool,
    growing: tuple[list[list[int]], list[list[int]]],
) -> None:
    mode, caching = PREEMPTED[tiny.name, ahead]
    check_preempted(make, growing, mode, caching)


def check_preempted(
    make: Callable[..., Engine],
    growing: tuple[list[list[int]], list[list[int]]],
    mode: str,
    caching: bool,
) -> None:
    prompts, expected = growing
    small = {"max_model_len": 64, "block_size": 8, "max_num_batched_tokens": 16}
    layouts = make(**small).info.cache.layouts
    engine = make(
        **small,
        preemption_mode=mode,
        enable_prefix_caching=caching,
        kv_cache_memory_bytes=bytes_needed(layouts, 64, 16),
    )
    check(run(engine, {str(i): (p, greedy(48)) for i, p in enumerate(prompts)}), expected)
    assert engine.scheduler_stats().num_preemptions > 0


def drawn_by_hand(tiny: TinyModel, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    """What a request of each choice alone gets: transformers' logits, the slow twin's draws."""
    assert params.greedy or params.seed is not None
    assert params.max_tokens is not None
    samplers = []
    for choice in range(params.n):
        table = SamplingTable(1, VOCAB)
        table.enter(0, params, params.seed or 0, choice, len(prompt), tiny.eos_token_ids)
        samplers.append(ReferenceSampler(table))
    first = np.zeros(1, np.int32)
    texts = [prompt] * params.n
    for _ in range(params.max_tokens):
        rows = tiny.next_logits(texts)
        for choice, sampler in enumerate(samplers):
            history = History(
                torch.tensor([texts[choice]], dtype=torch.int32),
                torch.tensor([len(texts[choice])], dtype=torch.int32),
            )
            drawn = sampler.sample(rows[choice : choice + 1], Draws(first, first), history)
            texts[choice] = texts[choice] + drawn.token_ids.tolist()
    ending = params.stop_token_ids + (() if params.ignore_eos else tiny.eos_token_ids)
    return [until_ended(text[len(prompt) :], ending, params.min_tokens) for text in texts]


def until_ended(tokens: list[int], ending: tuple[int, ...], min_tokens: int) -> list[int]:
    for number, token in enumerate(tokens, 1):
        if token in ending and number >= min_tokens:
            return tokens[:number]
    return tokens


def test_a_fork_is_separate_requests(make: Callable[..., Engine], tiny: TinyModel) -> None:
    (prompt,) = random_prompts(1, 40, 40, seed=9)
    hot = SamplingParams(temperature=1.3, seed=11, max_tokens=20, ignore_eos=True, n=3)
    answers = run(make(), {"fork": (prompt, hot)})["fork"]
    assert len({tuple(t) for t in answers.tokens.values()}) == 3, "each choice draws its own"
    assert answers.tokens == dict(enumerate(drawn_by_hand(tiny, prompt, hot)))
    again = run(make(max_num_batched_tokens=9), {"fork": (prompt, hot)})["fork"]
    assert again.tokens == answers.tokens


def test_a_fork_of_a_greedy_request_is_the_same_n_times(
    make: Callable[..., Engine], prompts: list[list[int]], expected: list[list[int]]
) -> None:
    answers = run(make(), {str(i): (p, greedy(n=2)) for i, p in enumerate(prompts[:3])})
    for number in range(3):
        assert answers[str(number)].tokens == {0: expected[number], 1: expected[number]}


def test_logprobs_are_those_of_transformers(
    make: Callable[..., Engine], tiny: TinyModel, prompts: list[list[int]]
) -> None:
    engine = make()
    params = greedy(max_tokens=8, logprobs=3, prompt_logprobs=2)
    for _ in range(2):  # cold, then warm: prompt logprobs read no cache
        answers = run(engine, {str(i): (p, params) for i, p in enumerate(prompts)})
        for number, prompt in enumerate(prompts):
            check_logprobs(answers[str(number)], tiny, prompt)


def check_logprobs(answer: Answer, tiny: TinyModel, prompt: list[int]) -> None:
    table = tiny.logprobs(prompt + answer.tokens[0])
    assert answer.prompt is not None
    assert answer.prompt.logprobs is not None
    assert answer.prompt.logprobs[0] is None
    assert len(answer.prompt.logprobs) == len(prompt)
    entries = [*answer.prompt.logprobs[1:], *answer.logprobs[0]]
    for row, (token, entry) in enumerate(
        zip((prompt + answer.tokens[0])[1:], entries, strict=True)
    ):
        assert entry is not None
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(table[row, token]), abs=1e-4)
        best = table[row].topk(len(entry.top))
        assert [t for t, _ in entry.top] == best.indices.tolist()
        for (_, found), wanted in zip(entry.top, best.values.tolist(), strict=True):
            assert found == pytest.approx(wanted, abs=1e-4)
        assert entry.rank == 1 + int((table[row] > table[row, token]).sum())
