"""Prompts in, greedy tokens out, by an engine."""

from collections.abc import Sequence

from engine.engine import Engine
from engine.request import GenerationRequest, RequestId
from engine.sampling import SamplingParams


def add(engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
    """Prompt i is request `i`."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add(GenerationRequest(RequestId(str(index)), list(prompt), params))


def generate(engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    add(engine, prompts, num_tokens)
    answers: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        output = engine.step()
        for failure in output.failures.values():
            raise failure
        for name, update in output.updates.items():
            for delta in update.deltas:
                answers[int(name)] += delta.token_ids
    return answers
