"""What is measured: the models' shapes, and how many prompts of which lengths.

Standard library alone, since the peers' own environments read it too.
"""

import random
from dataclasses import dataclass
from typing import Any

WEIGHT_BYTES = 2  # bf16, and so is the cache
MAX_LEN = 4096


@dataclass(frozen=True)
class ModelShape:
    """A Llama of random weights."""

    name: str
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    mlp: int
    vocab_size: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.num_heads

    @property
    def layer_parameters(self) -> int:
        """Of the linear parts of one layer."""
        qkv = self.hidden * (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return qkv + self.hidden * self.hidden + 3 * self.hidden * self.mlp

    @property
    def head_parameters(self) -> int:
        return self.hidden * self.vocab_size

    @property
    def num_parameters(self) -> int:
        norms = (2 * self.num_layers + 1) * self.hidden
        return self.num_layers * self.layer_parameters + 2 * self.head_parameters + norms

    @property
    def kv_token_bytes(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * WEIGHT_BYTES

    def config(self) -> dict[str, Any]:
        """The config.json of this shape."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.mlp,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": MAX_LEN,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": "bfloat16",
        }


@dataclass(frozen=True)
class Workload:
    """`num_seqs` random prompts, all there at the start, greedy, to their full length."""

    name: str
    model: ModelShape
    num_seqs: int
    prompt_len: int
    output_len: int

    def prompts(self, seed: int) -> list[list[int]]:
        """Other prompts for every seed, so that no prefix cache helps."""
        draw = random.Random(f"{self.name} {seed}")
        low, high = 3, self.model.vocab_size - 1
        return [
            [draw.randint(low, high) for _ in range(self.prompt_len)] for _ in range(self.num_seqs)
        ]


SMALL = ModelShape("llama-125m", 768, 12, 12, 4, 2048, 32000)
THIN = ModelShape("thin", 64, 12, 2, 1, 128, 512)
TINY = ModelShape("llama-5m", 256, 4, 4, 2, 640, 4096)
SHAPES = {shape.name: shape for shape in (SMALL, THIN, TINY)}

WORKLOADS = {
    w.name: w
    for w in (
        Workload("single", SMALL, 1, 512, 64),
        Workload("batch-512", SMALL, 32, 512, 128),
        Workload("batch-32", SMALL, 32, 32, 128),
        Workload("prefill-512", SMALL, 1, 512, 1),
        Workload("prefill-2048", SMALL, 1, 2048, 1),
        Workload("overhead", THIN, 32, 32, 128),
    )
}
FIRST_TOKEN = Workload("first-token", SMALL, 1, 32, 1)
START = "start"  # a process from its start to its first token
