"""Token for token: a prompt read by one engine and answered by another (fp32, CPU kernels)."""

from dataclasses import replace
from typing import Any

import pytest

from engine.engine import Engine
from engine.request import ChoiceSoFar, FinishReason, GenerationRequest, RequestId
from engine.sampling import SamplingParams
from tests.engine.models_on_disk import CONFIGS, VOCAB, TinyModel, make_tiny
from tests.engine.pair import Answer, Pair, make_engine
from tests.engine.test_exact import drawn_by_hand, greedy, random_prompts

HOT = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
LENGTHS = [1, 15, 16, 17, 48, 64, 100, 150]  # a block has 16 tokens, a step of the prefill 24
PROMPTS = {n: random_prompts(1, n, n, seed=n)[0] for n in LENGTHS}


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def engines(tiny: TinyModel) -> tuple[Engine, Engine, Engine]:
    """One that does all alone, one that reads, one that answers."""
    folder = str(tiny.folder)
    read = make_engine(folder, max_num_batched_tokens=24, scheduling_policy="shortest")
    return make_engine(folder), read, make_engine(folder)


@pytest.fixture
def alone(engines: tuple[Engine, Engine, Engine]) -> Engine:
    engines[0].reset_prefix_cache()
    return engines[0]


@pytest.fixture
def pair(engines: tuple[Engine, Engine, Engine]) -> Pair:
    for engine in engines[1:]:
        engine.reset_prefix_cache()
    return Pair(engines[1], engines[2])


def answer(
    engine: Engine,
    prompt: list[int],
    params: SamplingParams,
    sent: tuple[ChoiceSoFar, ...] = (),
) -> Answer:
    engine.add(GenerationRequest(RequestId("r"), prompt, params, sent=sent))
    told = Answer()
    while engine.has_work:
        told.take(engine.step(), "r")
        engine.check_integrity()
    return told


def in_turn(tiny: TinyModel, number: int) -> bool:
    """Every case is with True for some family and with False for another, and so is a family."""
    return (sorted(CONFIGS).index(tiny.name) + number) % 2 == 0


def fetched(pair: Pair, prompt: list[int], params: SamplingParams, **more: Any) -> Answer:
    told = pair.run({"r": (prompt, params)}, **more)["r"]
    pair.check_idle()
    return told


@pytest.mark.parametrize("length", LENGTHS)
def test_cold_and_warm(pair: Pair, alone: Engine, tiny: TinyModel, length: int) -> None:
    pair.draw = draw = in_turn(tiny, LENGTHS.index(length))
    prompt = PROMPTS[length]
    expected = answer(alone, prompt, HOT)
    fetched(pair, prompt, HOT).check_equal(expected)
    (reservation,) = pair.reservations
    assert (reservation.held.start, reservation.held.end) == (0, length)
    assert len(pair.handed[0].end.first_tokens) == draw if pair.handed[0].end else False
    pair.decode.reset_prefix_cache()
    fetched(pair, prompt, HOT).check_equal(expected)  # the other side has it
    steps = pair.prefill.num_steps
    again = fetched(pair, prompt, HOT)
    again.check_equal(expected)  # so does this one
    assert again.prompt is not None
    assert again.prompt.num_cached_tokens == min(length // 16 * 16, length - 1)
    assert pair.prefill.num_steps == steps or length % 16
    pair.prefill.reset_prefix_cache()
    fetched(pair, prompt, HOT).check_equal(expected)  # only this one


def test_nothing_is_computed_for_a_prompt_that_is_cached_and_not_drawn(pair: Pair) -> None:
    pair.draw = False
    fetched(pair, PROMPTS[64], HOT)
    pair.decode.reset_prefix_cache()
    steps = pair.prefill.num_steps
    fetched(pair, PROMPTS[64], HOT)
    assert pair.prefill.num_steps == steps
    handed = pair.handed[-1]
    assert [(c.held.start, c.held.end) for c in handed.chunks] == [(0, 64)]
    assert handed.end is not None
    assert handed.end.num_cached_tokens == 63


def test_a_prefix_on_one_side_or_both(pair: Pair, alone: Engine) -> None:
    prompt = PROMPTS[150]
    expected = answer(alone, prompt, HOT)
    for on_prefill, on_decode in ((96, 0), (0, 96), (64, 96), (96, 64)):
        for engine, length in ((pair.prefill, on_prefill), (pair.decode, on_decode)):
            engine.reset_prefix_cache()
            if length:
                answer(engine, prompt[:length], replace(HOT, max_tokens=1))
        told = fetched(pair, prompt, HOT)
        told.check_equal(expected)
        assert told.prompt is not None
        assert told.prompt.num_cached_tokens == on_prefill, "the rest was computed there"
        assert pair.reservations[-1].held.start == on_decode


def test_a_short_rest_is_computed_here(pair: Pair, alone: Engine) -> None:
    expected = answer(alone, PROMPTS[100], HOT)
    fetched(pair, PROMPTS[100], HOT, fetch_above=100).check_equal(expected)
    assert not pair.reservations
    pair.decode.reset_prefix_cache()
    fetched(pair, PROMPTS[100], HOT, fetch_above=99).check_equal(expected)
    assert len(pair.reservations) == 1


ASKED = [
    replace(HOT, max_tokens=1),
    replace(HOT, n=3, logprobs=2),
    replace(HOT, logprobs=0, prompt_logprobs=3),
    greedy(n=2, logprobs=3, prompt_logprobs=0, max_tokens=9),
    replace(HOT, repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.3),
    replace(HOT, logit_bias={7: 100.0}, max_tokens=3),
    replace(HOT, top_k=5, top_p=0.9, min_p=0.05),
    replace(HOT, allowed_token_ids=(3, 4, 5), stop_token_ids=(4, 5), min_tokens=4),
    replace(HOT, allowed_token_ids=(3,), stop_token_ids=(3,)),
    replace(HOT, allowed_token_ids=(1, 2, 3), min_tokens=5, ignore_eos=False),  # 1 or 2 is the end
]


@pytest.mark.parametrize("number", range(len(ASKED)))
def test_whatever_is_asked_of_the_sampler(
    pair: Pair, alone: Engine, tiny: TinyModel, number: int
) -> None:
    pair.draw, params = in_turn(tiny, number), ASKED[number]
    for length in (17, 100):
        alone.reset_prefix_cache()
        expected = answer(alone, PROMPTS[length], params)
        assert expected.tokens == dict(enumerate(drawn_by_hand(tiny, PROMPTS[length], params)))
        fetched(pair, PROMPTS[length], params).check_equal(expected)  # cold
        fetched(pair, PROMPTS[length], params).check_equal(expected)  # both warm
        pair.decode.reset_prefix_cache()
        fetched(pair, PROMPTS[length], params).check_equal(expected)  # one warm


def test_a_first_token_that_stops(pair: Pair, alone: Engine) -> None:
    (first, *_) = answer(alone, PROMPTS[48], HOT).tokens[0]
    told = fetched(pair, PROMPTS[48], replace(HOT, stop_token_ids=(first,)))
    assert told.tokens == {0: [first]}
    assert told.reasons == {0: FinishReason.STOP}


# Both where there are two groups: one group is one whether it has a window or not.
MODES = {"llama": ("recompute",), "mistral": ("swap",), "gemma3": ("recompute", "swap")}


def test_preempted_after_it_was_fetched(tiny: TinyModel, alone: Engine) -> None:
    for mode in MODES[tiny.name]:
        check_preempted_after_it_was_fetched(tiny, mode, alone)


def check_preempted_after_it_was_fetched(tiny: TinyModel, mode: str, alone: Engine) -> None:
    small = {"max_model_len": 96, "max_num_batched_tokens": 32, "kv_cache_memory_bytes": 1}
    folder = str(tiny.folder)
    small["kv_cache_memory_bytes"] = smallest_cache(folder, small)
    decode = make_engine(folder, preemption_mode=mode, **small)
    pair = Pair(make_engine(folder), decode)
    params = replace(HOT, max_tokens=50)
    prompts = {str(i): p for i, p in enumerate(random_prompts(6, 18, 30, seed=4))}
    told = pair.run({name: (prompt, params) for name, prompt in prompts.items()})
    pair.check_idle()
    assert decode.scheduler_stats().num_preemptions > 0
    assert len(pair.reservations) == len(prompts), "nobody fetches again"
    for name, prompt in prompts.items():
        told[name].check_equal(answer(alone, prompt, params))


def smallest_cache(folder: str, knobs: dict[str, Any]) -> int:
    from engine.memory import bytes_needed

    probe = make_engine(folder, **{**knobs, "kv_cache_memory_bytes": 4 << 20})
    return bytes_needed(probe.info.cache.layouts, 96, 32)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("fetch_above", [0, 1000])
def test_going_on_from_what_was_sent(pair: Pair, alone: Engine, n: int, fetch_above: int) -> None:
    """At any point of an answer, and with what counts tokens in force."""
    params = replace(
        HOT,
        n=n,
        min_tokens=6,
        logprobs=1,
        prompt_logprobs=1,
        frequency_penalty=0.4,
        stop_token_ids=tuple(range(0, VOCAB, 16)),
    )
    whole = answer(alone, PROMPTS[100], params)
    for cut in (0, 1, 5):
        sent = tuple(
            ChoiceSoFar(tokens[: cut + choice], finished=cut + choice >= len(tokens))
            for choice, tokens in whole.tokens.items()
        )
        pair.decode.reset_prefix_cache()
        told = fetched(pair, PROMPTS[100], params, sent=sent, fetch_above=fetch_above)
        for choice, so_far in enumerate(sent):
            if not so_far.finished:
                start = len(so_far.token_ids)
                assert told.tokens[choice] == whole.tokens[choice][start:]
                assert told.reasons[choice] == whole.reasons[choice]
                ids = [entry.token_id for entry in told.logprobs[choice]]
                assert ids == told.tokens[choice]
        assert told.prompt is not None
        assert (told.prompt.logprobs is None) == any(c.token_ids for c in sent)


def test_choices_that_went_apart_share_the_prompt(pair: Pair) -> None:
    sent = (ChoiceSoFar([1, 2]), ChoiceSoFar([3], finished=True), ChoiceSoFar([4]))
    params = replace(HOT, n=3, max_tokens=4)
    pair.decode.add(GenerationRequest(RequestId("r"), PROMPTS[64], params, sent=sent))
    told = Answer()
    most = 0
    while pair.decode.has_work:
        told.take(pair.decode.step(), "r")
        most = max(most, *(group.held for group in pair.decode.cache_stats().groups))
    assert {choice: len(tokens) for choice, tokens in told.tokens.items()} == {0: 2, 2: 3}
    assert most <= 6, "four of the prompt, and one for each choice"
