import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import bounds
from benchmarks.bounds import Limits
from benchmarks.workloads import SHAPES, SMALL, WORKLOADS, ModelShape

# a machine whose bounds were worked out by hand
LIMITS = Limits(read_bytes_s=33e9, gemm_flops_s=434e9)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_parameters_are_those_of_the_model(shape: ModelShape) -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_dict(shape.config()))
    assert sum(p.numel() for p in model.parameters()) == shape.num_parameters


def test_one_sequence_is_bound_by_reading_its_weights_and_cache() -> None:
    assert bounds.mean_decode_step_s(WORKLOADS["single"], LIMITS) == pytest.approx(6.3e-3, rel=0.02)


def test_many_sequences_are_bound_by_multiplying_and_reading_the_cache() -> None:
    step_s = bounds.decode_step_s(SMALL, LIMITS, 32, 32 * 544)
    assert step_s == pytest.approx(14.5e-3 + 6.5e-3, rel=0.03)


@pytest.mark.parametrize(("num_tokens", "seconds"), [(512, 0.187), (2048, 0.878)])
def test_a_prompt_is_bound_by_multiplying(num_tokens: int, seconds: float) -> None:
    assert bounds.prefill_s(SMALL, LIMITS, num_tokens) == pytest.approx(seconds, rel=0.03)
