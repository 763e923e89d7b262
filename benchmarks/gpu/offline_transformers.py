"""The same offline workload by transformers' continuous batching, weights of the same shape."""

import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.generation import ContinuousBatchingConfig

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models import write_config
from benchmarks.gpu.workload import OFFLINE, OUTPUT, SMOKE_OFFLINE

GOAL = 3.0  # times its tokens a second
ATTENTION = "sdpa"  # with paging; FlashAttention's package is not on the machine


@torch.inference_mode(False)  # it has threads of its own, which write to tensors made here
@torch.no_grad()
def run(bench: Bench) -> None:
    work = SMOKE_OFFLINE if bench.smoke else OFFLINE
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), bench.shape, 4096)
        config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device(bench.device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=bench.dtype, attn_implementation=ATTENTION
        ).eval()
    vocab = bench.shape.vocab_size
    _generate(bench, model, work.prompts(vocab, seed=0), 4)
    answers = _generate(bench, model, work.prompts(vocab, seed=1), work.output_len)
    # by its own clock, since the call makes a cache and a thread before it begins
    spans = [answer.lifespan for answer in answers.values()]
    took_s = max(end for _, end in spans) - min(start for start, _ in spans)
    lengths = [len(answer.generated_tokens) for answer in answers.values()]
    assert lengths == [work.output_len] * work.num_seqs, lengths
    theirs = work.num_seqs * work.output_len / took_s
    bench.figure(f"{work.name}, transformers, whole", "s", took_s)
    bench.figure(OUTPUT, "tokens/s", theirs)
    ours = bench.earlier("offline", OUTPUT)
    if ours is not None:
        bench.figure(
            "output of kvrelay", "tokens/s", ours, share=ours / theirs,
            share_of="transformers'", goal=GOAL,
        )  # fmt: skip


def _generate(
    bench: Bench, model: Any, prompts: list[list[int]], num_tokens: int
) -> dict[str, Any]:
    generation = transformers.GenerationConfig(
        max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    # a machine without a GPU has no memory to infer the cache's size from
    sizes = {"num_blocks": 16, "max_batch_tokens": 64} if bench.device.type == "cpu" else {}
    answers: dict[str, Any] = model.generate_batch(
        inputs=prompts,
        generation_config=generation,
        continuous_batching_config=ContinuousBatchingConfig(**sizes),
        progress_bar=False,
    )
    return answers
