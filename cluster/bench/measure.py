"""Figures of a run, from its records. Pure."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.bench.answer import FailureKind
from cluster.bench.record import Record

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Spread:
    """Of values in seconds; percentiles are interpolated between the two nearest values."""

    num: int
    mean: float
    percentiles: dict[int, float]
    largest: float

    @property
    def median(self) -> float:
        return self.percentiles[50]


@dataclass(frozen=True)
class Objectives:
    """What a request must keep to be a good one; None asks for nothing.

    `itl_s` binds the 99th percentile of a request's own gaps, `tpot_s` their mean per token.
    """

    ttft_s: float | None = None
    itl_s: float | None = None
    tpot_s: float | None = None

    @property
    def any(self) -> bool:
        return (self.ttft_s, self.itl_s, self.tpot_s) != (None, None, None)

    def kept_by(self, record: Record) -> bool:
        """Failed requests keep none."""
        if record.failure is not None:
            return False
        itl_s = percentile(sorted(record.gaps_s), 99) if record.gaps_s else None
        return all(
            limit is None or value is None or value <= limit
            for limit, value in (
                (self.ttft_s, record.ttft_s),
                (self.itl_s, itl_s),
                (self.tpot_s, record.tpot_s),
            )
        )


@dataclass(frozen=True)
class Summary:
    """Times are of complete requests alone; failures and interruptions are counted beside them."""

    num_sent: int
    num_complete: int
    failures: dict[str, int]  # by what failed, interruptions not among them
    failure_messages: dict[str, str]  # the first of each
    num_interrupted: int
    num_unsent: int
    num_short: int  # complete, but with fewer tokens than were asked for
    span_s: float  # from the first request's sending to the last one's end
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_good: int | None  # None without objectives
    ttft: Spread | None
    itl: Spread | None
    tpot: Spread | None
    total: Spread | None
    late: Spread | None

    @property
    def requests_per_s(self) -> float:
        return self._per_s(self.num_complete)

    @property
    def output_tokens_per_s(self) -> float:
        return self._per_s(self.num_output_tokens)

    @property
    def prompt_tokens_per_s(self) -> float:
        return self._per_s(self.num_prompt_tokens)

    @property
    def goodput_per_s(self) -> float | None:
        return None if self.num_good is None else self._per_s(self.num_good)

    def _per_s(self, count: int) -> float:
        return count / self.span_s if self.span_s > 0 else 0.0


def summarise(
    records: Sequence[Record], objectives: Objectives | None = None, *, num_unsent: int = 0
) -> Summary:
    complete = [record for record in records if record.failure is None]
    interrupted = [r for r in records if r.failure and r.failure.kind is FailureKind.INTERRUPTED]
    failures: Counter[str] = Counter()
    messages: dict[str, str] = {}
    for record in records:
        if record.failure and record.failure.kind is not FailureKind.INTERRUPTED:
            failures[record.failure.label] += 1
            messages.setdefault(record.failure.label, record.failure.message)
    usages = [record.usage for record in complete if record.usage is not None]
    with_goal = objectives is not None and objectives.any
    return Summary(
        num_sent=len(records),
        num_complete=len(complete),
        failures=dict(failures.most_common()),
        failure_messages=messages,
        num_interrupted=len(interrupted),
        num_unsent=num_unsent,
        num_short=sum(record.num_output < record.num_asked for record in complete),
        span_s=_span_s(records),
        num_prompt_tokens=sum(usage.num_prompt for usage in usages),
        num_cached_tokens=sum(usage.num_cached for usage in usages),
        num_output_tokens=sum(usage.num_output for usage in usages),
        num_good=sum(map(objectives.kept_by, records)) if objectives and with_goal else None,
        ttft=spread(record.ttft_s for record in complete),
        itl=spread(gap for record in complete for gap in record.gaps_s),
        tpot=spread(record.tpot_s for record in complete),
        total=spread(record.total_s for record in complete),
        late=spread(record.late_s for record in records),
    )


def spread(values: Iterable[float | None]) -> Spread | None:
    """None if there is no value."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    return Spread(
        num=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        percentiles={share: percentile(ordered, share) for share in PERCENTILES},
        largest=ordered[-1],
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of at least one value, ascending."""
    place = (len(ordered) - 1) * share / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _span_s(records: Sequence[Record]) -> float:
    if not records:
        return 0.0
    return max(record.end_s for record in records) - min(record.sent_s for record in records)
