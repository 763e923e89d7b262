"""Where requests go, and when. Pure; used on one thread.

```
submit ──> waiting room ──dispatch──> placed ──began──> prompt computed ──ended──> forgotten
  └─ Refused     └─ withdraw, expired
```
"""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from random import Random

from router.admission import Refused
from router.ask import Ask, Placement
from router.backlog import Backlog, Guesses
from router.choosing import Chooser
from router.config import RouterConfig
from router.decisions import Decision as Decision
from router.decisions import RouterStats
from router.entrance import Admitted, Entrance
from router.foresight import Foresight
from router.ledger import Account, Ledger
from router.pairing import Choice
from router.prefix_index import PrefixIndex
from router.waiting import Waiting, WaitingRoom
from router.workers import CacheShape, Leg, Load, Standing, Worker

# Until a worker's events confirm what was predicted of it.
PREDICTED_S = 5.0
# A dispatch looks at so many requests, and chooses anew for so many that then have to wait.
MOST_LOOKED_AT = 16
MOST_HELD_ANEW = 8
# Before somebody who came later goes, so many of those that wait may say that they would.
MOST_ASKED_AGAIN = 2
# Not counting those that some worker has refused, up to so many.
MOST_PASSED = 256
# A request that waits for a worker is chosen for again so often at least: others may be free.
LOOK_AGAIN_S = 0.25
# With more that wait than these, there is a look at them so often at most.
FEW_WAITING = 16
LOOK_S = 0.01
NUM_DECISIONS = 256


class Router:
    """Requests from their coming to their end. Where one would go is the chooser's to say, and
    whether it may wait the entrance's."""

    def __init__(self, config: RouterConfig, random: Random) -> None:
        self.config = config
        self.index = PrefixIndex()
        self.stats = RouterStats()
        self.decisions: deque[Decision] = deque(maxlen=NUM_DECISIONS)  # the last ones
        self._ledger = Ledger()
        self._chooser = Chooser(config, self._ledger, self.index, random.random)
        self._room = WaitingRoom(config.overdue_s)
        self._arriving: dict[str, tuple[Worker, Sequence[int]]] = {}  # at a decode worker
        self._expired: list[Ask] = []
        self._guesses = Guesses()
        self._held: list[Waiting] = []  # by the last dispatch that looked
        objective_s = config.ttft_objective_s
        self.foresight = None if objective_s is None else Foresight(objective_s)
        self._entrance = Entrance(config, self._ledger, self._room, self._chooser, self.foresight)
        self._num_changes = 0
        self._looked_at = float("-inf")

    def set_shape(self, shape: CacheShape) -> None:
        """Of what the workers cache; until it is known, nothing is."""
        self._chooser.shape = shape
        self.index.set_shape(shape)

    # Who exists.

    def add(self, leg: Leg, worker: Worker) -> Standing:
        """One that has left may come back."""
        self._changed()
        standing = self._ledger.add(leg, worker).standing
        standing.leaving = False
        return standing

    def leave(self, leg: Leg, worker: Worker) -> None:
        """It takes nothing new; what it has goes on."""
        account = self._ledger.accounts[leg].get(worker)
        if account is not None:
            account.standing.leaving = True
            self._changed()

    def accounts(self, leg: Leg) -> Collection[Account]:
        """To look at."""
        return self._ledger.accounts[leg].values()

    def usable(self, leg: Leg, now: float) -> Iterator[Worker]:
        """One at a time: of a thousand, whoever asks whether there is any looks at one."""
        accounts = self._ledger.accounts[leg].values()
        return (account.worker for account in accounts if account.takes_new(now))

    def stuck(self, leg: Leg, after_s: float) -> list[Worker]:
        """Who answers, has work, and has made no step for so long, nor for what its steps take."""
        accounts = self._ledger.accounts[leg].values()
        return [one.worker for one in accounts if one.still_s > max(after_s, one.stall_s)]

    def reach(self, leg: Leg, worker: Worker, reachable: bool) -> None:
        """Whether what is sent to it arrives, as far as its streams tell."""
        account = self._ledger.accounts[leg].get(worker)
        if account is not None and account.standing.reachable != reachable:
            account.standing.reachable = reachable
            self._changed()

    def remove(self, leg: Leg, worker: Worker) -> None:
        self._ledger.remove(leg, worker)
        self.index.remove(worker)
        self._changed()

    def note(self, leg: Leg, worker: Worker, load: Load) -> None:
        account = self._ledger.accounts[leg].get(worker)
        if account is None:
            return
        could = account.takes_new(load.at)
        self._ledger.note(leg, worker, load)
        self._num_changes += 1
        if account.takes_new(load.at) != could:
            self._chooser.fields.changed()

    # Requests.

    @property
    def num_waiting(self) -> int:
        return len(self._room)

    @property
    def num_under_way(self) -> int:
        return len(self._ledger)

    def backlog(self, now: float) -> Backlog:
        """What waits, as it was found by the last dispatch."""
        held = [one for one in self._held if one in self._room]
        seen = [one for one in held if one.choice and one.choice.takes_new(now)]
        guessed_s = self._room.sums.guessed_s
        work_s = self._room.work_s + (self._guesses.factor - 1) * guessed_s
        accounts = self._ledger.accounts[Leg.DECODE].values()
        decode = [account for account in accounts if account.takes_new(now)]
        return Backlog.of(seen, self._room.sums, max(0.0, work_s), decode)

    def check_open(self, tenant: str, priority: int, now: float) -> None:
        """Refused is raised where the tenant's shortest prompt would be, with the soonest priority
        that it may have: others need not be read."""
        self._admit(Ask("", 1, num_new=1, tenant=tenant, priority=priority), now)

    def submit(self, ask: Ask, now: float) -> None:
        """It waits from now on, or else Refused is raised."""
        admitted = self._admit(ask, now)
        self.stats.num_submitted += 1
        latest = now + self.config.max_wait_s
        deadline = latest if ask.deadline is None else min(latest, ask.deadline)
        waiting = self._room.add(ask, deadline, admitted.size_s, now)
        if admitted.choice is not None:
            self._keep(waiting, admitted.choice, now)
        if self.foresight is not None and admitted.predicted_s is not None:
            self.foresight.expect(ask.request_id, admitted.predicted_s, now)

    def withdraw(self, request_id: str, now: float) -> None:
        self._room.remove(request_id)
        if self.foresight is not None:
            self.foresight.forget(request_id)

    def dispatch(self, now: float) -> list[tuple[Ask, Placement]]:
        """What goes now, in order. Who waits for one worker does not hold up who is behind it and
        goes to another; but it counts there as if it were queued, and may go there itself."""
        self._expire(now)
        placed: list[tuple[Ask, Placement]] = []
        if not self._is_worth_a_look(now):
            return placed
        while len(self._room):
            some = self._look(now)
            placed += some
            if self._held or not some:
                break
        return placed

    def _look(self, now: float) -> list[tuple[Ask, Placement]]:
        """At the first ones."""
        placed: list[tuple[Ask, Placement]] = []
        claimed: list[Account] = []
        self._held = []
        num_anew = 0
        line = deque(self._first(now))
        while line:
            waiting = line.popleft()
            num_changes = waiting.look_number
            choice = self._choice(waiting, now)
            if choice is None:
                continue
            if waiting.lack is not None:
                self._claim(waiting, now)
                claimed += choice.way.computing, choice.way.decode
                self._held.append(waiting)
                num_anew += waiting.look_number != num_changes and not waiting.ask.without
                if num_anew >= MOST_HELD_ANEW:
                    break
            elif sooner := self._would_go(now):
                before, choice = sooner
                placed.append((before.ask, self._place(before, choice, now)))
                self._held.remove(before)
                for account in claimed:
                    account.forget_claims()
                for held in self._held:
                    self._claim(held, now)
                line.appendleft(waiting)
            else:
                placed.append((waiting.ask, self._place(waiting, choice, now)))
        for account in claimed:
            account.forget_claims()
        return placed

    def take_expired(self) -> list[Ask]:
        """Those whose deadline has passed while they waited, each told once."""
        expired, self._expired = self._expired, []
        return expired

    def began(self, request_id: str, now: float) -> None:
        self._num_changes += 1
        self._ledger.began(request_id, now)
        if self.foresight is not None:
            self.foresight.came(request_id, now)
        arrived = self._arriving.pop(request_id, None)
        if arrived is not None and arrived[0] in self._ledger.accounts[Leg.DECODE]:
            self._predict(*arrived, now)

    def ended(self, request_id: str, now: float) -> None:
        self._num_changes += 1
        self._ledger.ended(request_id, now)
        if self.foresight is not None:
            self.foresight.forget(request_id)
        self._arriving.pop(request_id, None)

    def _first(self, now: float) -> list[Waiting]:
        """Whom a worker has refused waits for the others, before all that may go to that one."""
        first: list[Waiting] = []
        num_free = 0
        for waiting in islice(self._room.in_order(now), MOST_PASSED):
            first.append(waiting)
            num_free += not waiting.ask.without
            if num_free == MOST_LOOKED_AT:
                break
        return first

    def _would_go(self, now: float) -> tuple[Waiting, Choice] | None:
        """One of the first that are held, if it would go where it is free were it the last in its
        line: or else who comes later would pass all that wait, on the way to another worker."""
        for held in self._held[:MOST_ASKED_AGAIN]:
            choice = self._chooser.choose(held.ask, now)
            if choice is not None and self._chooser.lack(choice.way, held.ask, now) is None:
                self._keep(held, choice, now)
                return held, choice
        return None

    def _claim(self, waiting: Waiting, now: float) -> None:
        """What comes after it in this round sees it as if it were there. A long prompt, or one with
        many choices, that has waited too long for room keeps it from the others that would fit."""
        ask = waiting.ask
        assert waiting.choice is not None
        way = waiting.choice.way
        way.computing.claimed_s += way.prompt(ask).seconds
        num_tokens = ask.num_tokens - way.num_decode_cached
        overdue = self._room.is_overdue(waiting, now)
        if overdue and not way.decode.has_room(num_tokens, ask.num_choices):
            way.decode.claimed_tokens += num_tokens
            way.decode.claimed_sequences += ask.num_choices

    def _is_worth_a_look(self, now: float) -> bool:
        """With many that wait, every worker has enough to do for longer than the next look is
        put off."""
        if len(self._room) > FEW_WAITING and 0 <= now - self._looked_at < LOOK_S:
            return False
        self._looked_at = now
        return len(self._room) > 0

    def _admit(self, ask: Ask, now: float) -> Admitted:
        try:
            return self._entrance.look_at(ask, now, self._held)
        except Refused as refused:
            self.stats.num_submitted += 1
            self.stats.refused[refused.reason] += 1
            raise

    def _choice(self, waiting: Waiting, now: float) -> Choice | None:
        """The one that was made, as long as nothing speaks for another; and what it lacks now."""
        before = waiting.choice
        if before is not None and before.takes_new(now):
            waiting.lack = self._chooser.lack(before.way, waiting.ask, now)
            if waiting.look_number == self._num_changes and waiting.looked_at == now:
                return before
            if waiting.lack is not None and now - waiting.looked_at < LOOK_AGAIN_S:
                return before
        else:
            before = None
        choice = self._chooser.choose(waiting.ask, now)
        if choice is not None:
            lack = self._chooser.lack(choice.way, waiting.ask, now)
            if before is not None and lack is not None and self._room.is_overdue(waiting, now):
                choice = before  # whose worker is kept free for it
            else:
                waiting.lack = lack
            self._keep(waiting, choice, now)
        return choice

    def _keep(self, waiting: Waiting, choice: Choice, now: float) -> None:
        prompt = choice.way.prompt(waiting.ask)
        if waiting.is_guess:
            self._guesses.note(waiting.size_s, prompt.seconds)
        waiting.choice = choice
        waiting.looked_at = now
        waiting.look_number = self._num_changes
        self._room.resize(waiting, prompt.seconds, prompt.num_tokens)

    def _place(self, waiting: Waiting, choice: Choice, now: float) -> Placement:
        ask, way = waiting.ask, choice.way
        self._num_changes += 1
        self._chooser.policy.note_placed()
        self._room.give(ask.request_id)
        seat, prompt = way.seat(ask, now), way.prompt(ask)
        self._ledger.give(ask.request_id, way.decode, seat, way.computing, prompt)
        self._predict(way.computing.worker, ask.keys, now + way.terms.first_token_s)
        if way.computing is not way.decode:
            self._arriving[ask.request_id] = (way.decode.worker, ask.keys)
        placement = choice.placement
        self.stats.placed[placement.reason] += 1
        waited_s = now - waiting.arrived
        facts = (ask.request_id, ask.num_tokens, ask.tenant, ask.priority, waited_s)
        self.decisions.append(Decision(now, *facts, placement))
        return placement

    def _predict(self, worker: Worker, keys: Sequence[int], at: float) -> None:
        """A burst of siblings lands together, since the first one leads the way."""
        if keys and self._chooser.shape is not None:
            self.index.of(worker).predict(keys, at + PREDICTED_S)

    def _expire(self, now: float) -> None:
        expired = self._room.expired(now)
        self.stats.num_expired += len(expired)
        if self.foresight is not None:
            for ask in expired:
                self.foresight.forget(ask.request_id)
        self._expired += expired

    def _changed(self) -> None:
        self._num_changes += 1
        self._chooser.fields.changed()
