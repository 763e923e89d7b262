"""Reservations whose blocks something else fills, and what becomes of their holds."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import count

from engine.handoff import Delivered, Quarantined, Reservation, UnfinishedReads
from engine.scheduler.sequence import Sequence, SequenceState
from kv_cache.handover import HeldRange
from kv_cache.transfers import TransferHold, TransferHolds


class Fetches:
    """Which sequence each open reservation is for; it outlives the sequence.

    begin -> end, once for each reservation, whatever happened to its request between them.
    """

    def __init__(self, transfers: TransferHolds) -> None:
        self._transfers = transfers
        self._attempts = count(1)
        self._open: dict[int, Sequence] = {}

    def begin(self, sequence: Sequence, held: HeldRange, of_prefix: bool) -> Reservation:
        request, params = sequence.request, sequence.params
        wanted = params.prompt_logprobs if request.wants_prompt_logprobs else None
        reservation = Reservation(
            request.source.request_id,
            next(self._attempts),
            tuple(sequence.tokens),
            held,
            replace(
                params,
                seed=request.seed,
                prompt_logprobs=wanted,
                grammar=None,
                reasoning=None,
                exits=(),
                entries=(),
            ),
            # what was sent counts as generated, which the other side takes for prompt; a grammar
            # is compiled here alone, and no first token must fit it where it is entered later
            draw=not request.has_sent and (params.grammar is None or bool(params.entries)),
            of_prefix=of_prefix,
        )
        self._open[reservation.attempt] = sequence
        return reservation

    def end(
        self, reservation: Reservation, unfinished: Iterable[UnfinishedReads]
    ) -> tuple[Sequence | None, Quarantined]:
        """The sequence if it still waits for it; and the holds of what may still be written."""
        assert reservation.attempt in self._open, "a reservation ends once"
        sequence = self._open.pop(reservation.attempt)
        stuck = tuple([self._hold_again(reservation, reads) for reads in unfinished])
        for hold in reservation.held.holds:
            self._transfers.drop(hold)
        for hold in stuck:
            self._transfers.quarantine(hold)
        return (sequence if sequence.state is SequenceState.FETCHING else None), stuck

    def _hold_again(self, reservation: Reservation, reads: UnfinishedReads) -> TransferHold:
        """Only some of its blocks are stuck, so they get a hold of their own."""
        reserved = {b for r in reservation.held.runs if r.group == reads.group for b in r.blocks}
        assert reserved.issuperset(reads.blocks), "a read into blocks that were not reserved"
        return self._transfers.hold(reads.group, reads.blocks)

    @property
    def waiting(self) -> set[Sequence]:
        """Those whose blocks are to be filled."""
        return {s for s in self._open.values() if s.state is SequenceState.FETCHING}


def find_problem(
    sequence: Sequence, reservation: Reservation, delivered: Delivered, vocab_size: int
) -> str | None:
    """Why what the other side computed cannot be the answer to what it was asked."""
    request, params, held = sequence.request, sequence.params, reservation.held
    tokens, end = delivered.first_tokens, delivered.end_of(reservation)
    if not (held.start if reservation.of_prefix else held.end) <= end <= held.end:
        return f"the tokens up to {end} came, those from {held.start} to {held.end} were wanted"
    if tokens:
        if reservation.of_prefix:
            return "first tokens came with a prefix"
        if not reservation.draw:
            return "first tokens came that are to be drawn here"
        if len(tokens) != params.n:
            return f"{len(tokens)} first tokens came for {params.n} choices"
        if any(not 0 <= token.token_id < vocab_size for token in tokens):
            return "a first token is not in the vocabulary"
        if any((token.logprobs is None) != (params.logprobs is None) for token in tokens):
            return "a first token came without its logprobs, or with some nobody asked for"
    wanted = request.num_prompt - 1 if request.wants_prompt_logprobs else 0
    if len(delivered.prompt_logprobs) != wanted:
        return f"{len(delivered.prompt_logprobs)} prompt logprobs came, not {wanted}"
    return None
