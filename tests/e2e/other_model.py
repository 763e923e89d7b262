"""The bundled model with other weights: another model, which shares its tokenizer."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from engine.model_source import BUNDLED_FOLDER

_NOISE = 0.05  # answers differ from the bundled model's, and stay text


def write_other_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    for file in BUNDLED_FOLDER.glob("*.json"):
        shutil.copy(file, folder)
    random = torch.Generator().manual_seed(0)
    tensors = load_file(BUNDLED_FOLDER / "model.safetensors")
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=random).to(tensor.dtype)
        tensors[name] = tensor + _NOISE * tensor.float().std().to(tensor.dtype) * noise
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
