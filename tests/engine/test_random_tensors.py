"""Random weights: the same numbers wherever they are made, and such as a model can be made of."""

import hashlib
import math
import struct

import pytest
import torch

from engine import random_tensors
from engine.random_tensors import RandomTensors, split_mix

STD = 0.02
NAME = "model.layers.3.mlp.up_proj.weight"
# `benchmarks.gpu` runs these on a card, where they show that its numbers are a CPU's
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def weights(
    *shape: int, name: str = NAME, seed: int = 5, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    out = torch.full(shape, math.nan, dtype=dtype, device=DEVICE)
    RandomTensors(seed, STD).read(name, out)
    return out.cpu()


def plain_split_mix(seed: int, count: int) -> list[int]:
    """The generator as it is published, on Python's integers."""
    words, state, low = [], seed, 2**64 - 1
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & low
        word = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & low
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & low
        words.append(word ^ (word >> 31))
    return words


def test_the_generator_is_splitmix64() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert plain_split_mix(1234567, 3) == published
    states = [1234567 + (i + 1) * 0x9E3779B97F4A7C15 for i in range(500)]
    signed = [(state + 2**63) % 2**64 - 2**63 for state in states]
    ours = split_mix(torch.tensor(signed, device=DEVICE)).tolist()
    assert [word % 2**64 for word in ours] == plain_split_mix(1234567, 500)


def test_elements_are_its_halves_scaled_by_one_product() -> None:
    digest = hashlib.blake2b(f"5:{NAME}".encode(), digest_size=8).digest()
    words = plain_split_mix(int.from_bytes(digest, "little"), 500)
    halves = torch.tensor(struct.unpack("<1000i", struct.pack("<500Q", *words)))
    expected = halves.float() * torch.tensor(STD * math.sqrt(3) / 2**31)
    assert torch.equal(weights(1000), expected)
    assert torch.equal(weights(999), expected[:999])


def test_values_do_not_change_from_release_to_release() -> None:
    """They are what a fingerprint of config and seed promises."""
    assert weights(4).tolist() == [
        0.025324545800685883,
        0.022877315059304237,
        -0.003965908195823431,
        0.028133517131209373,
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_types_hold_the_same_values_rounded(dtype: torch.dtype) -> None:
    assert torch.equal(weights(64, 33, dtype=dtype), weights(64, 33).to(dtype))


def test_how_many_are_made_at_once_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = weights(71, 13)
    monkeypatch.setattr(random_tensors, "CHUNK", 64)
    assert torch.equal(weights(71, 13), whole)


def test_the_end_of_a_tensor_of_several_chunks_is_reached() -> None:
    count = 2 * random_tensors.CHUNK + 3
    made = weights(count)
    assert not made.isnan().any()
    assert torch.equal(made[: random_tensors.CHUNK], weights(random_tensors.CHUNK))
    assert len(set(made.tolist())) > 0.95 * count, "no chunk is another's copy"


def test_seed_and_name_make_other_values() -> None:
    kinds = [weights(4096), weights(4096, seed=6), weights(4096, name=NAME.replace("3", "4"))]
    together = torch.corrcoef(torch.stack(kinds))
    assert together.fill_diagonal_(0).abs().max() < 0.08  # 5 deviations of independent ones


def test_values_are_spread_as_asked() -> None:
    made = weights(1024, 1024).double()
    count = made.numel()
    assert abs(made.mean()) < 5 * STD / math.sqrt(count)
    assert abs(made.std() / STD - 1) < 0.005
    assert made.abs().max() <= STD * math.sqrt(3) * (1 + 1e-6)
    shares = torch.histc(made, 64) / count * 64
    assert (shares - 1).abs().max() < 5 * math.sqrt(64 / count)
    for apart in (1, 2, 3, 1024):  # neighbours, in a row and in a column
        flat = made.view(-1)
        together = (flat[apart:] * flat[:-apart]).mean() / STD**2
        assert abs(together) < 5 / math.sqrt(count)


def test_norms_and_biases_are_as_at_the_start_of_training() -> None:
    assert weights(8, name="model.norm.weight").tolist() == [1.0] * 8
    assert weights(8, name="model.layers.0.self_attn.q_proj.bias").tolist() == [0.0] * 8
