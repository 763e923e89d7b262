"""A request whose keys and values are not finite ends alone, whatever the cache is kept in."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.engine import Engine
from engine.errors import EngineError, StepError
from engine.memory import bytes_needed
from engine.request import GenerationRequest, RequestId
from engine.step import NOT_FINITE
from tests.engine.models_on_disk import VOCAB, make_tiny
from tests.engine.pair import dtype_of, make_engine
from tests.engine.test_exact import greedy, random_prompts

POISON = VOCAB - 1  # a token of which the embedding is NaN
MAX_LEN, BLOCK, BUDGET, NUM_TOKENS = 64, 16, 24, 12
Answers = tuple[dict[RequestId, list[int]], dict[RequestId, EngineError]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny("llama", tmp_path_factory.mktemp("poisoned")).folder
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [[token % POISON for token in prompt] for prompt in random_prompts(3, 30, 40, seed=6)]


def answers(engine: Engine, prompts: list[list[int]]) -> Answers:
    for number, prompt in enumerate(prompts):
        engine.add(GenerationRequest(RequestId(str(number)), prompt, greedy(NUM_TOKENS)))
    tokens: dict[RequestId, list[int]] = {}
    failures: dict[RequestId, EngineError] = {}
    while engine.has_work:
        output = engine.step()
        engine.check_integrity()
        failures |= output.failures
        for name, update in output.updates.items():
            for delta in update.deltas:
                tokens.setdefault(name, []).extend(delta.token_ids)
    assert all(group.held == 0 for group in engine.cache_stats().groups)
    return tokens, failures


@pytest.mark.parametrize("format", ["auto", "fp8_e4m3", "fp8_e5m2", "int8"])
def test_it_fails_by_name_and_leaves_the_others_right(
    folder: Path, prompts: list[list[int]], format: str
) -> None:
    """The poisoned token is in the first of two chunks: the draw learns of it from the cache."""

    def engine(num_sequences: int = 8) -> Engine:
        knobs: dict[str, object] = {"max_model_len": MAX_LEN, "block_size": BLOCK}
        knobs |= {"max_num_batched_tokens": BUDGET}
        knobs |= {"kv_cache_memory_bytes": num_sequences * least}
        knobs |= {"kernels": "cpu", "kv_cache_dtype": format, "dtype": dtype_of(format)}
        return make_engine(str(folder), **knobs)

    least = 1 << 20
    least = bytes_needed(engine().info.cache.layouts, MAX_LEN, BUDGET)
    expected, failures = answers(engine(), prompts)
    assert not failures
    assert all(len(tokens) == NUM_TOKENS for tokens in expected.values())

    poisoned = [prompts[0], [*prompts[1][:5], POISON, *prompts[1][6:]], prompts[2]]
    small = engine(num_sequences=3)
    told, failures = answers(small, poisoned)
    (error,) = failures.values()
    assert isinstance(error, StepError)
    assert NOT_FINITE in str(error)
    assert told == {name: tokens for name, tokens in expected.items() if name != "1"}

    assert set(answers(small, poisoned)[1]) == {"1"}, "nothing of it was found again"
    for _ in range(2):  # in the blocks that it had
        assert answers(small, prompts) == (expected, {})
