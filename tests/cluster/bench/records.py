"""Records, of the few things that a test wants to say."""

from array import array

from cluster.bench.answer import Failure, FailureKind, Usage
from cluster.bench.record import Record


def answered(
    first_s: float,
    gaps_s: list[float],
    *,
    sent_s: float = 0.0,
    due_s: float | None = None,
    num_output: int | None = None,
    num_prompt: int = 10,
    num_cached: int = 0,
) -> Record:
    """One token a piece, if nothing else is said."""
    last_s = sent_s + first_s + sum(gaps_s)
    tokens = len(gaps_s) + 1 if num_output is None else num_output
    return Record(
        conversation=0,
        turn=0,
        num_asked=len(gaps_s) + 1,
        due_s=due_s,
        sent_s=sent_s,
        first_s=sent_s + first_s,
        last_s=last_s,
        end_s=last_s,
        gaps_s=array("d", gaps_s),
        usage=Usage(num_prompt, tokens, num_cached),
        failure=None,
    )


def failed(kind: FailureKind, status: int | None = None, *, end_s: float = 1.0) -> Record:
    failure = Failure(kind, f"{kind} said {status}", status)
    return Record(0, 0, 5, None, 0.0, None, None, end_s, array("d"), None, failure)
