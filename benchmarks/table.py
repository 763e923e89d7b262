"""The figures as a value for JSON, and as a table to read."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.bounds import Limits
from benchmarks.figures import FIGURES, Answer
from benchmarks.sides import OURS, VLLM

Samples = Mapping[str, Mapping[str, Sequence[Answer]]]  # by workload, then by engine

HEADINGS = ("workload", "figure", "unit", "kvrelay", "vLLM", "ratio", "limit", "share of limit")


def rows(samples: Samples, limits: Limits) -> list[dict[str, Any]]:
    """One for each figure that was measured; what was not is None."""
    table = []
    for figure in FIGURES:
        answers = samples.get(figure.workload)
        if not answers:
            continue
        values = {side: [figure.value(a) for a in runs] for side, runs in answers.items()}
        ours, theirs = (
            figure.of(answers[side]) if answers.get(side) else None for side in (OURS, VLLM)
        )
        limit = figure.limit(limits) if figure.limit else None
        table.append(
            {
                "workload": figure.workload,
                "figure": figure.label,
                "unit": figure.unit,
                "kvrelay": ours,
                "vLLM": theirs,
                "ratio": figure.advantage(ours, theirs) if ours and theirs else None,
                "limit": limit,
                "share of limit": figure.share(ours, limit) if ours and limit else None,
                "values": values,
            }
        )
    return table


def as_text(table: Sequence[Mapping[str, Any]]) -> str:
    return lines([HEADINGS, *(_cells(row) for row in table)])


def lines(cells: Sequence[Sequence[str]]) -> str:
    """Headings first, then the rows."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    text = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    text.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(text)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["workload"],
        row["figure"],
        row["unit"],
        _number(row["kvrelay"]),
        _number(row["vLLM"]),
        "-" if row["ratio"] is None else f"{row['ratio']:.2f} x",
        _number(row["limit"]),
        "-" if row["share of limit"] is None else f"{row['share of limit']:.0%}",
    )


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
