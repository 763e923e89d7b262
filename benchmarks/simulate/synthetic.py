"""Traffic that is made up, after traffic that was published. Pure and seeded.

Each generator has with it what it imitates, by the names of `likeness.py`'s figures.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import ClassVar, Protocol

from benchmarks.simulate.arrivals import Arrivals
from benchmarks.simulate.quantiles import Quantiles
from benchmarks.simulate.traffic import BLOCK_TOKENS, Request, block_name, full_blocks, in_order
from cluster.bench.lengths import Fixed, Lengths, LogNormal
from kv_cache.names import BlockName


class Generator(Protocol):
    """`imitated`: figures of what it is like, by the names of `likeness.py`."""

    imitated: ClassVar[Mapping[str, float]]

    def requests(self, arrivals: Arrivals, seed: int) -> list[Request]: ...


class _Names:
    """The blocks of texts that may have a beginning in common."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, int], BlockName] = {}

    def of(
        self, text: str, num_blocks: int, shared: str = "", num_shared: int = 0
    ) -> tuple[BlockName, ...]:
        """The first `num_shared` blocks are the beginning of the shared text."""
        return tuple(
            self._name(shared if number < num_shared else text, number)
            for number in range(num_blocks)
        )

    def _name(self, text: str, number: int) -> BlockName:
        key = (text, number)
        return self._names.get(key) or self._names.setdefault(key, block_name(f"{text} {number}"))


@dataclass(frozen=True)
class Sessions:
    """Conversations whose every prompt is the one before, its answer, and what the user adds.

    As Mooncake's: all prompts share one block, 69 % of the conversations have one turn, 18 % two.
    """

    first: Lengths = Quantiles(
        ((0, 300), (0.1, 860), (0.5, 6_700), (0.9, 27_000), (0.99, 86_000), (1, 124_000))
    )
    added: Lengths = LogNormal(100, 1.0)
    output: Lengths = Quantiles(
        ((0, 1), (0.1, 24), (0.3, 170), (0.5, 350), (0.9, 597), (0.99, 1_118), (1, 2_000))
    )
    gap_s: tuple[float, float] = (123.0, 1.0)  # median and sigma of a log-normal distribution
    turn_shares: tuple[float, float] = (0.69, 0.18)  # of one turn, of two
    more_turns: float = 4.46  # the mean of the others
    most_turns: int = 43
    most_tokens: int = 126_000
    imitated: ClassVar[Mapping[str, float]] = {  # the published trace's, by `likeness.py`
        "input mean": 12_035.0,
        "input p10": 964.0,
        "input p50": 6_909.0,
        "input p90": 27_367.0,
        "input p99": 85_400.0,
        "output mean": 343.0,
        "output p10": 24.0,
        "output p50": 350.0,
        "output p90": 597.0,
        "output p99": 1_118.0,
        "hit, endless cache": 0.382,
        "hit, 1,000 blocks": 0.047,
        "hit, 10,000 blocks": 0.224,
        "hit, 30,000 blocks": 0.345,
        "hit, 50,000 blocks": 0.371,
    }

    @property
    def mean_turns(self) -> float:
        one, two = self.turn_shares
        return one + 2 * two + (1 - one - two) * self.more_turns

    def requests(self, arrivals: Arrivals, seed: int) -> list[Request]:
        """Conversations that began before the first second are there, too: the traffic is as
        dense at its beginning as later."""
        random, names = Random(f"sessions {seed}"), _Names()
        lead_s = 12 * self.gap_s[0]
        starts = Arrivals(
            arrivals.rate / self.mean_turns,
            arrivals.seconds + lead_s,
            arrivals.burstiness,
            arrivals.day,
        )
        requests = [
            request
            for number, start_s in enumerate(starts.times(seed))
            for request in self._session(number, start_s - lead_s, random, names)
            if 0 <= request.at_s < arrivals.seconds
        ]
        return in_order(requests)

    def _session(
        self, number: int, at_s: float, random: Random, names: _Names
    ) -> Iterator[Request]:
        num_tokens = self.first.draw(random)
        for _ in range(self._num_turns(random)):
            num_output = self.output.draw(random)
            if num_tokens + num_output > self.most_tokens:
                return
            num_blocks = full_blocks(num_tokens, num_output, BLOCK_TOKENS)
            own = names.of(f"session {number}", num_blocks, "all", 1)
            yield Request(0, at_s, num_tokens, num_output, own)
            num_tokens += num_output + self.added.draw(random)
            median_s, sigma = self.gap_s
            at_s += median_s * math.exp(random.gauss(0.0, sigma))

    def _num_turns(self, random: Random) -> int:
        one, two = self.turn_shares
        share = random.random()
        if share < one + two:
            return 1 if share < one else 2
        stop = 1 / (self.more_turns - 2)
        num_turns = 3
        while num_turns < self.most_turns and random.random() >= stop:
            num_turns += 1
        return num_turns


@dataclass(frozen=True)
class PrefixGroups:
    """Prompts that begin with one of some long texts, drawn at random: a company's assistants.

    As llm-d's benchmark of 150 texts of 6,000 tokens, each asked five questions of 1,200.
    """

    num_groups: int = 150
    prefix_tokens: int = 6_000
    suffix: Lengths = Fixed(1_200)
    output: Lengths = Fixed(1_000)
    imitated: ClassVar[Mapping[str, float]] = {
        "input mean": 7_200.0,
        "input p50": 7_200.0,
        "output mean": 1_000.0,
        "output p50": 1_000.0,
    }

    def requests(self, arrivals: Arrivals, seed: int) -> list[Request]:
        random, names = Random(f"prefix groups {seed}"), _Names()
        requests = []
        for number, at_s in enumerate(arrivals.times(seed)):
            group = random.randrange(self.num_groups)
            num_tokens = self.prefix_tokens + self.suffix.draw(random)
            num_output = self.output.draw(random)
            num_blocks = full_blocks(num_tokens, num_output, BLOCK_TOKENS)
            num_shared = self.prefix_tokens // BLOCK_TOKENS
            own = names.of(f"question {number}", num_blocks, f"group {group}", num_shared)
            requests.append(Request(number, at_s, num_tokens, num_output, own))
        return in_order(requests)

    def expected_hit(self, num_requests: int) -> float:
        """Of an endless cache, with suffixes of one length: all but the first of each group."""
        suffix = self.suffix.length if isinstance(self.suffix, Fixed) else 0
        num_shared = self.prefix_tokens // BLOCK_TOKENS
        num_blocks = (self.prefix_tokens + suffix) // BLOCK_TOKENS
        seen = self.num_groups * (1 - (1 - 1 / self.num_groups) ** num_requests)
        return num_shared / num_blocks * (1 - seen / num_requests)


@dataclass(frozen=True)
class BestOf:
    """Bursts of the same prompt: so many answers to each, all asked at the same moment. The rate
    is that of the requests."""

    num_answers: int = 16
    prompt: Lengths = LogNormal(3_000, 0.8, 60_000)
    output: Lengths = LogNormal(400, 0.6, 4_000)
    imitated: ClassVar[Mapping[str, float]] = {
        "input p50": 3_000.0,
        "output p50": 400.0,
        "hit, endless cache": 15 / 16,
    }

    def requests(self, arrivals: Arrivals, seed: int) -> list[Request]:
        random, names = Random(f"best of {seed}"), _Names()
        bursts = replace(arrivals, rate=arrivals.rate / self.num_answers)
        requests = []
        for burst, at_s in enumerate(bursts.times(seed)):
            num_tokens = self.prompt.draw(random)
            num_shared = num_tokens // BLOCK_TOKENS
            for answer in range(self.num_answers):
                num_output = self.output.draw(random)
                num_blocks = full_blocks(num_tokens, num_output, BLOCK_TOKENS)
                own = f"answer {burst} {answer}"
                found = names.of(own, num_blocks, f"burst {burst}", num_shared)
                requests.append(Request(0, at_s, num_tokens, num_output, found))
        return in_order(requests)


@dataclass(frozen=True)
class Independent:
    """Prompts that have nothing in common. As Azure's conversations of 2023."""

    prompt: Lengths = Quantiles(
        ((0, 20), (0.1, 207), (0.5, 1_020), (0.75, 1_300), (0.9, 2_734), (0.99, 4_142), (1, 8_000))
    )
    output: Lengths = Quantiles(
        ((0, 1), (0.1, 60), (0.5, 129), (0.65, 300), (0.9, 424), (0.99, 601), (1, 1_000))
    )
    imitated: ClassVar[Mapping[str, float]] = {
        "input mean": 1_155.0,
        "input p10": 207.0,
        "input p50": 1_020.0,
        "input p90": 2_734.0,
        "input p99": 4_142.0,
        "output mean": 211.0,
        "output p50": 129.0,
        "output p90": 424.0,
        "output p99": 601.0,
    }

    def requests(self, arrivals: Arrivals, seed: int) -> list[Request]:
        random, names = Random(f"independent {seed}"), _Names()
        requests = []
        for number, at_s in enumerate(arrivals.times(seed)):
            num_tokens, num_output = self.prompt.draw(random), self.output.draw(random)
            num_blocks = full_blocks(num_tokens, num_output, BLOCK_TOKENS)
            own = names.of(f"prompt {number}", num_blocks)
            requests.append(Request(number, at_s, num_tokens, num_output, own))
        return in_order(requests)


GENERATORS: Mapping[str, Callable[[], Generator]] = {
    "sessions": Sessions,
    "prefix-groups": PrefixGroups,
    "best-of": BestOf,
    "independent": Independent,
}
