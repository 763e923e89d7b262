"""How long a step takes, learnt from the steps that were made."""

from collections.abc import Sequence
from math import sqrt
from operator import mul
from typing import NamedTuple

from engine.step import StepPlan

TYPICAL_TOKENS = 1024  # of a step that computes a prompt
FORGETTING = 0.99  # a step counts half as much after 69 others
FORGETTING_PROMPTS = 0.95  # one with a prompt after 14 others that have one
OUTLIER = 3.0  # times the usual error; what is farther off counts less
UNKNOWN = 1e-12  # of a cost's weight: nothing recent says anything about it


def whole_prompt_token_s(
    base_s: float, prompt_token_s: float, sequence_s: float, prompt_pair_s: float
) -> float:
    """A prompt's token, with its share of what a step costs besides, in a typical prompt."""
    pairs_s = prompt_pair_s * num_pairs(0, TYPICAL_TOKENS)
    return prompt_token_s + (base_s + sequence_s + pairs_s) / TYPICAL_TOKENS


def num_pairs(start: int, end: int) -> float:
    """Of a prompt's tokens from `start` to `end` with the tokens that each attends to."""
    return (end * end - start * start) / 2


class StepShape(NamedTuple):
    """What a step's time depends on."""

    num_prompt_tokens: int
    num_context_tokens: int  # in the cache of the sequences that decode
    num_sequences: int
    num_prompt_pairs: float = 0.0  # of the prompts' tokens with those that they attend to

    @classmethod
    def of(cls, plan: StepPlan) -> "StepShape":
        context = sum([s.start for s in plan.slices[: plan.num_decode]])
        prompts = plan.slices[plan.num_decode :]
        pairs = sum([num_pairs(s.start, s.start + s.num_tokens) for s in prompts])
        return cls(plan.num_tokens - plan.num_decode, context, len(plan.slices), pairs)


class StepCosts(NamedTuple):
    """Seconds: of a step, and of each thing that its shape counts, in the shape's order."""

    base_s: float
    prompt_token_s: float
    context_token_s: float
    sequence_s: float
    prompt_pair_s: float


NUM_COSTS = len(StepCosts._fields) + 1  # that are learnt: what any prompt at all adds to a step
# What was believed counts so much beside what the steps say. Steps of one prompt and one sequence,
# as when an engine warms up, do not tell their costs apart: then a step costs what it costs, and a
# prompt by its tokens. Anything else must show.
DOUBTS = (1e-3, 1e-3, 0.1, 0.1, 5e-3, 0.1)
# Of a pair's cost by its multiplications; 2.5 of them were measured of the reference kernels, one
# at most of the CPU's. Prompts that are all short say nothing of it, and what they happen to would
# grow by the square in a long one.
DEAREST_PAIR = 4.0
PAIR_SHARE = 2e-4  # of a model of 100 M parameters
LATE = 0.9  # of the longest prompt of late is left for each step with a prompt
DARING = 1.5  # times cheaper than in that one a token may be in a longer one,
LEAP = 2  # or as cheap as if it had had so many granules more,
MOST_DARING = 3.0  # but no cheaper than this


class Sums:
    """The normal equations of steps, in which each counts less with every one that follows it.
    Symmetric: only what is right of the diagonal, and the diagonal itself, is kept."""

    def __init__(self, forgetting: float) -> None:
        self._forgetting = forgetting
        self.matrix = [[0.0] * NUM_COSTS for _ in range(NUM_COSTS)]
        self.targets = [0.0] * NUM_COSTS

    def add(self, features: Sequence[float], seconds: float, weight: float) -> None:
        for i, row in enumerate(self.matrix):
            scaled = weight * features[i]
            for j in range(i, NUM_COSTS):
                row[j] = self._forgetting * row[j] + scaled * features[j]
            self.targets[i] = self._forgetting * self.targets[i] + scaled * seconds


class StepTimes:
    """seconds = base + a x prompt tokens + b x context tokens + c x sequences + d x prompt pairs,
    none negative, and d bounded by a: a pair takes `pair_share` of a token's multiplications.
    A step with any prompt costs something besides, e: short ends of long prompts would else say
    that pairs are dear. It is told to nobody.

    Least squares over recent steps, which weigh less the older they are and the farther off the
    model. Keeps the sums of the normal equations, so a step costs the same however many there
    were: 16 us on a slow core. What steps with prompts said is forgotten by such steps only: there
    may be a thousand others between two of them. Reads no clock.
    """

    def __init__(self, pair_share: float = PAIR_SHARE, granule: int = 16) -> None:
        """`granule`: of so many tokens, or a multiple, is a prompt's part that has to be cut."""
        self.num_steps = 0
        self._granule = granule
        self._dearest = DEAREST_PAIR * pair_share  # pair, in tokens
        self._costs = [0.0] * NUM_COSTS
        self._sums, self._prompt_sums = Sums(FORGETTING), Sums(FORGETTING_PROMPTS)
        self._longest, self._careful_token_s = 0.0, 0.0  # prompt tokens of a step of late
        self._usual_error = 0.0

    def note(self, shape: StepShape, seconds: float) -> None:
        features = self._features(shape)
        weight = self._weigh(self._predict(features), seconds)
        num_tokens = shape.num_prompt_tokens
        (self._prompt_sums if num_tokens else self._sums).add(features, seconds, weight)
        self.num_steps += 1
        is_news = num_tokens > self._longest
        if num_tokens:
            self._longest *= LATE
        if num_tokens > self._longest:
            leap = min(num_tokens + LEAP * self._granule, MOST_DARING * num_tokens)
            believed = max(DARING * num_tokens, leap)
            self._longest, self._careful_token_s = num_tokens, seconds / believed
        if is_news or self.num_steps < 32 or self.num_steps % 16 == 0:
            self._solve()

    def predict(self, shape: StepShape) -> float:
        """Seconds; 0 before the first step."""
        return self._predict(self._features(shape))

    @property
    def whole_prompt_token_s(self) -> float:
        base_s, token_s, _, sequence_s, pair_s = self.costs
        return whole_prompt_token_s(base_s, token_s, sequence_s, pair_s)

    @property
    def costs(self) -> StepCosts:
        """As they were solved for at most 16 steps ago; other threads read them."""
        base_s, token_s, context_s, sequence_s, dear_s, _ = self._costs
        return StepCosts(base_s, token_s + dear_s, context_s, sequence_s, dear_s * self._dearest)

    @property
    def careful_costs(self) -> StepCosts:
        """Where most of a step is the reading of weights, the tokens of short prompts seem to cost
        nothing, and what is held to be free may take seconds. All that the longest step of late
        took, shared out among its tokens, is what others may cost at most; nearly as much is
        believed until a longer one has shown it. A longer one must come about: after one of a
        granule, one of half as many tokens more would be cut to a granule again."""
        costs = self.costs
        return costs._replace(prompt_token_s=max(costs.prompt_token_s, self._careful_token_s))

    def _features(self, shape: StepShape) -> tuple[float, ...]:
        """Prompt tokens whose pairs cost nothing, and some whose pairs cost what they may: mixed,
        they are of any cost between."""
        tokens, context, sequences, pairs = shape
        dear = tokens + self._dearest * pairs
        return (1.0, tokens, context, sequences, dear, 1.0 if tokens else 0.0)

    def _predict(self, features: tuple[float, ...]) -> float:
        return sum([cost * feature for cost, feature in zip(self._costs, features, strict=True)])

    def _weigh(self, predicted: float, seconds: float) -> float:
        """Relative to the step's own time, so that long steps do not drown short ones; an
        outlier pulls no harder than a step at the bound. Errors are shares of what was
        expected: a prompt's step may take a thousand times what decoding does."""
        error = abs(seconds - predicted) / max(predicted, 1e-6)
        bound = OUTLIER * self._usual_error
        kept = min(error, 1.0 if self.num_steps < 8 else bound)
        self._usual_error = max(0.9 * self._usual_error + 0.1 * kept, 1e-3)
        trust = 1.0 if self.num_steps < 8 or error <= bound else bound / error
        return trust / max(seconds, 1e-6)

    def _solve(self) -> None:
        """The least error; what the steps do not tell apart stays as it was."""
        old = self._costs
        both = self._sums, self._prompt_sums
        sums = [
            [a + b for a, b in zip(*rows, strict=True)]
            for rows in zip(*[s.matrix for s in both], strict=True)
        ]
        all_targets = [a + b for a, b in zip(*[s.targets for s in both], strict=True)]
        scales = [sqrt(sums[i][i]) for i in range(NUM_COSTS)]
        known = [i for i in range(NUM_COSTS) if sums[i][i] > UNKNOWN]
        matrix = [
            [sums[min(i, j)][max(i, j)] / (scales[i] * scales[j]) for j in known] for i in known
        ]
        targets = [all_targets[i] / scales[i] + DOUBTS[i] * old[i] * scales[i] for i in known]
        for row, i in enumerate(known):
            matrix[row][row] += DOUBTS[i]
        found = non_negative(matrix, targets)
        costs = old.copy()
        for i, cost in zip(known, found, strict=True):
            costs[i] = cost / scales[i]
        self._costs = costs


def non_negative(matrix: list[list[float]], targets: list[float]) -> list[float]:
    """x >= 0 of which matrix x is nearly the targets; symmetric and positive. Whichever would be
    the most negative is left out, until none is."""
    found, left = [0.0] * len(targets), list(range(len(targets)))
    while left:
        part = solved([[matrix[i][j] for j in left] for i in left], [targets[i] for i in left])
        worst = min(range(len(left)), key=part.__getitem__)
        if part[worst] >= 0:
            for i, value in zip(left, part, strict=True):
                found[i] = value
            break
        del left[worst]
    return found


def solved(matrix: list[list[float]], targets: list[float]) -> list[float]:
    """By elimination, which needs no pivots: the matrix is symmetric and positive."""
    size = len(targets)
    for k in range(size):
        for i in range(k + 1, size):
            share = matrix[i][k] / matrix[k][k]
            if share:
                matrix[i] = [a - share * b for a, b in zip(matrix[i], matrix[k], strict=True)]
                targets[i] -= share * targets[k]
    found = [0.0] * size
    for k in reversed(range(size)):
        rest = sum(map(mul, matrix[k][k + 1 :], found[k + 1 :]))
        found[k] = (targets[k] - rest) / matrix[k][k]
    return found
