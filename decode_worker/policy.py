"""Whether a prompt is computed here or fetched from a prefill worker. Pure."""

from typing import NamedTuple


class Station(NamedTuple):
    """A worker as a prompt's token meets it."""

    wait_s: float  # until what is queued before it has been computed
    token_s: float  # to compute it
    num_held_up: int = 0  # running sequences that wait meanwhile


def fetch_above(
    here: Station, there: Station, hand_off_s: float, num_prompt_tokens: int
) -> int | None:
    """How many uncached tokens are computed sooner here than fetched; None: any number is.

    A second that a running sequence has to wait for a prompt counts like one of the prompt's
    own. A prefill worker has none that run.
    """
    gain_s = here.token_s * (1 + here.num_held_up) - there.token_s * (1 + there.num_held_up)
    head_start_s = there.wait_s + hand_off_s - here.wait_s
    if head_start_s >= num_prompt_tokens * gain_s:
        return None
    # With a queue here that is longer than the whole way there, every prompt goes.
    return max(0, int(head_start_s / gain_s)) if gain_s > 0 else 0
