"""What each worker was given and has not finished, and what it says of itself. Pure.

What we gave is known exactly, and is counted until its first token comes, it ends, or its worker
is gone; never less because of its age. What others gave shows in the load reports. The larger of
the two counts, since what we gave is about to show there too.
"""

from collections.abc import Mapping
from typing import NamedTuple

from protos.cores import Cores
from protos.judging import overdue_s
from router.costs import Measured, full_step_s, prompt_token_s, step_s
from router.prompt_queue import Prompt, PromptQueue
from router.seats import Seat, Seats
from router.workers import Leg, LinkSpeed, Load, Standing, StepCosts, Worker

STALL_S = 2.0  # with work, and without a step; where no step takes as long
FIRST_STALL_S = 10.0  # of a worker that has made none
HEADROOM = 0.05  # of a worker's tokens


class Limits(NamedTuple):
    """Of a decode worker. `headroom`: tokens that are left for the growth of what runs there."""

    max_sequences: float = float("inf")
    headroom: float = 0.0


class Account:
    """One worker of one leg, as every choice looks at it."""

    __slots__ = (
        "claimed_s",
        "claimed_sequences",
        "claimed_tokens",
        "cores",
        "costs",
        "leg",
        "limits",
        "links",
        "max_model_len",
        "max_step_tokens",
        "prompts",
        "seats",
        "standing",
        "still_s",
        "worker",
        "_is_still",
        "_num_steps",
    )

    def __init__(self, leg: Leg, worker: Worker, costs: StepCosts) -> None:
        self.leg = leg
        self.worker = worker
        self.standing = Standing(worker)
        self.costs = costs
        self.cores: Cores | None = None
        self.max_step_tokens = 0
        self.max_model_len = float("inf")
        self.limits = Limits()
        self.links: Mapping[int, LinkSpeed] = {}  # from peers, by incarnation
        self.prompts = PromptQueue()
        self.seats = Seats()
        self.claimed_s = 0.0  # by requests that wait at the router for this worker
        # By those of them that have waited too long for its room.
        self.claimed_sequences = 0
        self.claimed_tokens = 0
        self._num_steps = -1
        self.still_s = 0.0  # with work and without a step, as of the last report
        self._is_still = False  # for too long

    def note(self, load: Load, costs: StepCosts) -> None:
        self.standing.load = load
        self.costs = costs
        self.cores = load.cores
        self.max_step_tokens = load.max_step_tokens
        self.max_model_len = load.max_model_len or float("inf")
        self.links = {peer: link for peer, link in load.links.items() if link.bytes_per_s > 0}
        self.limits = Limits(load.max_sequences or float("inf"), HEADROOM * load.num_total_tokens)
        token_s = prompt_token_s(costs, load.max_step_tokens)
        self.prompts.report(load.num_queued_tokens, token_s, load.at)
        self.seats.report(load, self.step_s(load.num_context_tokens, load.num_running))
        self._num_steps = load.num_steps
        # The worker's own word: it alone knows whether its work waits for blocks that are on their
        # way, or that peers still read, which is not being stuck.
        self.still_s = load.still_s
        self._is_still = self.still_s > self.stall_s

    def step_s(self, num_context_tokens: float, num_sequences: float) -> float:
        """Of a step that decodes, by itself."""
        return step_s(self.costs, num_context_tokens, num_sequences)

    @property
    def stall_s(self) -> float:
        """More than its longest step may last, or the one that it is at: at the end of a long
        prompt that is longer still."""
        load = self.standing.load
        longest_s = full_step_s(self.costs, self.max_step_tokens)
        if load is not None:
            longest_s = max(longest_s, load.step_s)
        least_s = FIRST_STALL_S if self._num_steps <= 0 else STALL_S
        return max(least_s, overdue_s(longest_s))

    def takes_new(self, now: float) -> bool:
        return not self._is_still and self.standing.takes_new(now)

    def has_room(self, num_tokens: int, num_sequences: int) -> bool:
        """For the answers to a prompt of which so many tokens come here."""
        seats, limits = self.seats, self.limits
        if seats.num_free_tokens - limits.headroom - self.claimed_tokens < num_tokens:
            return False
        return seats.num_sequences + self.claimed_sequences + num_sequences <= limits.max_sequences

    def num_places(self, num_tokens: int, num_sequences: int) -> float:
        """For how many such prompts there is room."""
        seats, limits = self.seats, self.limits
        num_free = limits.max_sequences - seats.num_sequences - self.claimed_sequences
        num = num_free / num_sequences
        free = seats.num_free_tokens - limits.headroom - self.claimed_tokens
        return min(num, free / num_tokens) if num_tokens > 0 else num

    def place_in_s(self, num_before: int, now: float) -> float:
        """Until there is one after so many others."""
        seats = self.seats
        each_s = self.step_s(seats.num_context_tokens, seats.num_sequences)
        return seats.place_in_s(num_before, each_s, now)

    def will_have_room(self, num_tokens: int, num_sequences: int) -> bool:
        """Not now, but once what runs there has ended. What never fits has to be told so by the
        worker."""
        load = self.standing.load
        if load is None or not self.seats.num_sequences or num_tokens > load.num_total_tokens:
            return False
        return not self.has_room(num_tokens, num_sequences)

    def forget_claims(self) -> None:
        self.claimed_s = 0.0
        self.claimed_sequences = 0
        self.claimed_tokens = 0

    def wait_s(self, now: float) -> float:
        """For the prompts that are queued there, and for those that will be before long."""
        return self.prompts.left_s(now) + self.claimed_s


class _Given(NamedTuple):
    decode: Account
    computing: Account | None  # the prompt, until its first token


class Ledger:
    """Every worker's account. Each thing that was given is released exactly once."""

    def __init__(self) -> None:
        self.accounts: dict[Leg, dict[Worker, Account]] = {leg: {} for leg in Leg}
        self.measured = Measured()
        self._given: dict[str, _Given] = {}

    def __len__(self) -> int:
        """Requests that were given and have not ended."""
        return len(self._given)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._given

    def add(self, leg: Leg, worker: Worker) -> Account:
        account = self.accounts[leg].get(worker)
        if account is None:
            account = Account(leg, worker, self.measured.mean(leg))
            self.accounts[leg][worker] = account
        return account

    def remove(self, leg: Leg, worker: Worker) -> None:
        self.measured.forget(leg, worker.incarnation)
        account = self.accounts[leg].pop(worker, None)
        if account is not None:  # whoever was to go there looks anew
            account.standing.leaving = True

    def note(self, leg: Leg, worker: Worker, load: Load) -> None:
        account = self.accounts[leg].get(worker)
        if account is not None:
            self.measured.note(leg, worker.incarnation, load)
            account.note(load, self.measured.of(leg, worker.incarnation))

    def give(
        self, request_id: str, decode: Account, seat: Seat, computing: Account, prompt: Prompt
    ) -> None:
        assert request_id not in self._given, request_id
        decode.seats.take(request_id, seat)
        computing.prompts.give(request_id, prompt, seat.given)
        self._given[request_id] = _Given(decode, computing)

    def began(self, request_id: str, now: float) -> None:
        given = self._given.get(request_id)
        if given is not None and given.computing is not None:
            given.decode.seats.began(request_id, now)
            given.computing.prompts.release(request_id, now)
            self._given[request_id] = given._replace(computing=None)

    def ended(self, request_id: str, now: float) -> None:
        given = self._given.pop(request_id, None)
        if given is None:
            return
        if given.computing is not None:
            given.computing.prompts.release(request_id, now)
        given.decode.seats.release(request_id, now)
