import pytest

from benchmarks.run import run
from benchmarks.workloads import THIN, Workload

WORKLOAD = Workload("three", THIN, num_seqs=3, prompt_len=4, output_len=3)


class OneAfterTheOther:
    """Prefills one prompt a step, in order, and decodes all that have begun."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.missing: dict[int, int] = {}
        self.started: set[int] = set()

    def add(self, index: int, prompt: list[int], num_output: int) -> None:
        self.prompts.append(prompt)
        self.missing[index] = num_output

    def step(self) -> dict[int, int]:
        waiting = [i for i in self.missing if i not in self.started]
        self.started.update(waiting[:1])
        tokens = {i: 1 for i, count in self.missing.items() if i in self.started and count}
        for index in tokens:
            self.missing[index] -= 1
        return tokens


def test_every_token_is_counted_and_waited_for() -> None:
    side = OneAfterTheOther()
    measured = run(side, WORKLOAD, seed=0)
    assert set(side.missing.values()) == {0}
    assert measured.num_output_tokens == 9
    assert measured.first_token_s == sorted(measured.first_token_s)
    assert measured.total_s >= measured.first_token_s[-1]


def test_decode_steps_are_those_of_all_sequences_after_their_first_token() -> None:
    # 3 steps of prompts; sequence 0 is done by then, so no later step has them all
    assert run(OneAfterTheOther(), WORKLOAD, seed=0).decode_step_s == []
    alone = Workload("alone", THIN, num_seqs=1, prompt_len=4, output_len=3)
    assert len(run(OneAfterTheOther(), alone, seed=0).decode_step_s) == 2


@pytest.mark.parametrize("other", [1, 2])
def test_prompts_differ_from_run_to_run_and_are_repeatable(other: int) -> None:
    assert WORKLOAD.prompts(0) == WORKLOAD.prompts(0)
    assert WORKLOAD.prompts(0) != WORKLOAD.prompts(other)
    assert all(3 <= t < THIN.vocab_size for prompt in WORKLOAD.prompts(other) for t in prompt)
