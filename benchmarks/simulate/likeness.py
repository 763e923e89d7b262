"""What traffic is like: its lengths, its rate, and what caches of several sizes find again."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.simulate.traffic import BLOCK_TOKENS, Request, mean_rate
from cluster.bench.measure import percentile

LRU_BLOCKS = (1_000, 10_000, 30_000, 50_000)
SHARES = (10, 50, 90, 99)


@dataclass(frozen=True)
class Likeness:
    """Hits are shares of the prompts' full blocks."""

    num_requests: int
    rate: float  # requests a second
    input_mean: float
    input_shares: dict[int, float]
    output_mean: float
    output_shares: dict[int, float]
    endless_hit: float  # of one cache that forgets nothing
    lru_hits: dict[int, float]  # of one cache of so many blocks

    def figures(self) -> dict[str, float]:
        """By what they are called."""
        return {
            "requests/s": self.rate,
            "input mean": self.input_mean,
            **{f"input p{share}": value for share, value in self.input_shares.items()},
            "output mean": self.output_mean,
            **{f"output p{share}": value for share, value in self.output_shares.items()},
            "hit, endless cache": self.endless_hit,
            **{f"hit, {blocks:,} blocks": value for blocks, value in self.lru_hits.items()},
        }


def describe(requests: Sequence[Request]) -> Likeness:
    prompts = [request.names[: request.num_tokens // BLOCK_TOKENS] for request in requests]
    inputs = sorted(float(request.num_tokens) for request in requests)
    outputs = sorted(float(request.num_output) for request in requests)
    return Likeness(
        len(requests),
        mean_rate(requests),
        sum(inputs) / len(inputs),
        {share: percentile(inputs, share) for share in SHARES},
        sum(outputs) / len(outputs),
        {share: percentile(outputs, share) for share in SHARES},
        lru_hit(prompts, None),
        {blocks: lru_hit(prompts, blocks) for blocks in LRU_BLOCKS},
    )


def lru_hit(prompts: Sequence[Sequence[bytes]], num_blocks: int | None) -> float:
    """The share of all blocks that a cache of so many (None: endless) has when they are asked."""
    cache: OrderedDict[bytes, None] = OrderedDict()
    num_hit = 0
    for names in prompts:
        for name in names:
            if name not in cache:
                break
            num_hit += 1
        # From the end on, so that a beginning is forgotten after what follows it.
        for name in reversed(names):
            cache[name] = None
            cache.move_to_end(name)
        while num_blocks is not None and len(cache) > num_blocks:
            cache.popitem(last=False)
    return num_hit / max(1, sum(map(len, prompts)))
