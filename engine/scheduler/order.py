"""Which of two sequences is served first: the smaller key, decided when a request arrives."""

from engine.request import GenerationRequest
from engine.scheduler.limits import SchedulerLimits

Key = tuple[int, float, int, int]  # priority, due, arrival, choice


def due_s(arrived_s: float, num_uncached: int, limits: SchedulerLimits) -> float:
    """Orders requests of one priority; by arrival alone where that is the policy.

    Otherwise the shorter prompt goes first: what is to be read, measured in steps and mapped
    to 0 .. 1, delays a request by that share of `max_overtake_s`. So the shorter one overtakes
    another only if it arrived less than `max_overtake_s` after it.
    """
    if limits.max_overtake_s is None:
        return 0.0
    share = num_uncached / (num_uncached + limits.max_num_batched_tokens)
    return arrived_s + limits.max_overtake_s * share


def make_key(request: GenerationRequest, due: float, arrival: int, choice: int) -> Key:
    return (request.priority, due, arrival, choice)
