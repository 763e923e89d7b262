"""Models of every covered family, as the tests have them, from a checkpoint to greedy tokens."""

import tempfile
from pathlib import Path

import torch

from benchmarks.gpu.bench import Bench, interpreted
from benchmarks.gpu.generation import generate
from benchmarks.gpu.models import make_engine
from engine.model_source import resolve_model
from engine.weights import CheckpointTensors
from tests.engine.models.cases import NATIVE_CASES, NUM_TOKENS, greedy, make_model, prompt_tokens

FAMILY_S = 12.0  # what one may take, compilation included


def run(bench: Bench) -> None:
    cases = NATIVE_CASES[:1] if bench.smoke else NATIVE_CASES
    for case in cases:
        if bench.seconds_left < FAMILY_S and not interpreted():
            bench.say(f"no time for {case.name} and those after it")
            return
        with tempfile.TemporaryDirectory() as folder, torch.inference_mode(False):
            theirs = make_model(case.make_config())
            theirs.save_pretrained(folder)
            prompts = [prompt_tokens(0), prompt_tokens(1)]
            expected = [greedy(theirs, p)[len(p) :] for p in prompts]
            answers = _answers(bench, Path(folder), prompts, case.max_model_len)
        wrong = sum(
            a != e
            for answer, tokens in zip(answers, expected, strict=True)
            for a, e in zip(answer, tokens, strict=True)
        )
        bench.check(f"{case.name}: greedy tokens that differ", wrong, 0.0)


def _answers(
    bench: Bench, folder: Path, prompts: list[list[int]], max_model_len: int | None
) -> list[list[int]]:
    source = resolve_model(str(folder))
    engine = make_engine(
        bench,
        source,
        CheckpointTensors(folder),
        dtype="float32",
        block_size=16,
        max_num_batched_tokens=24,
        max_num_seqs=4,
        max_model_len=max_model_len,
        kv_cache_memory_bytes=1 << 24,
    )
    answers = generate(engine, prompts, NUM_TOKENS)
    engine.close()
    return answers
