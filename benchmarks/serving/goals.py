"""The goals that figures are held against: ratios of two systems, bounds, and that nothing is
missing."""

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.serving.results import Results
from benchmarks.serving.systems import (
    AUTO,
    BY_COST,
    COLOCATED,
    EMPTY,
    IN_TURN,
    NEVER,
    RAY_LLM,
    VLLM,
    VLLM_PAIR,
)

_RATE, _FIRST, _TOKEN = "tokens/s", "mean first token, ms", "median token, ms"
_STREAMS, _ONE = "32 in, 64 out", "32 in, 1 out"


class Ratio(NamedTuple):
    part: str
    case: str
    figure: str
    system: str
    against: str
    least: float | None = None
    most: float | None = None


class Bound(NamedTuple):
    part: str
    case: str
    figure: str
    system: str
    most: float


class Whole(NamedTuple):
    part: str
    case: str
    figure: str
    of: str
    system: str


RATIOS = (
    *(Ratio("load", case, _RATE, AUTO, RAY_LLM, least=2.5) for case in ("8", "32")),
    *(Ratio("load", case, _RATE, AUTO, VLLM_PAIR, least=2.0) for case in ("8", "32")),
    *(Ratio("load", case, _RATE, NEVER, VLLM_PAIR, least=1.6) for case in ("8", "32")),
    *(
        Ratio("load", "1", figure, AUTO, peer, most=0.5)
        for peer in (RAY_LLM, VLLM_PAIR)
        for figure in (_FIRST, _TOKEN)
    ),
    Ratio("load", "32", _RATE, AUTO, VLLM, least=1.0),
    Ratio("load", "32", _FIRST, AUTO, VLLM, most=1.0),
    *(Ratio("load", case, _RATE, COLOCATED, VLLM, least=1.2) for case in ("8", "32")),
    *(Ratio("load", case, _FIRST, COLOCATED, VLLM, most=1.0) for case in ("8", "32")),
    Ratio("load", "32", _RATE, AUTO, COLOCATED, least=0.8),
    *(
        Ratio("steady", "8 + prompts", "p99 gap, ms", system, against, most=1 / 3)
        for system in (AUTO, NEVER)
        for against in (COLOCATED, VLLM)
    ),
    Ratio("http", _STREAMS, _RATE, AUTO, VLLM, least=2.0),
    Ratio("http", _ONE, "requests/s", AUTO, VLLM, least=1.5),
    Ratio("routing", "1 a second", "median first token, ms", BY_COST, IN_TURN, most=0.5),
    Ratio("http", _STREAMS, _RATE, AUTO, EMPTY),
    Ratio("http", _ONE, "requests/s", AUTO, EMPTY),
)
BOUNDS = (
    Bound("added", "1", "added, ms", AUTO, 10.0),
    Bound("added", "1", "added, ms", NEVER, 10.0),
    Bound("added", "1", "added, ms", COLOCATED, 10.0),
    Bound("start", "llama-125m", "first token, s", AUTO, 25.0),
    Bound("start", "llama-125m", "beyond them, MB", AUTO, 3000.0),
)
WHOLES = (Whole("streams", "1,000", "complete", "of", AUTO),)


def rows(results: Results) -> Iterator[dict[str, object]]:
    """Of the goals for which there are figures."""
    for ratio in RATIOS:
        ours = results.value(ratio.part, ratio.system, ratio.case, ratio.figure)
        theirs = results.value(ratio.part, ratio.against, ratio.case, ratio.figure)
        if ours is not None and theirs:
            yield {
                "what": f"{ratio.part}, {ratio.case}: {ratio.figure}",
                "of": f"{ratio.system} / {ratio.against}",
                "is": f"{ours / theirs:.2f} x",
                "goal": _goal(ratio),
                "kept": _kept(ours / theirs, ratio.least, ratio.most),
            }
    for bound in BOUNDS:
        ours = results.value(bound.part, bound.system, bound.case, bound.figure)
        if ours is not None:
            yield {
                "what": f"{bound.part}, {bound.case}: {bound.figure}",
                "of": bound.system,
                "is": f"{ours:,.1f}",
                "goal": f"<= {bound.most:g}",
                "kept": _kept(ours, None, bound.most),
            }
    for whole in WHOLES:
        ours = results.value(whole.part, whole.system, whole.case, whole.figure)
        every = results.value(whole.part, whole.system, whole.case, whole.of)
        if ours is not None and every is not None:
            yield {
                "what": f"{whole.part}, {whole.case}: {whole.figure}",
                "of": whole.system,
                "is": f"{ours:,.0f} of {every:,.0f}",
                "goal": "all",
                "kept": _kept(ours, every, None),
            }


def _goal(ratio: Ratio) -> str:
    if ratio.least is not None:
        return f">= {ratio.least:g} x"
    return "-" if ratio.most is None else f"<= {ratio.most:.2g} x"


def _kept(value: float, least: float | None, most: float | None) -> str:
    if least is None and most is None:
        return "-"
    within = (least is None or value >= least) and (most is None or value <= most)
    return "yes" if within else "no"
