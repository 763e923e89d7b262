"""How much of the prompts a step computes. Pure."""

from math import sqrt

from engine.step_times import StepCosts, num_pairs


class Pace:
    """Seconds for prompts in a step in which so many draw, so that the whole of it takes no longer
    than a pause may. Where nobody draws it may take two of them: who comes meanwhile, or wants
    blocks for what another worker computes, waits for one on the average.

    Half of it is the prompts' own however long drawing takes, and as long as that takes: they never
    starve, and nobody pays more for what every step costs than for them.
    """

    def __init__(
        self,
        costs: StepCosts,
        max_pause_s: float,
        granule: int,
        num_sequences: int,
        num_context_tokens: int,
    ) -> None:
        drawing_s = (
            costs.base_s
            + costs.sequence_s * num_sequences
            + costs.context_token_s * num_context_tokens
        )
        self._costs = costs
        self._granule = granule
        most_s = max_pause_s if num_sequences else 2 * max_pause_s
        self._left_s = max(most_s - drawing_s, most_s / 2, drawing_s)
        self._begun = False

    def most(self, start: int, wanted: int) -> int:
        """Tokens of a prompt from `start` on: all that are wanted, or whole granules. The first
        prompt gets one at least."""
        left_s = self._left_s - self._costs.sequence_s
        pair_s = self._costs.prompt_pair_s
        token_s = self._costs.prompt_token_s + pair_s * start
        if (token_s + pair_s * wanted / 2) * wanted <= left_s:
            return wanted
        fitting = 0
        if left_s > 0:
            slowness = token_s + sqrt(token_s**2 + 2 * pair_s * left_s)
            fitting = int(2 * left_s / slowness) // self._granule * self._granule
        return min(wanted, fitting if self._begun else max(fitting, self._granule))

    def take(self, start: int, num_tokens: int) -> None:
        self._begun = True
        costs, pairs = self._costs, num_pairs(start, start + num_tokens)
        self._left_s -= costs.sequence_s
        self._left_s -= costs.prompt_token_s * num_tokens + costs.prompt_pair_s * pairs
