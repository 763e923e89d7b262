"""Whatever is asked for, the engine answers or says why not, and goes on."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, RequestError
from engine.request import GenerationRequest, RequestId
from engine.sampling import SamplingParams
from tests.engine.models_on_disk import VOCAB, make_tiny
from tests.engine.pair import make_engine

token_ids = st.integers(-1, VOCAB)
params: st.SearchStrategy[dict[str, object]] = st.builds(
    dict,
    n=st.integers(1, 3),
    temperature=st.sampled_from((0.0, 1e-6, 0.7, 1.0, 100.0)),
    top_k=st.sampled_from((0, 1, 5, 10**9)),
    top_p=st.sampled_from((1e-9, 0.5, 1.0)),
    min_p=st.sampled_from((0.0, 0.1, 1.0)),
    repetition_penalty=st.sampled_from((1e-3, 1.0, 1.3, 100.0)),
    presence_penalty=st.sampled_from((-2.0, 0.0, 2.0)),
    frequency_penalty=st.sampled_from((-2.0, 0.0, 2.0)),
    logit_bias=st.dictionaries(token_ids, st.sampled_from((-100.0, 1.0, 100.0)), max_size=3),
    allowed_token_ids=st.none() | st.lists(token_ids, min_size=1, max_size=3).map(tuple),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    max_tokens=st.sampled_from((1, 2, 7, 40, 300)),
    min_tokens=st.sampled_from((0, 1, 7)),
    stop_token_ids=st.lists(token_ids, max_size=2).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
)


@pytest.fixture(scope="module", params=[False, True], ids=["in turn", "ahead"])
def engine(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Engine:
    folder = make_tiny("llama", tmp_path_factory.mktemp("llama")).folder
    return Engine.create(
        EngineConfig(
            model=str(folder),
            dtype="float32",
            max_model_len=128,
            max_num_seqs=5,
            max_num_batched_tokens=16,
            kv_cache_memory_bytes=100_000,
            num_threads=1,
            async_scheduling=request.param,
        )
    )


@settings(max_examples=60)
@given(
    asked=st.lists(
        st.tuples(params, st.lists(token_ids, max_size=60), st.none() | st.integers(0, 30)),
        min_size=1,
        max_size=5,
    )
)
def test_it_is_answered_or_refused(
    engine: Engine, asked: list[tuple[dict[str, object], list[int], int | None]]
) -> None:
    open_choices: dict[str, set[int]] = {}
    named: list[str] = []
    for number, (fields, prompt, _) in enumerate(asked):
        name = str(number)
        try:
            wanted = SamplingParams(**fields)  # type: ignore[arg-type]
            engine.add(GenerationRequest(RequestId(name), prompt, wanted))
        except RequestError as error:
            named.append(error.field)
            continue
        open_choices[name] = set(range(wanted.n))
    for step in range(2000):
        if not engine.has_work:
            break
        for number, (_, _, aborted) in enumerate(asked):
            if aborted == step:
                engine.abort(RequestId(str(number)))
                open_choices.pop(str(number), None)
        output = engine.step()
        engine.check_integrity()
        for name, failure in output.failures.items():
            assert isinstance(failure, RequestError), "nothing goes wrong with this model"
            assert failure.field in ("allowed_token_ids", "min_tokens")
            del open_choices[name]
        for name, update in output.updates.items():
            for delta in update.deltas:
                assert delta.choice in open_choices[name]
                assert all(0 <= token < VOCAB for token in delta.token_ids)
                if delta.finish_reason is not None:
                    open_choices[name].remove(delta.choice)
    assert not engine.has_work
    assert all(name.split("[")[0] in {*asked[0][0], "prompt"} for name in named)
    assert all(not left for left in open_choices.values())
    assert all(group.held == 0 for group in engine.cache_stats().groups)


def test_the_shortest_of_all_models_answers(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path).folder
    engine = Engine.create(
        EngineConfig(
            model=str(folder), dtype="float32", max_model_len=2, kv_cache_memory_bytes=100_000
        )
    )
    engine.add(GenerationRequest(RequestId("r"), [1], SamplingParams(ignore_eos=True)))
    (update,) = engine.step().updates.values()
    assert len(update.deltas[0].token_ids) == 1
    assert not engine.has_work


def test_the_configs_seed_draws_for_requests_without_one(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path).folder

    def tokens(seed: int) -> list[int]:
        config = EngineConfig(
            model=str(folder), dtype="float32", kv_cache_memory_bytes=1_000_000, seed=seed
        )
        engine = Engine.create(config)
        hot = SamplingParams(max_tokens=12, ignore_eos=True)
        engine.add(GenerationRequest(RequestId("r"), [1], hot))
        drawn: list[int] = []
        while engine.has_work:
            for update in engine.step().updates.values():
                drawn += update.deltas[0].token_ids
        return drawn

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


@pytest.mark.parametrize("size", [10**15, 10**20])
def test_swap_space_that_is_not_there_is_refused(tmp_path: Path, size: int) -> None:
    folder = make_tiny("llama", tmp_path).folder
    with pytest.raises(ConfigError, match="are available") as caught:
        Engine.create(EngineConfig(str(folder), preemption_mode="swap", swap_space_bytes=size))
    assert caught.value.field == "swap_space_bytes"


def test_an_end_beyond_the_vocabulary_is_nobodys_trouble(tmp_path: Path) -> None:
    """A tokenizer may have tokens that the model was not resized for."""
    folder = make_tiny("llama", tmp_path).folder
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 10**6]}))
    engine = make_engine(str(folder))
    for name, least in (("a", 3), ("b", 0)):
        params = SamplingParams(max_tokens=6, min_tokens=least, temperature=0.0)
        engine.add(GenerationRequest(RequestId(name), [1, 2, 3], params))
    while engine.has_work:
        assert not engine.step().failures
