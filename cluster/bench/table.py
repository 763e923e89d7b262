"""What a run came to, for people. Pure."""

from collections.abc import Sequence

from cluster.bench.load import Load, Outcome
from cluster.bench.measure import PERCENTILES, Objectives, Spread, Summary

# A generator that is later than this adds visibly to what it measures.
_LATE_S = 0.01
_WIDTH = 160  # of a line that quotes a server


def as_text(load: Load, outcome: Outcome, summary: Summary, objectives: Objectives) -> str:
    state = "interrupted; so far" if outcome.interrupted else "complete"
    if outcome.gone:
        state = "ENDED before its time, since nobody answers there any more"
    lines = [f"{load.url}, model {outcome.model}, prompts as {outcome.form}: {state}", ""]
    lines += _aligned(_counts(summary)) + _failures(summary)
    times = _spreads(summary)
    if len(times) > 1:
        lines += ["", *_aligned(times)]
    if summary.num_good is not None:
        lines += ["", _goodput(summary, objectives)]
    lines += _remarks(summary)
    return "\n".join(lines)


def _counts(summary: Summary) -> list[list[str]]:
    num_prompt, num_cached = summary.num_prompt_tokens, summary.num_cached_tokens
    num_output = summary.num_output_tokens
    rows = [
        ["requests", f"{summary.num_complete:,}", f"{summary.requests_per_s:,.2f}/s"],
        ["prompt tokens", f"{num_prompt:,}", f"{summary.prompt_tokens_per_s:,.1f}/s"],
        ["of these cached", f"{num_cached:,}", f"{num_cached / max(1, num_prompt):.0%}"],
        ["output tokens", f"{num_output:,}", f"{summary.output_tokens_per_s:,.1f}/s"],
        ["seconds", f"{summary.span_s:,.2f}", ""],
    ]
    if summary.num_interrupted:
        rows.append(["interrupted", f"{summary.num_interrupted:,}", "not in the figures"])
    if summary.num_unsent:
        rows.append(["not sent", f"{summary.num_unsent:,}", "the turn before had failed"])
    return rows


def _failures(summary: Summary) -> list[str]:
    return [
        f"FAILED {count:,} x {label}: {summary.failure_messages[label]}".replace("\n", " ")[:_WIDTH]
        for label, count in summary.failures.items()
    ]


def _spreads(summary: Summary) -> list[list[str]]:
    named = {
        "time to first token": summary.ttft,
        "inter-token": summary.itl,
        "per output token": summary.tpot,
        "end to end": summary.total,
        "sent late": summary.late,
    }
    heads = ["ms", "mean", *(f"p{share}" for share in PERCENTILES), "max", "values"]
    return [heads, *(_spread(name, values) for name, values in named.items() if values)]


def _spread(name: str, values: Spread) -> list[str]:
    times = [values.mean, *(values.percentiles[share] for share in PERCENTILES), values.largest]
    return [name, *map(milliseconds, times), f"{values.num:,}"]


def milliseconds(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.1f}" if value >= 10 else f"{value:.2f}"


def _goodput(summary: Summary, objectives: Objectives) -> str:
    limits = {
        "first token": objectives.ttft_s,
        "p99 inter-token": objectives.itl_s,
        "per output token": objectives.tpot_s,
    }
    said = ", ".join(f"{name} {limit * 1e3:g} ms" for name, limit in limits.items() if limit)
    share = (summary.num_good or 0) / max(1, summary.num_sent)
    return f"goodput {summary.goodput_per_s or 0:,.2f} requests/s, {share:.1%} of all ({said})"


def _remarks(summary: Summary) -> list[str]:
    remarks = []
    if summary.num_short:
        remarks.append(f"{summary.num_short:,} answers are shorter than was asked for")
    if summary.late is not None and summary.late.percentiles[99] > _LATE_S:
        remarks.append(
            "this machine could not send in time (see `sent late`): the load was less than asked "
            "for, and times contain the generator's own delay"
        )
    return ["", *remarks] if remarks else []


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left, the others to the right, but for words at the end."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        ).rstrip()
        for row in rows
    ]
