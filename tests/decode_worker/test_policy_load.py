"""What the rule comes to under load: two workers and so many clients, in a few lines.

Each client asks anew as soon as it has its answer: 512 tokens in, 64 out. The prefill worker
computes one prompt after the other; a step of the decode worker has a token of every running
sequence and a chunk of what is computed there.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from decode_worker.policy import Prospect, Station, fetch_above, num_held_up

PROMPT, OUTPUT, CHUNK = 512, 64, 512
HAND_OFF_S = 0.01


class Machine(NamedTuple):
    token_s: float  # of a prompt
    step_s: float  # of a step without anything in it
    sequence_s: float  # more for each sequence


class Outcome(NamedTuple):
    tokens_per_s: float
    ttft_s: float


@dataclass
class Relay:
    machine: Machine
    mode: str  # always "here", always "there", or by the rule
    now: float = 0.0  # at the beginning of a step of the decode worker
    there_until: float = 0.0  # the prefill worker has something to do
    local: deque[list[float]] = field(default_factory=deque)  # when asked, tokens left
    fetched: list[tuple[float, float]] = field(default_factory=list)  # when there, when asked
    running: list[int] = field(default_factory=list)  # tokens left
    waited: list[float] = field(default_factory=list)  # for first tokens

    def ask(self, asked: float) -> None:
        if self._goes():
            self.there_until = max(self.there_until, asked) + PROMPT * self.machine.token_s
            heapq.heappush(self.fetched, (self.there_until + HAND_OFF_S, asked))
        else:
            self.local.append([asked, PROMPT])

    def _goes(self) -> bool:
        if self.mode != "rule":
            return self.mode == "there"
        token_s, num_fetched = self.machine.token_s, len(self.fetched)
        held_up = num_held_up(len(self.running), len(self.local), num_fetched)
        here = Station(sum(left for _, left in self.local) * token_s, token_s, held_up)
        there = Prospect(Station(num_fetched * PROMPT * token_s, token_s), HAND_OFF_S)
        threshold = fetch_above(here, [there], PROMPT)
        return threshold is not None and threshold < PROMPT

    def step(self) -> int:
        """How many answers ended."""
        while self.fetched and self.fetched[0][0] <= self.now:
            self._begin(heapq.heappop(self.fetched)[1])
        if not self.running and not self.local:
            self.now = self.fetched[0][0]
            return 0
        num_computed = min(CHUNK, sum(int(left) for _, left in self.local))
        self.now += self.machine.step_s + self.machine.sequence_s * len(self.running)
        self.now += self.machine.token_s * num_computed
        going_on = [left - 1 for left in self.running if left > 1]
        num_ended = len(self.running) - len(going_on)
        self.running = going_on
        while num_computed:
            taken = min(num_computed, int(self.local[0][1]))
            self.local[0][1] -= taken
            num_computed -= taken
            if not self.local[0][1]:
                self._begin(self.local.popleft()[0])
        return num_ended

    def _begin(self, asked: float) -> None:
        self.waited.append(self.now - asked)
        self.running.append(OUTPUT - 1)


def serve(machine: Machine, mode: str, num_clients: int, num_answers: int = 200) -> Outcome:
    relay, num_ended = Relay(machine, mode), 0
    for _ in range(num_clients):
        relay.ask(0.0)
    while num_ended < num_answers:
        ended = relay.step()
        num_ended += ended
        for _ in range(ended):
            relay.ask(relay.now)
    return Outcome(num_ended * OUTPUT / relay.now, sum(relay.waited) / len(relay.waited))


SLOW_PROMPTS = Machine(5e-4, 5e-3, 1e-3)  # the prefill worker is what there is too little of
SLOW_STEPS = Machine(5e-4, 12e-3, 5e-4)
FAST_PROMPTS = Machine(2e-4, 5e-3, 1e-3)
MACHINES = [SLOW_PROMPTS, SLOW_STEPS, FAST_PROMPTS]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("num_clients", [1, 2, 4, 8, 16, 32, 64])
def test_it_is_never_much_worse_than_either_way_for_all(machine: Machine, num_clients: int) -> None:
    told = serve(machine, "rule", num_clients)
    others = [serve(machine, mode, num_clients) for mode in ("here", "there")]
    assert told.tokens_per_s > 0.85 * max(other.tokens_per_s for other in others)
    assert told.ttft_s < 1.4 * max(other.ttft_s for other in others)


@pytest.mark.parametrize("machine", [SLOW_PROMPTS, SLOW_STEPS])
@pytest.mark.parametrize("num_clients", [16, 32, 64])
def test_where_prompts_queue_both_workers_compute_them(machine: Machine, num_clients: int) -> None:
    told = serve(machine, "rule", num_clients)
    remote, local = (serve(machine, mode, num_clients) for mode in ("there", "here"))
    assert told.tokens_per_s > 1.3 * max(remote.tokens_per_s, local.tokens_per_s)
    assert told.ttft_s < 0.5 * remote.ttft_s


def test_a_lone_request_does_not_travel() -> None:
    for machine in MACHINES:
        assert serve(machine, "rule", 1) == serve(machine, "here", 1)
