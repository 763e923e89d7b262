"""A folder with a model of random weights, as a user would have it: config and safetensors.

`python -m benchmarks.model_folder FOLDER SHAPE` writes one.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.workloads import SHAPES, ModelShape

DEVIATION = 0.02  # what trained models begin with: activations stay finite


def write_model(folder: Path, shape: ModelShape) -> None:
    """Leaves a folder of the same shape as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.json"
    text = json.dumps(shape.config(), indent=2)
    if config.exists() and config.read_text() == text:
        return
    save_file(_tensors(shape), folder / "model.safetensors", metadata={"format": "pt"})
    config.write_text(text)


def _tensors(shape: ModelShape) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=random) * DEVIATION).bfloat16()

    def ones() -> torch.Tensor:
        return torch.ones(shape.hidden, dtype=torch.bfloat16)

    kv_width = shape.num_kv_heads * shape.head_dim
    tensors = {
        "model.embed_tokens.weight": weight(shape.vocab_size, shape.hidden),
        "lm_head.weight": weight(shape.vocab_size, shape.hidden),
        "model.norm.weight": ones(),
    }
    for layer in range(shape.num_layers):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.input_layernorm.weight": ones(),
            f"{name}.post_attention_layernorm.weight": ones(),
            f"{name}.self_attn.q_proj.weight": weight(shape.hidden, shape.hidden),
            f"{name}.self_attn.k_proj.weight": weight(kv_width, shape.hidden),
            f"{name}.self_attn.v_proj.weight": weight(kv_width, shape.hidden),
            f"{name}.self_attn.o_proj.weight": weight(shape.hidden, shape.hidden),
            f"{name}.mlp.gate_proj.weight": weight(shape.mlp, shape.hidden),
            f"{name}.mlp.up_proj.weight": weight(shape.mlp, shape.hidden),
            f"{name}.mlp.down_proj.weight": weight(shape.hidden, shape.mlp),
        }
    return tensors


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("shape", choices=SHAPES, metavar="SHAPE", help=", ".join(SHAPES))
    given = parser.parse_args()
    write_model(given.folder, SHAPES[given.shape])
