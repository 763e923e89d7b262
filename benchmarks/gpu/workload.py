"""The offline workload that both engines get: the same prompts, the same number of tokens."""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Offline:
    num_seqs: int
    prompt_len: int
    output_len: int

    @property
    def name(self) -> str:
        return f"{self.num_seqs} x ({self.prompt_len} in, {self.output_len} out)"

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        draw = random.Random(seed)
        return [
            [draw.randrange(3, vocab_size) for _ in range(self.prompt_len)]
            for _ in range(self.num_seqs)
        ]


OFFLINE = Offline(64, 1024, 256)
SMOKE_OFFLINE = Offline(2, 5, 2)
OUTPUT = "output"  # the figure that both engines' parts write
