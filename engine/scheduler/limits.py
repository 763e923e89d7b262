"""What the scheduler may hand out, and which requests can never be served with it."""

from array import array
from dataclasses import dataclass

from engine.errors import RequestError
from engine.request import GenerationRequest
from kv_cache.cache import KvCache


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The knobs of `EngineConfig` that bound a step, with what the model adds."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_num_queued_reqs: int
    by_priority: bool
    prefix_caching: bool
    vocab_size: int
    eos_token_ids: frozenset[int]
    fingerprint: str


def check_request(request: GenerationRequest, limits: SchedulerLimits, cache: KvCache) -> None:
    """RequestError for what can never run here, however long it waits."""
    _check_types(request)
    params, num_prompt = request.params, len(request.prompt_token_ids)
    if num_prompt == 0:
        raise RequestError("prompt", "must have at least one token")
    low, high = min(request.prompt_token_ids), max(request.prompt_token_ids)
    if low < 0 or high >= limits.vocab_size:
        wrong = low if low < 0 else high
        raise RequestError("prompt", f"token {wrong}, must be in 0..{limits.vocab_size - 1}")
    if num_prompt >= limits.max_model_len:
        raise RequestError(
            "prompt", f"{num_prompt} tokens, must be at most {limits.max_model_len - 1}"
        )
    room = limits.max_model_len - num_prompt
    if params.max_tokens is not None and params.max_tokens > room:
        raise RequestError(
            "max_tokens",
            f"{params.max_tokens} after a prompt of {num_prompt} tokens, must be at most {room}",
        )
    if params.n > limits.max_num_seqs:
        raise RequestError(
            "n", f"{params.n}, must be at most {limits.max_num_seqs}, the engine's max_num_seqs"
        )
    if request.priority and not limits.by_priority:
        raise RequestError("priority", "needs the scheduling_policy 'priority'")
    if not cache.ever_fits(num_prompt):
        raise RequestError("prompt", f"{num_prompt} tokens never fit into this engine's cache")
    # the last token's keys are never written
    longest = num_prompt + (params.max_tokens or room) - 1
    if not cache.ever_fits(longest):
        raise RequestError(
            "max_tokens", f"{longest + 1} tokens with the prompt never fit into this engine's cache"
        )
    params.check_token_ids(limits.vocab_size)


def _check_types(request: GenerationRequest) -> None:
    """What would break a step, or the naming of blocks, for everyone."""
    try:
        array("q", list(request.prompt_token_ids))
    except (TypeError, OverflowError):
        raise RequestError("prompt", "must hold nothing but token ids") from None
    if not isinstance(request.priority, int):
        raise RequestError("priority", "must be an integer")
    try:
        request.cache_salt.encode()
    except (AttributeError, UnicodeEncodeError):
        raise RequestError("cache_salt", "must be a text of whole characters") from None
