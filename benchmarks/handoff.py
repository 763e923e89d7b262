"""What a hand-off costs: first tokens with and without it, and pairs of workers under load.

    python -m benchmarks.handoff [--vllm-python VENV/bin/python] [--json FILE]

`first-token`: the same decode worker computes a prompt itself and has it computed by a prefill
worker beside it, in turns; `hidden` is the share of the bytes that had arrived before the prompt
was computed to its end. `load`: completions over HTTP, so many at a time, on our pair (local
prefill allowed, and strictly remote) and on vLLM's own pair, beside which ours are set.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import machine, table
from benchmarks.model_folder import write_model
from benchmarks.pairs import Workers, our_front, our_workers, vllm_pair
from benchmarks.sides import add_vllm_arguments, chosen_vllm
from benchmarks.tokenizer_folder import write_tokenizer
from benchmarks.workloads import SMALL, Workload
from cluster.bench.arrivals import ClosedLoop
from cluster.bench.lengths import Fixed
from cluster.bench.load import Load, run_load
from cluster.bench.measure import Summary, summarise
from cluster.bench.workload import Synthetic
from cluster.metrics.names import PREFIX
from cluster.session import SessionBackend, SessionBroken
from decode_worker.answerer import LocalPrefill, PrefillCandidate, Route
from engine.request import GenerationRequest, RequestId
from engine.sampling import SamplingParams
from protos.rpc import Plane

PROMPT_LENGTHS = (128, 512, 2048, 8000)
LONG = 16384
PROMPT, OUTPUT = 512, 64
REQUESTS = {1: 6, 8: 32, 32: 64}  # by concurrency
VLLM_PAIR = "vLLM 1P1D"
RATE, FIRST, TOKEN = "tokens/s", "mean first token, ms", "median token, ms"
SPINNING = f"{VLLM_PAIR}: its NIXL progress threads spin on the cores on which it computes"
TRIES, REOPENED_S = 3, 30.0
ANOTHER = 1000  # seed, which no turn has
Row = dict[str, Any]
_serial = count()


async def first_token_s(
    session: SessionBackend, prefill: str, num_tokens: int, mode: LocalPrefill, seed: int
) -> float:
    (prompt,) = Workload(f"{mode} {num_tokens}", SMALL, 1, num_tokens, 1).prompts(seed)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    request = GenerationRequest(RequestId(f"r{next(_serial)}"), prompt, params)
    route = Route((PrefillCandidate(prefill),), (), mode)
    started = time.perf_counter()
    stream = session.submit(request, route)
    async for _ in stream:
        pass
    stream.close()
    return time.perf_counter() - started


async def told_first_token_s(
    session: SessionBackend, prefill: str, num_tokens: int, mode: LocalPrefill, turn: int
) -> float:
    """Asks again, by a prompt that nobody has seen, where the session broke: on cores that others
    keep busy too a worker may not answer a ping within its second."""
    for attempt in range(TRIES):
        try:
            seed = turn + attempt * ANOTHER
            return await first_token_s(session, prefill, num_tokens, mode, seed)
        except SessionBroken as error:
            print(f"asked again: {error.detail}", file=sys.stderr)
            async with asyncio.timeout(REOPENED_S):
                while not session.is_open:
                    await asyncio.sleep(0.1)
    raise RuntimeError(f"the session broke {TRIES} times; is the machine busy?")


class Pulled(NamedTuple):
    """By a decode worker until now, as its page of metrics says."""

    num_bytes: float
    num_hidden: float

    @classmethod
    def read(cls, url: str) -> Self:
        families = text_string_to_metric_families(httpx.get(url).raise_for_status().text)
        samples = [sample for family in families for sample in family.samples]
        names = [f"{PREFIX}handoff_{which}_total" for which in ("bytes", "hidden_bytes")]
        return cls(*(sum(s.value for s in samples if s.name == name) for name in names))

    def hidden_share_since(self, before: "Pulled") -> float:
        num_bytes = self.num_bytes - before.num_bytes
        return (self.num_hidden - before.num_hidden) / num_bytes if num_bytes else 0.0


async def measure_first_tokens(workers: Workers, repeats: int, token_bytes: int) -> list[Row]:
    session = SessionBackend(workers.decode, Plane())
    await session.start()
    rows = []
    for num_tokens in PROMPT_LENGTHS:
        before = await asyncio.to_thread(Pulled.read, workers.metrics)
        times: dict[LocalPrefill, list[float]] = {LocalPrefill.ALWAYS: [], LocalPrefill.NEVER: []}
        for turn in range(repeats + 1):
            for mode, known in times.items():
                seconds = await told_first_token_s(session, workers.prefill, num_tokens, mode, turn)
                if turn:  # the first is for what both warm up
                    known.append(seconds)
        here, there = (statistics.median(values) for values in times.values())
        exposed = there - here
        now = await asyncio.to_thread(Pulled.read, workers.metrics)
        rows.append(
            {
                "tokens": num_tokens,
                "one process, ms": here * 1e3,
                "handed over, ms": there * 1e3,
                "exposed, ms": exposed * 1e3,
                "goal, ms": max(5.0, 50 * here),
                "bytes": num_tokens * token_bytes,
                "hidden": f"{now.hidden_share_since(before):.0%}",
            }
        )
        print(_line(rows[-1]), file=sys.stderr)
    await session.stop()
    return rows


def measure_load(
    url: str, model: Path, concurrency: int, num_requests: int, lengths: tuple[int, int], seed: int
) -> Summary:
    """Every answer must be whole, or there is no figure."""
    load = Load(
        url,
        Synthetic(Fixed(lengths[0]), Fixed(lengths[1])),
        ClosedLoop(concurrency),
        num_requests,
        model=str(model),
        token_ids=range(3, SMALL.vocab_size),
        seed=seed,
    )
    summary = summarise(asyncio.run(run_load(load)).records)
    if summary.num_complete != num_requests or summary.num_short:
        raise RuntimeError(
            f"{summary.num_complete} of {num_requests} answers, {summary.num_short} of them "
            f"short; {summary.failure_messages}"
        )
    return summary


def load_rows(side: str, url: str, model: Path, repeats: int, seeds: Iterator[int]) -> list[Row]:
    """With prompts that nobody has seen: the sides share workers, and those have caches."""
    measure_load(url, model, 2, 2, (64, 4), next(seeds))
    rows: list[Row] = []
    for concurrency, num_requests in REQUESTS.items():
        turns = [
            measure_load(url, model, concurrency, num_requests, (PROMPT, OUTPUT), next(seeds))
            for _ in range(repeats)
        ]
        first = [turn.ttft for turn in turns if turn.ttft]
        token = [turn.tpot for turn in turns if turn.tpot]
        rows.append(
            {
                "pair": side,
                "at a time": concurrency,
                RATE: statistics.median(turn.output_tokens_per_s for turn in turns),
                FIRST: statistics.median(spread.mean for spread in first) * 1e3,
                TOKEN: statistics.median(spread.median for spread in token) * 1e3,
            }
        )
        print(_line(rows[-1]), file=sys.stderr)
    return rows


def beside_peer(rows: Sequence[Row]) -> list[Row]:
    """With what each figure is of the peer's at the same load, where the peer was measured."""
    theirs = {row["at a time"]: row for row in rows if row["pair"] == VLLM_PAIR}
    return [
        row
        if (peer := theirs.get(row["at a time"])) is None
        else row
        | {f"{name} / {VLLM_PAIR}": row[name] / peer[name] for name in (RATE, FIRST, TOKEN)}
        for row in rows
    ]


def as_text(rows: Sequence[Row]) -> str:
    heads = list(rows[0])
    return table.lines([heads, *([_cell(row.get(head, "-")) for head in heads] for row in rows)])


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def _line(row: Row) -> str:
    return ", ".join(f"{name} {_cell(value)}" for name, value in row.items())


def write_models(folder: Path) -> tuple[Path, Path]:
    """The model as the peers get it, and the same with room for longer prompts."""
    short, long = folder / SMALL.name, folder / f"{SMALL.name}-long"
    write_model(short, SMALL)
    write_tokenizer(short, SMALL.vocab_size)
    if not long.exists():
        long.mkdir()
        for file in short.iterdir():
            (long / file.name).symlink_to(file)
        (long / "config.json").unlink()
        config = json.loads((short / "config.json").read_text())
        (long / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LONG}))
    return short, long


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, list[Row]]:
    models = folder / "models"
    models.mkdir(parents=True, exist_ok=True)
    short, long = write_models(models)
    repeats, parts = arguments.repeats, arguments.part or ["first-token", "load"]
    flags = {
        "prefill": [*arguments.engine, *arguments.prefill_engine],
        "decode": [*arguments.engine, *arguments.decode_engine],
    }
    results: dict[str, list[Row]] = {}
    if "first-token" in parts:
        with our_workers(long, folder, flags) as workers:
            results["first-token"] = asyncio.run(
                measure_first_tokens(workers, repeats, SMALL.kv_token_bytes)
            )
    if "load" in parts:
        rows: list[Row] = []
        seeds = count()
        with our_workers(short, folder, flags) as workers:
            for name, mode in (("kvrelay", "auto"), ("kvrelay, strictly remote", "never")):
                with our_front(short, folder, workers, mode) as url:
                    rows += load_rows(name, url, short, repeats, seeds)
        if peer := chosen_vllm(arguments):
            with vllm_pair(peer, short, folder) as url:
                rows += load_rows(VLLM_PAIR, url, short, repeats, seeds)
        results["load"] = beside_peer(rows)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_vllm_arguments(parser)
    parser.add_argument("--part", action="append", choices=["first-token", "load"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engine", nargs="*", default=[], help="flags of both our workers")
    for role in ("prefill", "decode"):
        parser.add_argument(f"--{role}-engine", nargs="*", default=[], help=f"of the {role} worker")
    parser.add_argument("--work-dir", type=Path, help="keeps models for later")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        results = run(arguments, arguments.work_dir or Path(temporary))
    print(f"python -m benchmarks.handoff {' '.join(sys.argv[1:])}")
    print("machine:", ", ".join(f"{k} {v}" for k, v in machine.describe().items()))
    for name, rows in results.items():
        print(f"\n{name}\n{as_text(rows)}")
        if any(row.get("pair") == VLLM_PAIR for row in rows):
            print(SPINNING)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
