"""The whole engine against transformers on the device: greedy tokens in fp32, logits in bf16."""

import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.gpu.bench import SMOKE_MODEL, Bench, free_memory, relative_error
from benchmarks.gpu.generation import generate
from benchmarks.gpu.models import OfAnother, make_engine, make_model, write_config
from benchmarks.gpu.rig import Rig
from benchmarks.workloads import TINY, ModelShape

# the layers of Llama-3.1-8B, fewer of them and of a smaller vocabulary, so that fp32 is quick
LAYERS_OF_8B = ModelShape("layers of llama-3.1-8b", 4096, 4, 32, 8, 14336, 32000)
TOKENS = 64
# weights twice as large as at the start of training, so that no two logits nearly tie
SPREAD = 2.0
LOGITS_BOUND = 1.5  # our error in bf16 over transformers' own, both against fp32


def run(bench: Bench) -> None:
    for shape in (SMOKE_MODEL,) if bench.smoke else (TINY, LAYERS_OF_8B):
        with tempfile.TemporaryDirectory() as folder:
            _compare(bench, shape, Path(folder))
        free_memory()


def _compare(bench: Bench, shape: ModelShape, folder: Path) -> None:
    num_tokens = 3 if bench.smoke else TOKENS
    prompts = [
        torch.randint(3, shape.vocab_size, (length,)).tolist()
        for length in ((3, 9) if bench.smoke else (1, 37, 64, 300, 777))
    ]
    source = write_config(folder, shape, 2048)
    theirs = _twin(bench, folder)
    weights = OfAnother(theirs.state_dict())
    engine = make_engine(
        bench,
        source,
        weights,
        dtype="float32",
        max_num_batched_tokens=8 if bench.smoke else 256,
        max_num_seqs=8,
        max_model_len=128 if bench.smoke else 2048,
        block_size=16,
        kv_cache_memory_bytes=1 << (24 if bench.smoke else 30),
    )
    for caching in ("cold", "cached prefixes"):
        answers = generate(engine, prompts, num_tokens)
        wrong = 0
        for prompt, answer in zip(prompts, answers, strict=True):
            wrong += _differing(theirs, prompt, answer)
        name = f"{shape.name}, fp32, {caching}: greedy tokens that differ"
        bench.check(f"{name} of {num_tokens * len(prompts)}", wrong, 0.0)
    engine.close()
    del engine
    _logits(bench, shape, folder, theirs, prompts[-1])


def _twin(bench: Bench, folder: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.inference_mode(False), torch.device(bench.device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(SPREAD)
    return model


def _differing(model: Any, prompt: list[int], answer: list[int]) -> int:
    """Each token beside the best of the same text before it, so that one that differs is one."""
    tokens = torch.tensor([prompt + answer], device=model.device)
    logits = model(tokens, use_cache=False).logits[0]
    best = logits[len(prompt) - 1 : -1].argmax(-1)
    return int((best.cpu() != torch.tensor(answer)).sum())


def _logits(bench: Bench, shape: ModelShape, folder: Path, theirs: Any, prompt: list[int]) -> None:
    """Both round at every operation, so neither is the truth; fp32 is."""
    tokens = torch.tensor([prompt], device=bench.device)
    truth = theirs(tokens, use_cache=False).logits[0, -1].float()
    model, description = make_model(
        bench,
        write_config(folder, shape, 2048),
        bench.half,
        2048,
        OfAnother(theirs.state_dict()),
    )
    rig = Rig(bench, model, description, bench.half, num_seqs=1, max_len=1024)
    ours = rig.logits_after(prompt)
    rounded = theirs.to(bench.half)(tokens, use_cache=False).logits[0, -1].float()
    ratio = relative_error(ours, truth) / relative_error(rounded, truth)
    name = f"{shape.name}, bf16: error of logits over transformers' own"
    bench.check(name, ratio, 3 * LOGITS_BOUND if bench.smoke else LOGITS_BOUND)
    bench.figure(f"{shape.name}, bf16: error of logits", "", relative_error(ours, truth))
