"""Whether a prompt is computed here or fetched from a prefill worker, and from which. Pure.

The seconds that everybody would wait are added up for either way. A prompt that is computed here
holds up every sequence that runs meanwhile, chunk by chunk, for as long as it takes; one that is
fetched waits for what is queued there, and for the hand-off. So a prompt stays where nobody is
held up; with many running it goes, until the queue there is about as long as the batch here.
From then on some stay: neither worker rests while the other one has a queue.

Where both compute on the same cores nothing is sooner there, and those that run slow down evenly
instead of pausing. So only a prompt goes that would be a long pause.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from protos.judging import LONG_PAUSE_S, SILENT_AFTER_S

FETCHING_S = 0.002  # of a decode worker's own time, however short the prompt that it fetches


class Reason(StrEnum):
    """Why a prompt is computed where it is."""

    ASKED = "asked"  # the request says so
    SOONER = "sooner"  # than at the other place
    SHORT = "short"  # too few tokens for a hand-off
    ALONE = "alone"  # no prefill worker was named
    SHUNNED = "shunned"  # every one that was is silent, unhealthy or leaving
    UNKNOWN = "unknown"  # asking makes the prefill worker known
    SHARED = "shared"  # the prefill worker computes on the same cores


class Decision(NamedTuple):
    """On arrival, as if nothing of the prompt were cached here."""

    remote: bool
    reason: Reason


# All that there are, for whoever counts them.
DECISIONS = (
    *(Decision(True, reason) for reason in (Reason.ASKED, Reason.SOONER, Reason.UNKNOWN)),
    *(Decision(False, reason) for reason in Reason if reason is not Reason.UNKNOWN),
)


class Station(NamedTuple):
    """A worker as a prompt's token meets it."""

    wait_s: float  # until what is queued before it has been computed
    token_s: float  # to compute it
    num_held_up: int = 0  # running sequences that wait meanwhile


class Prospect(NamedTuple):
    """A prefill worker that a request names, as far as it is known."""

    there: Station | None = None  # None: asking makes it known
    hand_off_s: float = 0.0
    shunned: bool = False
    shares_cores: bool = False  # with the decode worker, and there are too few for both


def num_held_up(num_running: int, num_queued: int, num_fetched: int) -> int:
    """Sequences that run before a prompt that is queued here has been computed: those that do
    now, those in line before it, and as many fetched ones as arrive in about that time."""
    return num_running + num_queued + min(num_fetched, num_queued + 1)


def is_shunned(age_s: float, draining: bool, unhealthy: bool) -> bool:
    """`age_s` since the worker was heard of: no news is bad news."""
    return age_s > SILENT_AFTER_S or draining or unhealthy


def in_turn(prospects: Sequence[Prospect]) -> list[int]:
    """The order is the router's; those that are shunned come last."""
    return sorted(range(len(prospects)), key=lambda i: prospects[i].shunned)


def first_choice(prospects: Sequence[Prospect]) -> Prospect | None:
    return next((prospect for prospect in prospects if not prospect.shunned), None)


def fetch_above(here: Station, prospects: Sequence[Prospect], num_prompt_tokens: int) -> int | None:
    """How many uncached tokens are computed sooner here than fetched from the first who is not
    shunned; None: any number is.

    A second that a running sequence has to wait for a prompt counts like one of the prompt's
    own; fetching holds it up a little, too. A prefill worker has none that run.
    """
    prospect = first_choice(prospects)
    if prospect is None:
        return None
    if prospect.there is None:
        return 0
    if prospect.shares_cores:
        return int(LONG_PAUSE_S / here.token_s) if here.num_held_up and here.token_s else None
    there = prospect.there
    gain_s = here.token_s * (1 + here.num_held_up) - there.token_s
    fetching_s = prospect.hand_off_s + here.num_held_up * FETCHING_S
    head_start_s = there.wait_s + fetching_s - here.wait_s
    if head_start_s >= num_prompt_tokens * gain_s:
        return None
    # With a queue here that is longer than the whole way there, every prompt goes.
    return max(0, int(head_start_s / gain_s)) if gain_s > 0 else 0


def decide(
    prospects: Sequence[Prospect], threshold: int | None, num_prompt_tokens: int
) -> Decision:
    """What `fetch_above` comes to, in words."""
    prospect = first_choice(prospects)
    if prospect is None:
        return Decision(False, Reason.SHUNNED if prospects else Reason.ALONE)
    if prospect.there is None:
        return Decision(True, Reason.UNKNOWN)
    remote = threshold is not None and num_prompt_tokens > threshold
    if prospect.shares_cores and not remote:
        return Decision(False, Reason.SHARED)
    if threshold is None:
        return Decision(False, Reason.SOONER)
    return Decision(remote, Reason.SOONER if remote else Reason.SHORT)
