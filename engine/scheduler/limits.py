"""What the scheduler may hand out, and which requests can never be served with it."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import RequestError
from engine.request import GenerationRequest, RemotePrefix
from kv_cache.cache import KvCache


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The knobs of `EngineConfig` that bound a step, with what the model adds."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_pause_s: float
    max_model_len: int
    max_num_queued_reqs: int
    by_priority: bool
    prefix_caching: bool
    vocab_size: int
    eos_token_ids: frozenset[int]
    fingerprint: str
    max_overtake_s: float | None = None  # the shortest prompt first; None: by arrival


def check_request(request: GenerationRequest, limits: SchedulerLimits, cache: KvCache) -> None:
    """RequestError for what can never run here, however long it waits."""
    if not isinstance(request.priority, int):
        raise RequestError("priority", "must be an integer")
    if request.priority and not limits.by_priority:
        raise RequestError("priority", "needs the scheduling_policy 'priority'")
    check_prompt(request.prompt_token_ids, request.cache_salt, limits)
    if not cache.ever_fits(len(request.prompt_token_ids)):
        num_prompt = len(request.prompt_token_ids)
        raise RequestError("prompt", f"{num_prompt} tokens never fit into this engine's cache")
    request.params.check_token_ids(limits.vocab_size)
    if request.prefix is not None:
        _check_prefix(request.prefix, len(request.prompt_token_ids), cache.block_size)
    if request.hand_over is None:
        _check_answer(request, limits, cache)
    else:
        _check_hand_over(request, limits, cache.block_size)


def check_prompt(token_ids: Sequence[int], cache_salt: str, limits: SchedulerLimits) -> None:
    """Anything else would break a step, or the naming of blocks, for everyone."""
    try:
        array("q", list(token_ids))
    except (TypeError, OverflowError):
        raise RequestError("prompt", "must hold nothing but token ids") from None
    try:
        cache_salt.encode()
    except (AttributeError, UnicodeEncodeError):
        raise RequestError("cache_salt", "must be a text of whole characters") from None
    num_prompt = len(token_ids)
    if num_prompt == 0:
        raise RequestError("prompt", "must have at least one token")
    _check_vocabulary("prompt", token_ids, limits)
    if num_prompt >= limits.max_model_len:
        raise RequestError(
            "prompt", f"{num_prompt} tokens, must be at most {limits.max_model_len - 1}"
        )


def check_first_token(first_token: int, num_prompt: int, block_size: int) -> None:
    """Of a range that is handed over."""
    if not isinstance(first_token, int) or first_token % block_size:
        raise RequestError("first_token", f"{first_token!r}, must be a multiple of {block_size}")
    if not 0 <= first_token < num_prompt:
        raise RequestError(
            "first_token", f"{first_token}, must be one of the prompt's {num_prompt} tokens"
        )


def _check_vocabulary(field: str, token_ids: Sequence[int], limits: SchedulerLimits) -> None:
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= limits.vocab_size:
        wrong = low if low < 0 else high
        raise RequestError(field, f"token {wrong}, must be in 0..{limits.vocab_size - 1}")


def _check_answer(request: GenerationRequest, limits: SchedulerLimits, cache: KvCache) -> None:
    """What is generated after the prompt."""
    params, num_prompt = request.params, len(request.prompt_token_ids)
    room = limits.max_model_len - num_prompt
    if params.max_tokens is not None and params.max_tokens > room:
        raise RequestError(
            "max_tokens",
            f"{params.max_tokens} after a prompt of {num_prompt} tokens, must be at most {room}",
        )
    _check_n(params.n, limits)
    # the last token's keys are never written
    longest = num_prompt + (params.max_tokens or room) - 1
    if not cache.ever_fits(longest):
        raise RequestError(
            "max_tokens", f"{longest + 1} tokens with the prompt never fit into this engine's cache"
        )
    above = request.fetch_above
    if above is not None and (not isinstance(above, int) or above < 0):
        raise RequestError("fetch_above", f"{above!r}, must be an integer, at least 0")
    if request.sent:
        _check_sent(request, params.max_tokens or room, limits)


def _check_sent(request: GenerationRequest, max_tokens: int, limits: SchedulerLimits) -> None:
    """A choice that has ended is not gone on with, so one that could not go on is an error."""
    n = request.params.n
    if len(request.sent) != n:
        raise RequestError("sent", f"{len(request.sent)} choices, must be n, {n}")
    open_choices = [c.token_ids for c in request.sent if not c.finished]
    if not open_choices:
        raise RequestError("sent", "all choices have finished, must leave one to go on with")
    for token_ids in open_choices:
        try:
            array("q", list(token_ids))
        except (TypeError, OverflowError):
            raise RequestError("sent", "must hold nothing but token ids") from None
        if len(token_ids) >= max_tokens:
            raise RequestError(
                "sent",
                f"{len(token_ids)} tokens of a choice that has not finished,"
                f" must be fewer than the {max_tokens} it may have",
            )
        if token_ids:
            _check_vocabulary("sent", token_ids, limits)


def _check_hand_over(request: GenerationRequest, limits: SchedulerLimits, block_size: int) -> None:
    assert request.hand_over is not None
    check_first_token(request.hand_over.first_token, len(request.prompt_token_ids), block_size)
    if request.hand_over.draw:
        _check_n(request.params.n, limits)
    for field, value in (("fetch_above", request.fetch_above), ("sent", request.sent or None)):
        if value is not None:
            raise RequestError(field, "does not go with a prompt that is handed over")


def _check_prefix(prefix: RemotePrefix, num_prompt: int, block_size: int) -> None:
    num_tokens, above = prefix
    if not isinstance(num_tokens, int) or num_tokens % block_size:
        raise RequestError("prefix", f"{num_tokens!r} tokens, must be a multiple of {block_size}")
    if not 0 < num_tokens <= num_prompt:
        raise RequestError("prefix", f"{num_tokens} tokens, the prompt has {num_prompt}")
    if not isinstance(above, int) or above < 0:
        raise RequestError("prefix", f"above {above!r}, must be an integer, at least 0")


def _check_n(n: int, limits: SchedulerLimits) -> None:
    if n > limits.max_num_seqs:
        raise RequestError(
            "n", f"{n}, must be at most {limits.max_num_seqs}, the engine's max_num_seqs"
        )
