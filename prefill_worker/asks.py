"""What is asked of a holder for a reservation, and what its answer must be."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import RequestError
from engine.handoff import Delivered, FirstToken, Reservation
from engine.request import GenerationRequest, PromptTimes
from engine.sampling import SamplingParams
from engine.step import TokenLogprobs
from engine.wire.logprobs import decode_logprobs
from engine.wire.params import encode_params
from engine.wire.reading import checked_seconds
from kv_transfer.errors import TransferError
from kv_transfer.puller import Pulled
from prefill_worker.named_workers import MAX_NAMED, PrefixSource, encode_sources
from protos import generation_pb2
from protos import handoff_pb2 as wire
from protos.handoff_pb2 import Ask, Compute
from protos.rpc import PROTOCOL

HIGHEST_LOGPROB = 0.01  # 0, and what rounding adds


@dataclass(frozen=True, slots=True)
class Parties:
    """The incarnations of both ends, and where the puller can be asked itself, if anywhere."""

    holder: int
    puller: int
    puller_address: str | None = None


def ask_for_prompt(
    reservation: Reservation,
    request: GenerationRequest,
    parties: Parties,
    left_s: float | None,
    sources: Sequence[PrefixSource],
) -> Ask:
    """All that is missing, computed where neither the holder has it nor anyone whom it may
    pull it from."""
    ask = _make(reservation, request, parties, len(reservation.token_ids))
    compute = Compute(
        params=encode_params(reservation.params),
        priority=request.priority,
        deadline_ms=0 if left_s is None else max(1, int(left_s * 1e3)),
        draw=reservation.draw,
        sources=encode_sources(_with_puller(sources, reservation, parties)),
    )
    ask.compute.CopyFrom(compute)
    return ask


def _with_puller(
    sources: Sequence[PrefixSource], reservation: Reservation, parties: Parties
) -> Sequence[PrefixSource]:
    """The puller is a source too if it has more than the others, and knows best how much."""
    others = [source for source in sources if source.incarnation != parties.puller]
    num_tokens = reservation.held.start
    most = max((source.num_tokens for source in others), default=0)
    if parties.puller_address is None or num_tokens <= most:
        return others
    own = PrefixSource(parties.puller_address, parties.puller, num_tokens)
    return [own, *others][:MAX_NAMED]


def ask_for_prefix(reservation: Reservation, request: GenerationRequest, parties: Parties) -> Ask:
    """With the token after it, if there is one: so the holder's windows are seen from there."""
    return _make(reservation, request, parties, reservation.held.end + 1)


def _make(
    reservation: Reservation, request: GenerationRequest, parties: Parties, num_tokens: int
) -> Ask:
    return Ask(
        protocol=PROTOCOL,
        handoff_id=f"{request.request_id}/{reservation.attempt}",
        holder_incarnation=parties.holder,
        puller_incarnation=parties.puller,
        token_ids=reservation.token_ids[:num_tokens],
        cache_salt=request.cache_salt,
        first_token=reservation.held.start,
    )


def read_prompt(pulled: Pulled, reservation: Reservation, vocab_size: int) -> Delivered:
    """What came beside the blocks, checked: it comes from a peer."""
    tokens, prompt_logprobs = pulled.tokens, pulled.prompt_logprobs
    params = reservation.params
    wanted = params.n if reservation.draw else 0
    if len(tokens) not in (0, wanted):
        raise TransferError(f"the holder drew {len(tokens)} first tokens, {wanted} were wanted")
    if pulled.num_cached_tokens > len(reservation.token_ids):
        raise TransferError(f"{pulled.num_cached_tokens} tokens of the prompt cannot be cached")
    wanted = 0 if params.prompt_logprobs is None else len(reservation.token_ids) - 1
    if len(prompt_logprobs) != wanted:
        raise TransferError(f"{len(prompt_logprobs)} prompt logprobs came, {wanted} were wanted")
    try:
        return Delivered(
            tuple(_first_token(token, params, vocab_size) for token in tokens),
            _logprobs(prompt_logprobs, "prompt_logprobs", vocab_size),
            num_cached_tokens=pulled.num_cached_tokens,
            times=PromptTimes(checked_seconds(pulled.queued_s), checked_seconds(pulled.prefill_s)),
        )
    except RequestError as error:
        raise TransferError(f"the holder's answer makes no sense: {error}") from None


def read_prefix(pulled: Pulled, reservation: Reservation) -> Delivered:
    """Blocks alone count; maybe fewer than were promised."""
    if pulled.end == reservation.held.start:
        raise TransferError("the holder has nothing of the prefix any more")
    return Delivered(end=pulled.end)


def _first_token(token: wire.FirstToken, params: SamplingParams, vocab_size: int) -> FirstToken:
    if token.token_id >= vocab_size:
        raise RequestError("token_id", f"{token.token_id}, must be below {vocab_size}")
    if token.HasField("logprobs") != (params.logprobs is not None):
        raise RequestError("logprobs", "came without being asked for, or did not come")
    if not token.HasField("logprobs"):
        return FirstToken(token.token_id, None)
    (logprobs,) = _logprobs([token.logprobs], "logprobs", vocab_size)
    assert params.logprobs is not None
    if logprobs.token_id != token.token_id or len(logprobs.top) > params.logprobs:
        raise RequestError("logprobs", "are of another token, or more than were asked for")
    return FirstToken(token.token_id, logprobs)


def _logprobs(
    messages: Sequence[generation_pb2.TokenLogprobs], field: str, vocab_size: int
) -> list[TokenLogprobs]:
    """No answer can say one that is not a number."""
    entries = decode_logprobs(messages, field, vocab_size)
    for entry in entries:
        for value in (entry.logprob, *(value for _, value in entry.top)):
            if not value < HIGHEST_LOGPROB:
                raise RequestError(field, f"{value} is the logarithm of no probability")
    return entries
