"""The rules of docs/sampling.md once more: plain Python, one row at a time, fp64, with sorting."""

import math
from collections import Counter
from dataclasses import dataclass

from engine.sampling import SamplingParams

WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Sequence:
    params: SamplingParams
    seed: int
    choice: int
    tokens: list[int]
    num_prompt_tokens: int
    eos_ids: tuple[int, ...] = ()


def philox(counter: list[int], key: list[int]) -> list[int]:
    c, k = list(counter), list(key)
    for _ in range(10):
        low = c[0] * 0xD2511F53
        high = c[2] * 0xCD9E8D57
        c = [high >> 32 ^ c[1] ^ k[0], high & WORD, low >> 32 ^ c[3] ^ k[1], low & WORD]
        k = [k[0] + 0x9E3779B9 & WORD, k[1] + 0xBB67AE85 & WORD]
    return c


def processed(logits: list[float], sequence: Sequence, mask: list[bool] | None) -> list[float]:
    params, z = sequence.params, list(logits)
    allowed = params.allowed_token_ids
    for token in range(len(z)):
        banned = allowed is not None and token not in allowed
        if banned or (mask is not None and not mask[token]):
            z[token] = -math.inf
    for token, bias in params.logit_bias.items():
        z[token] += bias
    output = sequence.tokens[sequence.num_prompt_tokens :]
    if len(output) < params.min_tokens:
        ending = params.stop_token_ids + (() if params.ignore_eos else sequence.eos_ids)
        for token in ending:
            z[token] = -math.inf
    for token in set(sequence.tokens):
        if z[token] > 0:
            z[token] /= params.repetition_penalty
        else:
            z[token] *= params.repetition_penalty
    for token, count in Counter(output).items():
        z[token] -= params.frequency_penalty * count + params.presence_penalty
    return z


def survivors(z: list[float], params: SamplingParams) -> dict[int, float]:
    """Probability of every token that the filters leave, renormalised."""
    if params.greedy:
        return {z.index(max(z)): 1.0}
    best = max(z)
    weights = {
        token: math.exp((value - best) / params.temperature)
        for token, value in enumerate(z)
        if value > -math.inf
    }
    weights = {token: w for token, w in weights.items() if w >= params.min_p}
    if params.top_k > 0:
        order = sorted(weights.values(), reverse=True)
        kth = order[min(params.top_k, len(order)) - 1]
        weights = {token: w for token, w in weights.items() if w >= kth}
    if params.top_p < 1.0:
        total = math.fsum(weights.values())
        better: dict[float, float] = {}
        above = 0.0
        for w in sorted(weights.values(), reverse=True):
            better.setdefault(w, above)
            above += w
        weights = {token: w for token, w in weights.items() if better[w] < params.top_p * total}
    total = math.fsum(weights.values())
    return {token: w / total for token, w in weights.items()}


def token_of(logits: list[float], sequence: Sequence, mask: list[bool] | None = None) -> int:
    kept = survivors(processed(logits, sequence, mask), sequence.params)
    key = [sequence.seed & WORD, sequence.seed >> 32 & WORD]
    position = len(sequence.tokens)

    def result(token: int) -> tuple[float, int]:
        counter = [token // 4, position, sequence.choice, 0x6B767264]
        bits = philox(counter, key)[token % 4] >> 1
        t = min((bits + 0.5) * 2.0**-31, 1 - 2.0**-24)
        return -math.log1p(-t) / kept[token], token

    return min(kept, key=result)


def logprobs(logits: list[float]) -> list[float]:
    best = max(logits)
    total = math.log(math.fsum(math.exp(value - best) for value in logits))
    return [value - best - total for value in logits]
