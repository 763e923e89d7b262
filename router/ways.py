"""What each way to serve one prompt would cost: where it is computed, where it is continued. Pure.

Every figure is in seconds that somebody waits. A prompt's own computing counts `alpha` times, since
all that comes behind it at the same worker waits for it too; a prompt that a decode worker
computes also holds up each of the sequences that run there.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from protos.cores import contend
from protos.judging import LONG_PAUSE_S
from router.ask import Ask, Source, Terms
from router.costs import exposed_s, num_steps, prefill_s, step_s, transfer_s
from router.field import Field
from router.ledger import Account
from router.prompt_queue import Prompt
from router.seats import Seat
from router.workers import CacheShape, LinkSpeed


@dataclass(frozen=True, slots=True)
class Weights:
    """What is weighed, and how. `draw`: a number from 0 to 1, so that equals are not always taken
    in the same order. `goes`: whether nothing keeps the prompt from going that way now."""

    alpha: float
    inter_token_objective_s: float | None
    shape: CacheShape
    link: LinkSpeed | None  # as a rule
    draw: Callable[[], float]
    goes: Callable[["Way"], bool]
    may_stay: bool = True  # a decode worker may compute the prompt, where prefill workers are


_IN_VAIN = 0.05  # more for what gains nothing, so that it is no tie

_AT_ONCE = LinkSpeed(float("inf"))


class Fit(IntEnum):
    """How well a decode worker could take a request, the best first."""

    GOOD = 0
    SLOW = 1  # its steps would take longer than the operator wants
    FULL = 2


class Computing(NamedTuple):
    """The prompt at one worker that may compute it. In order of cost."""

    cost_s: float
    draw: float
    account: Account
    wait_s: float
    prefill_s: float
    fetch_s: float
    num_cached: int
    source: Source | None


class Decoding(NamedTuple):
    """The answer at one decode worker. In order of fit, then of cost."""

    fit: Fit
    cost_s: float
    draw: float
    account: Account
    decode_s: float
    num_cached: int


class Way(NamedTuple):
    fit: Fit
    terms: Terms
    computing: Account
    decode: Account
    num_decode_cached: int
    step_s: float  # of a step that computes a part of the prompt, without what is the prompt's own
    spares_pause: bool = False  # so long a one that the decode worker does not compute the prompt

    def prompt(self, ask: Ask) -> Prompt:
        """In a queue, where its last step is shared with the next ones."""
        num_new = max(1, ask.num_tokens - self.terms.num_cached)
        most = self.computing.max_step_tokens
        unshared = num_steps(num_new, most) - num_new / most if most else 0.0
        return Prompt(num_new, self.terms.prefill_s - unshared * self.step_s)

    def seat(self, ask: Ask, now: float) -> Seat:
        context = ask.num_choices * (ask.num_tokens + 0.5 * ask.num_new)
        reserved = ask.num_tokens - self.num_decode_cached
        return Seat(ask.num_choices, context, reserved, now, ask.num_new)


class Ways:
    """Of one request in one field."""

    def __init__(self, ask: Ask, field: Field, weights: Weights, may_fetch: bool = True) -> None:
        self._ask = ask
        self._field = field
        self._weights = weights
        self._token_bytes = weights.shape.block_bytes / weights.shape.block_size
        self._token_s = self._token_bytes / weights.link.bytes_per_s if weights.link else 0.0
        may_fetch = may_fetch and weights.link is not None
        self._source = field.source if may_fetch else None
        self._locals: dict[Account, Way] = {}

    def computing(self) -> Iterator[Computing]:
        """At each prefill worker, whoever decodes. Written for speed, as `decoding` is: a cluster
        has dozens of either."""
        field, weights, source = self._field, self._weights, self._source
        token_bytes, usual = self._token_bytes, weights.link or _AT_ONCE
        draw, alpha, now = weights.draw, weights.alpha, field.now
        num_tokens = self._ask.num_tokens
        most_held, incarnation = 0, 0
        if source is not None:
            most_held, incarnation = source.num_tokens, source.worker.incarnation
        rest = num_tokens - most_held
        for account, num_cached in zip(field.group.prefill, field.prefill_cached, strict=True):
            costs, most = account.costs, account.max_step_tokens
            wait_s = account.prompts.left_s(now) + account.claimed_s
            own_s = prefill_s(costs, most, num_tokens - num_cached, num_cached)
            if num_cached < most_held:
                link = account.links.get(incarnation) or usual
                fetch_s = link[1] + (most_held - num_cached) * token_bytes / link[0]
                if fetch_s < own_s:
                    rest_s = prefill_s(costs, most, rest, most_held)
                    if fetch_s + rest_s < own_s:
                        cost_s = wait_s + alpha * rest_s + fetch_s
                        parts = wait_s, rest_s, fetch_s, most_held, source
                        yield Computing(cost_s, draw(), account, *parts)
                        continue
            cost_s = wait_s + alpha * own_s
            yield Computing(cost_s, draw(), account, wait_s, own_s, 0.0, num_cached, None)

    def decoding(self) -> Iterator[Decoding]:
        """At each decode worker, whoever computes the prompt."""
        field, ask, draw = self._field, self._ask, self._weights.draw
        num_tokens, num_choices, num_new = ask.num_tokens, ask.num_choices, ask.num_new
        context = num_choices * (num_tokens + 0.5 * num_new)
        token_s = self._token_s
        objective_s = self._weights.inter_token_objective_s or float("inf")
        for account, num_cached in zip(field.group.decode, field.decode_cached, strict=True):
            costs, seats = account.costs, account.seats
            # With the request in it, halfway through its answer.
            num_sequences = seats.num_sequences + num_choices
            after_s = step_s(costs, seats.num_context_tokens + context, num_sequences)
            decode_s = num_new * after_s
            cost_s = decode_s + token_s * (num_tokens - num_cached)
            if not account.has_room(num_tokens - num_cached, num_choices):
                fit = Fit.FULL
            else:
                fit = Fit.SLOW if after_s > objective_s else Fit.GOOD
            yield Decoding(fit, cost_s, draw(), account, decode_s, num_cached)

    def local_at_least_s(self, decoding: Decoding) -> float:
        """What `local` costs at least, found with less work."""
        account = decoding.account
        num_new = self._ask.num_tokens - decoding.num_cached
        num_waiting = self._weights.alpha + account.seats.num_sequences
        return decoding.decode_s + num_waiting * num_new * account.costs.prompt_token_s

    def remote(self, computing: Computing, decoding: Decoding) -> Way:
        peer, decode = computing.account, decoding.account
        hand_off_s = self._hand_off_s(computing, decoding)
        cost_s = computing.cost_s + hand_off_s + decoding.decode_s
        spares_pause = False
        if self._weights.may_stay and contend(peer.cores, decode.cores):
            here_s = self.local(decoding).terms.cost_s
            contended_s = self._contended_s(computing, decoding, here_s) + hand_off_s
            spares_pause = contended_s < here_s
            cost_s = max(cost_s, contended_s)
        terms = Terms(
            decode.worker,
            peer.worker,
            cost_s,
            computing.wait_s,
            computing.prefill_s,
            computing.fetch_s,
            hand_off_s,
            decoding.decode_s,
            computing.num_cached,
            computing.source,
        )
        step_s = peer.costs.step_s
        return Way(decoding.fit, terms, peer, decode, decoding.num_cached, step_s, spares_pause)

    def local(self, decoding: Decoding) -> Way:
        """Each is found once: pairs are compared with it, too."""
        way = self._locals.get(decoding.account)
        if way is None:
            way = self._locals[decoding.account] = self._find_local(decoding)
        return way

    def _find_local(self, decoding: Decoding) -> Way:
        """Every step that computes a part of the prompt makes a token of each sequence that runs,
        only later: by the prompt's share of it."""
        account, num_cached = decoding.account, decoding.num_cached
        costs, most = account.costs, account.max_step_tokens
        num_new = self._ask.num_tokens - num_cached
        alone_s = prefill_s(costs, most, num_new, num_cached)
        steps = num_steps(num_new, most)
        share_s = alone_s - steps * costs.step_s
        seats = account.seats
        mixed_s = steps * step_s(costs, seats.num_context_tokens, seats.num_sequences)
        whole_s = share_s + mixed_s
        wait_s = account.wait_s(self._field.now)
        held_up_s = seats.num_sequences * share_s
        cost_s = wait_s + self._weights.alpha * whole_s + held_up_s + decoding.decode_s
        terms = Terms(
            account.worker, None, cost_s, wait_s, whole_s, 0.0, 0.0, decoding.decode_s, num_cached
        )
        fit = max(decoding.fit, self._fit_of_mixed(account, mixed_s / steps, share_s / steps))
        return Way(fit, terms, account, account, num_cached, mixed_s / steps)

    def _contended_s(self, computing: Computing, decoding: Decoding, here_s: float) -> float:
        """On the same cores nothing is computed sooner there than here, and nothing here that does
        not make those later who wait there. All that is gained is that those who run slow down,
        instead of making a long pause."""
        pause_s = computing.prefill_s
        excess = max(0.0, pause_s / LONG_PAUSE_S - 1)  # a second counts more the longer it is
        gain_s = decoding.account.seats.num_sequences * pause_s * excess
        return computing.wait_s + (1 + _IN_VAIN) * here_s - gain_s

    def _hand_off_s(self, computing: Computing, decoding: Decoding) -> float:
        peer, most = computing.account, computing.account.max_step_tokens
        link = decoding.account.links.get(peer.worker.incarnation, self._weights.link)
        num_tokens = self._ask.num_tokens
        whole_s = transfer_s(link, (num_tokens - decoding.num_cached) * self._token_bytes)
        steps = num_steps(num_tokens - computing.num_cached, most)
        return exposed_s(whole_s, computing.prefill_s, steps)

    def _fit_of_mixed(self, account: Account, decoding_s: float, prompt_s: float) -> Fit:
        objective_s = self._weights.inter_token_objective_s
        if objective_s is None or not account.seats.num_sequences:
            return Fit.GOOD
        return Fit.SLOW if decoding_s + prompt_s > objective_s else Fit.GOOD
