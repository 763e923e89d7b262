"""What a prompt, a step and a transfer take, by what the workers measured. Pure arithmetic."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from math import exp

from router.workers import Leg, LinkSpeed, Load, StepCosts

# Before anybody has measured anything only ratios matter: prompts are compared by their tokens,
# and a step counts like a few of them.
GUESS = StepCosts(5e-3, 1e-4, 0.0, 1e-8, 1e-5)

# So many steps of late count as much as what all of a leg measured. Or else whoever was slow in its
# first steps, or for a while, would be given nothing, and nothing would ever correct it.
DOUBT = {Leg.PREFILL: 4.0, Leg.DECODE: 128.0}
FORGETS_S = 60.0
_MOST_STEPS = 8  # times the doubt

# In the mean, beside their steps of late: who is judged by it because it made none must not weigh
# in it, or a worker whose first steps were slow costs a little more than the others for ever.
_HARDLY = 1e-6

_LINKS_PER_REPORT = 4
_NEW_SHARE = 0.1


def num_steps(num_tokens: int, max_step_tokens: int) -> int:
    """`max_step_tokens` 0: unknown, then it is one."""
    return -(-num_tokens // max_step_tokens) if max_step_tokens else 1


def prefill_s(costs: StepCosts, max_step_tokens: int, num_new: int, num_cached: int) -> float:
    """Of a prompt by itself, from its first step to its last."""
    steps = -(-num_new // max_step_tokens) if max_step_tokens else 1
    num_pairs = num_new * (num_cached + 0.5 * num_new)
    # By position: this runs a few hundred times for every request.
    return steps * costs[0] + costs[1] * num_new + costs[2] * num_pairs


def prompt_token_s(costs: StepCosts, max_step_tokens: int) -> float:
    """Of one among many of other prompts, of which nothing else is known."""
    share = costs.step_s / max_step_tokens if max_step_tokens else 0.0
    return costs.prompt_token_s + share


def full_step_s(costs: StepCosts, max_step_tokens: int) -> float:
    """Of as many prompt tokens as one step takes."""
    return costs.step_s + costs.prompt_token_s * max_step_tokens


def step_s(costs: StepCosts, num_context_tokens: float, num_sequences: float) -> float:
    """Of one that decodes."""
    return costs[0] + costs[3] * num_context_tokens + costs[4] * num_sequences


def transfer_s(link: LinkSpeed | None, num_bytes: float) -> float:
    """Nothing over a link that nobody has measured: the first hand-offs measure it."""
    if link is None or num_bytes <= 0:
        return 0.0
    return link.latency_s + num_bytes / link.bytes_per_s


def exposed_s(whole_s: float, computing_s: float, steps: int) -> float:
    """What is left to wait for of a transfer that began while the prompt was computed: at least
    the last step's share, which cannot begin sooner."""
    share = whole_s / steps
    return max(share, whole_s - computing_s * (steps - 1) / steps)


class _Told:
    """By one worker. `num_late`: steps lately, those of a minute ago a third."""

    __slots__ = ("at", "costs", "num_late", "num_steps")

    def __init__(self) -> None:
        self.costs = StepCosts()
        self.num_late = 0.0
        self.num_steps = 0
        self.at = 0.0

    def hear(self, load: Load, most: float) -> None:
        num_new = max(0, load.num_steps - self.num_steps)
        kept = exp(-max(0.0, load.at - self.at) / FORGETS_S)
        self.num_late = min(most, self.num_late * kept + num_new)
        self.num_steps, self.at = load.num_steps, load.at
        if any(load.costs):
            self.costs = load.costs


class Measured:
    """What the workers measured, each counting by its steps of late. Who has not measured something
    takes the mean of its leg, or else of anyone: nothing must look infinitely fast."""

    def __init__(self) -> None:
        self._told: dict[tuple[Leg, int], _Told] = {}
        self._guess = GUESS  # while nobody has measured anything
        self._means: dict[Leg, StepCosts] | None = None
        self._num_notes = 0  # since the means were taken
        self.link: LinkSpeed | None = None  # as a rule

    def note(self, leg: Leg, incarnation: int, load: Load) -> None:
        known = (leg, incarnation) in self._told
        told = self._told.setdefault((leg, incarnation), _Told())
        told.hear(load, _MOST_STEPS * DOUBT[leg])
        self._num_notes += 1
        # Once a round: with a thousand workers a mean for every report would be a burden.
        if not known or self._num_notes >= len(self._told):
            self._means = None
        for link in islice(load.links.values(), _LINKS_PER_REPORT):
            self.link = _blend(self.link, link)

    def forget(self, leg: Leg, incarnation: int) -> None:
        """What the last of all measured stays the best guess that there is."""
        if len(self._told) == 1:
            self._guess = _fill(_mean(self._told.values()), self._guess)
        if self._told.pop((leg, incarnation), None) is not None:
            self._means = None

    def of(self, leg: Leg, incarnation: int) -> StepCosts:
        """Its own, as far as it made steps lately, and the mean for the rest."""
        mean, told = self.mean(leg), self._told.get((leg, incarnation))
        if told is None:
            return mean
        trust = told.num_late / (told.num_late + DOUBT[leg])
        own = _fill(told.costs, mean)
        return StepCosts(*(b + trust * (a - b) for a, b in zip(own, mean, strict=True)))

    def mean(self, leg: Leg) -> StepCosts:
        if self._means is None:
            self._num_notes = 0
            everyone = _fill(_mean(self._told.values()), self._guess)
            self._means = {one: self._mean_of(one, everyone) for one in Leg}
        return self._means[leg]

    def _mean_of(self, leg: Leg, everyone: StepCosts) -> StepCosts:
        """A leg that made no steps lately is hoped to compute prompts as fast as anyone: its
        workers' first steps are made while all of a machine's start, and who looks slow is given
        nothing by which it could be seen that it is not."""
        own = _fill(_mean(self._of(leg)), everyone)
        num_late = sum(told.num_late for told in self._of(leg))
        doubt = DOUBT[leg] / (num_late + DOUBT[leg])
        return own._replace(
            prompt_token_s=_hoped(own.prompt_token_s, everyone.prompt_token_s, doubt),
            prompt_pair_s=_hoped(own.prompt_pair_s, everyone.prompt_pair_s, doubt),
        )

    def _of(self, leg: Leg) -> Iterator[_Told]:
        return (told for (of, _), told in self._told.items() if of is leg)


def _hoped(own_s: float, everyone_s: float, doubt: float) -> float:
    return own_s - doubt * max(0.0, own_s - everyone_s)


def _fill(own: StepCosts, others: StepCosts) -> StepCosts:
    """Step by step: a prefill worker never decodes, a decode worker may compute no prompt. Of
    what it did, any one figure may well have come out as zero."""
    prompts = own if own.prompt_token_s else others
    decoding = own if own.context_token_s or own.sequence_s else others
    return StepCosts(
        own.step_s if any(own) else others.step_s,
        prompts.prompt_token_s,
        prompts.prompt_pair_s,
        decoding.context_token_s,
        decoding.sequence_s,
    )


def _mean(every: Iterable[_Told]) -> StepCosts:
    """Of those who measured it, part by part."""
    said = [(one.num_late + _HARDLY, one.costs) for one in every if any(one.costs)]
    prompts = [one for one in said if one[1].prompt_token_s]
    decoding = [one for one in said if one[1].context_token_s or one[1].sequence_s]
    return StepCosts(
        *(_average(each, i) for i, each in enumerate((said, prompts, prompts, decoding, decoding)))
    )


def _average(said: Sequence[tuple[float, StepCosts]], part: int) -> float:
    weight = sum(weight for weight, _ in said)
    return sum(weight * costs[part] for weight, costs in said) / weight if said else 0.0


def _blend(old: LinkSpeed | None, new: LinkSpeed) -> LinkSpeed | None:
    if new.bytes_per_s <= 0:
        return old
    if old is None:
        return new
    return LinkSpeed(*(a + _NEW_SHARE * (b - a) for a, b in zip(old, new, strict=True)))
