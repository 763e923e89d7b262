"""Train the bundled model on a CPU: `python -m engine.bundled.train --steps 2800 --out DIR`."""

import argparse
import logging
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from engine.bundled.chat import BOS, END, EOS, PAD
from engine.bundled.corpus import read_corpus, split_held_out
from engine.bundled.tokens import (
    MAX_LENGTH,
    VOCAB_SIZE,
    Documents,
    Stream,
    documents_of,
    streams_of,
    train_tokenizer,
    with_chat_template,
)

SHORT_LENGTH = 512
WARM_UP_STEPS = 40
EVALUATED_TOKENS = 16384
log = logging.getLogger("train")


class Settings(NamedTuple):
    """What a run depends on; equal settings and interpreter give equal batches."""

    out: Path
    resume: Path | None
    steps: int
    limit_s: float
    source_share: float
    long_from: float
    tokens_per_step: int
    learning_rate: float
    seed: int
    threads: int
    compiled: bool
    save_every: int


class Optimizers:
    """Muon for the matrices inside the layers, AdamW for embeddings and norms."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        inner = list(model.model.layers.parameters())
        matrices = [p for p in inner if p.ndim == 2]
        others = [p for p in inner if p.ndim != 2]
        others += [*model.model.embed_tokens.parameters(), *model.model.norm.parameters()]
        self._parts: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
        )

    def step(self, learning_rate: float) -> None:
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = learning_rate
            part.step()
            part.zero_grad()


def main() -> None:
    settings = parse_arguments()
    logging.basicConfig(stream=sys.stdout, format="%(asctime)s %(message)s", level=logging.INFO)
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    training, held_out = (
        documents_of(corpus, settings.seed) for corpus in split_held_out(read_corpus())
    )
    tokenizer = start_tokenizer(settings.resume, training)
    streams = streams_of(tokenizer, training)
    measured = streams_of(tokenizer, held_out)
    sizes = ", ".join(f"{name} {len(s.tokens):,}" for name, s in streams.items())
    model = start_model(settings.resume, tokenizer)
    log.info("%s parameters; tokens: %s", f"{model.num_parameters():,}", sizes)
    train(model, streams, settings, lambda: save(model, tokenizer, settings.out))
    for name, stream in measured.items():
        log.info("held-out %s: perplexity %.2f", name, perplexity(model, stream))


def parse_arguments() -> Settings:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--resume", type=Path, help="start from this folder, optimizers fresh")
    parser.add_argument("--steps", type=int, default=2800)
    parser.add_argument("--minutes", type=float, default=math.inf, help="anneal by then if slow")
    parser.add_argument("--source-share", type=float, default=0.25, help="of windows; not prose")
    parser.add_argument(
        "--long-from", type=float, default=0.6, help="share of the run before 2048-token windows"
    )
    parser.add_argument("--tokens-per-step", type=int, default=6144, help="multiple of 2048")
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="torch.compile; needs a compiler")
    parser.add_argument("--save-every", type=int, default=200, help="steps")
    given = parser.parse_args()
    if given.tokens_per_step % MAX_LENGTH:
        parser.error(f"--tokens-per-step must be a multiple of {MAX_LENGTH}")
    return Settings(
        out=given.out,
        resume=given.resume,
        steps=given.steps,
        limit_s=given.minutes * 60,
        source_share=given.source_share,
        long_from=given.long_from,
        tokens_per_step=given.tokens_per_step,
        learning_rate=given.learning_rate,
        seed=given.seed,
        threads=given.threads,
        compiled=given.compile,
        save_every=given.save_every,
    )


def start_tokenizer(resume: Path | None, training: Documents) -> PreTrainedTokenizerFast:
    if resume is None:
        return with_chat_template(train_tokenizer(training))
    return with_chat_template(Tokenizer.from_file(str(resume / "tokenizer.json")))


def start_model(resume: Path | None, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    if resume is None:
        return LlamaForCausalLM(model_config(tokenizer))
    return LlamaForCausalLM.from_pretrained(resume, dtype=torch.float32)


def model_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    bos, eos, end, pad = tokenizer.convert_tokens_to_ids([BOS, EOS, END, PAD])
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=576,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=bos,
        eos_token_id=[end, eos],
        pad_token_id=pad,
    )


def train(
    model: LlamaForCausalLM,
    streams: dict[str, Stream],
    settings: Settings,
    checkpoint: Callable[[], None],
) -> None:
    rng = random.Random(settings.seed)
    optimizers = Optimizers(model)
    loss_of = torch.compile(batch_loss, dynamic=False) if settings.compiled else batch_loss
    smoothed, start = math.nan, time.monotonic()
    for step in range(settings.steps):
        elapsed_s = time.monotonic() - start
        progress = max(step / settings.steps, elapsed_s / settings.limit_s)
        if progress >= 1:
            break
        loss = loss_of(model, batch_of(streams, progress, settings, rng))
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step(settings.learning_rate * rate_at(step, progress))
        smoothed = loss.item() if step == 0 else 0.95 * smoothed + 0.05 * loss.item()
        if step % 20 == 0:
            log.info("step %d, %.0f s: loss %.3f", step, elapsed_s, smoothed)
        if (step + 1) % settings.save_every == 0:
            checkpoint()
    log.info("last step %d, %.0f s: loss %.3f", step, time.monotonic() - start, smoothed)
    checkpoint()


def rate_at(step: int, progress: float) -> float:
    """Share of the peak rate: linear warm-up, then a cosine down to zero."""
    warm = min(1.0, (step + 1) / WARM_UP_STEPS)
    return warm * 0.5 * (1 + math.cos(math.pi * progress))


def batch_of(
    streams: dict[str, Stream], progress: float, settings: Settings, rng: random.Random
) -> torch.Tensor:
    length = SHORT_LENGTH if progress < settings.long_from else MAX_LENGTH
    rest = 1 - settings.source_share
    mix = {"prose": rest / 3, "source": settings.source_share, "chat": rest * 2 / 3}
    names = rng.choices(list(mix), list(mix.values()), k=settings.tokens_per_step // length)
    return torch.stack([streams[name].window(length + 1, rng) for name in names])


def batch_loss(model: LlamaForCausalLM, windows: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=windows[:, :-1], use_cache=False).last_hidden_state
        logits = model.lm_head(hidden)
    return functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, stream: Stream) -> float:
    """Over the stream's first EVALUATED_TOKENS, in windows that do not overlap."""
    tokens = stream.tokens[: EVALUATED_TOKENS + 1]
    losses = [
        float(batch_loss(model, tokens[at : at + SHORT_LENGTH + 1][None]))
        for at in range(0, len(tokens) - SHORT_LENGTH, SHORT_LENGTH)
    ]
    return math.exp(sum(losses) / len(losses))


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Each file is replaced in one act, so that a reader never sees half of it."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as fresh:
        tokenizer.save_pretrained(fresh, save_jinja_files=False)
        half = LlamaForCausalLM(model.config)
        half.load_state_dict(model.state_dict())
        half.to(torch.bfloat16).save_pretrained(fresh)
        GenerationConfig(
            bos_token_id=model.config.bos_token_id,
            eos_token_id=model.config.eos_token_id,
            pad_token_id=model.config.pad_token_id,
            do_sample=True,
            temperature=0.5,
            top_p=0.9,
        ).save_pretrained(fresh)
        for file in Path(fresh).iterdir():
            file.chmod(0o644)
            os.replace(file, out / file.name)


if __name__ == "__main__":
    main()
