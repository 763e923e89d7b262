"""What a run came to, for programs: everything that was asked for, all figures, every request."""

from dataclasses import asdict
from typing import Any

from cluster.bench.load import Load, Outcome
from cluster.bench.measure import Objectives, Spread, Summary
from cluster.bench.record import Record
from protos.version import version

FORMAT = 1  # rises when a key changes its meaning


def as_json(
    load: Load, outcome: Outcome, summary: Summary, objectives: Objectives
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "kvrelay": version(),
        "url": load.url,
        "model": outcome.model,
        "endpoint": load.endpoint,
        "prompts": outcome.form,
        "load": {
            "workload": {"kind": type(load.workload).__name__, **_plain(load.workload)},
            "arrivals": {"kind": type(load.arrivals).__name__, **_plain(load.arrivals)},
            "requests": load.num_requests,
            "duration_s": load.duration_s,
            "warm_up": load.num_warm_up,
            "seed": load.seed,
            "think_s": load.think_s,
            "temperature": load.temperature,
            "ignore_eos": load.ignore_eos,
            "extra": load.extra,
        },
        "objectives": asdict(objectives),
        "interrupted": outcome.interrupted,
        "gone": outcome.gone,
        "summary": _summary(summary),
        "records": [_record(record, outcome.start_s) for record in outcome.records],
    }


def _plain(value: Any) -> dict[str, Any]:
    return {
        name: item if isinstance(item, int | float | dict | None) else str(item)
        for name, item in asdict(value).items()
    }


def _summary(summary: Summary) -> dict[str, Any]:
    rates = {
        "requests_per_s": summary.requests_per_s,
        "prompt_tokens_per_s": summary.prompt_tokens_per_s,
        "output_tokens_per_s": summary.output_tokens_per_s,
        "goodput_per_s": summary.goodput_per_s,
    }
    spreads = {
        name: None if values is None else _spread(values)
        for name, values in {
            "ttft_s": summary.ttft,
            "itl_s": summary.itl,
            "tpot_s": summary.tpot,
            "total_s": summary.total,
            "late_s": summary.late,
        }.items()
    }
    counts = {
        name: value
        for name, value in vars(summary).items()
        if name not in ("ttft", "itl", "tpot", "total", "late")
    }
    return counts | rates | spreads


def _spread(values: Spread) -> dict[str, float]:
    percentiles = {f"p{share}": value for share, value in values.percentiles.items()}
    return {"num": values.num, "mean": values.mean, **percentiles, "max": values.largest}


def _record(record: Record, start_s: float) -> dict[str, Any]:
    def since(at_s: float | None) -> float | None:
        return None if at_s is None else round(at_s - start_s, 6)

    return {
        "conversation": record.conversation,
        "turn": record.turn,
        "asked_tokens": record.num_asked,
        "due_s": since(record.due_s),
        "sent_s": since(record.sent_s),
        "first_s": since(record.first_s),
        "last_s": since(record.last_s),
        "end_s": since(record.end_s),
        "largest_gap_s": round(max(record.gaps_s), 6) if record.gaps_s else None,
        "usage": None if record.usage is None else asdict(record.usage),
        "failure": None if record.failure is None else asdict(record.failure),
    }
