"""Where a request would go now, and what it would have to wait for there. Pure."""

from collections.abc import Callable

from router.ask import Ask
from router.config import RouterConfig
from router.costs import full_step_s
from router.field import Fields
from router.ledger import Ledger
from router.pairing import Choice
from router.policies import POLICIES
from router.prefix_index import PrefixIndex
from router.waiting import Lack
from router.ways import Way, Weights
from router.workers import CacheShape

# Of the inter-token objective; half of the answers would else take a little longer than that.
AIMED = 0.9
# No bytes to move, no blocks to find.
UNKNOWN_SHAPE = CacheShape(block_size=1, block_bytes=0)


class Chooser:
    """Asks the policy, and sees whether the workers that it chose have time and room. Keeps nothing
    of a request: whether it waits is the router's to say."""

    def __init__(
        self, config: RouterConfig, ledger: Ledger, index: PrefixIndex, draw: Callable[[], float]
    ) -> None:
        self.config = config
        self.fields = Fields(ledger, index, config.may_stay)
        self.policy = POLICIES[config.policy]()
        self.shape: CacheShape | None = None  # None: not known yet
        self._ledger = ledger
        self._draw = draw

    def choose(self, ask: Ask, now: float) -> Choice | None:
        """None where nobody takes anything."""
        choice = self._best(ask, now)
        if choice is not None and not choice.takes_new(now):
            self.fields.changed()  # a standing says so that was written to directly
            choice = self._best(ask, now)
        return choice

    def _best(self, ask: Ask, now: float) -> Choice | None:
        weights = Weights(
            self.config.alpha,
            self.config.inter_token_objective_s,
            self.shape or UNKNOWN_SHAPE,
            self._ledger.measured.link,
            self._draw,
            lambda way: self.lack(way, ask, now) is None,
            self.config.may_stay and ask.may_stay,
        )
        fields = self.fields.of(ask, weights.shape.block_size, now)
        choices = [self.policy.choose(ask, field, weights) for field in fields]
        return min(choices, key=lambda choice: choice.way.terms.cost_s, default=None)

    def lack(self, way: Way, ask: Ask, now: float) -> Lack | None:
        """What it has to wait for, if for anything: while its worker has enough to do, what is
        known of all of them gets better."""
        most = self.config.max_backlog_steps
        if most is None or not self.policy.rebinds:
            return None
        computing = way.computing
        step_s = full_step_s(computing.costs, computing.max_step_tokens)
        if computing.max_step_tokens and computing.prompts.left_s(now) > most * step_s:
            return Lack.DECODE_TIME if computing is way.decode else Lack.PREFILL_TIME
        return None if self.num_places(way, ask) else Lack.ROOM

    def num_places(self, way: Way, ask: Ask) -> float:
        """How many like it its decode worker could take now: none until somebody there ends, or if
        all others became too slow. Who would be too slow by itself, or has no others, is taken."""
        account, seats = way.decode, way.decode.seats
        num_tokens = ask.num_tokens - way.num_decode_cached
        if account.will_have_room(num_tokens, ask.num_choices):
            return 0.0
        num = max(1.0, account.num_places(num_tokens, ask.num_choices))
        if self.config.inter_token_objective_s is None or not seats.num_sequences:
            return num
        objective_s = AIMED * self.config.inter_token_objective_s
        own = way.seat(ask, 0.0)
        if account.step_s(own.num_context_tokens, own.num_sequences) > objective_s:
            return num
        now_s = account.step_s(seats.num_context_tokens, seats.num_sequences)
        context = seats.num_context_tokens + own.num_context_tokens
        more_s = account.step_s(context, seats.num_sequences + own.num_sequences) - now_s
        left_s = objective_s / seats.pace.slowness - now_s
        if left_s < more_s:
            return 0.0
        return max(1.0, min(num, left_s / more_s)) if more_s > 0 else num
