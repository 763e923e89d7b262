"""How fast a workload could be, if nothing but the machine's limits held it up.

A step reads every weight once, or multiplies as fast as oneDNN does, whichever takes longer, and
reads the cache of its sequences besides. A prompt is bound by its multiplications.
"""

from dataclasses import dataclass

from benchmarks.workloads import WEIGHT_BYTES, ModelShape, Workload


@dataclass(frozen=True)
class Limits:
    """`read_bytes_s` is one sequential stream dealt out to all cores, the multiplications bf16."""

    read_bytes_s: float
    gemm_flops_s: float


def decode_step_s(model: ModelShape, limits: Limits, num_seqs: int, kv_tokens: float) -> float:
    """`kv_tokens` are those of all sequences together."""
    parameters = model.num_layers * model.layer_parameters + model.head_parameters
    read_s = parameters * WEIGHT_BYTES / limits.read_bytes_s
    multiply_s = 2 * parameters * num_seqs / limits.gemm_flops_s
    return max(read_s, multiply_s) + kv_tokens * model.kv_token_bytes / limits.read_bytes_s


def mean_decode_step_s(workload: Workload, limits: Limits) -> float:
    """At the middle of the output."""
    kv_tokens = workload.prompt_len + workload.output_len / 2
    return decode_step_s(workload.model, limits, workload.num_seqs, workload.num_seqs * kv_tokens)


def prefill_s(model: ModelShape, limits: Limits, num_tokens: int) -> float:
    """One prompt: its linear layers, half a square of attention, and logits for its end."""
    linear = 2 * model.num_layers * model.layer_parameters * num_tokens
    attention = 2 * model.num_layers * model.hidden * num_tokens**2
    return (linear + attention + 2 * model.head_parameters) / limits.gemm_flops_s


def total_s(workload: Workload, limits: Limits) -> float:
    """All prompts, then all steps; the first token comes with the prompt."""
    prompts = workload.num_seqs * prefill_s(workload.model, limits, workload.prompt_len)
    return prompts + (workload.output_len - 1) * mean_decode_step_s(workload, limits)
