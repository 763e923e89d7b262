"""The flags of `kvrelay bench`, and the load that they ask for."""

import argparse
import json
import os
import re
from pathlib import Path

from cluster.bench.arrivals import Arrivals, ClosedLoop, OpenLoop, Recorded
from cluster.bench.client import EndpointKind
from cluster.bench.lengths import FORMS, parse_lengths
from cluster.bench.load import TIMEOUT_S, Load
from cluster.bench.measure import Objectives
from cluster.bench.prompts import PromptForm
from cluster.bench.trace import Trace
from cluster.bench.workload import Synthetic, Workload
from engine.errors import ConfigError

NUM_REQUESTS = 100
_BURSTINESS = 0.25
_API_KEY = "KVRELAY_API_KEY"
_MOST_IDS = 1 << 20  # far beyond every vocabulary
_MOST_TURNS = 10_000
_MOST_AT_A_TIME = 65_535  # each has a connection, and with it a port of this machine
_SYNTHETIC = ("input_tokens", "output_tokens", "prefix_share", "prefix_groups", "turns")


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", help="of an OpenAI-compatible server, like http://127.0.0.1:8000")
    server = parser.add_argument_group("server")
    server.add_argument("--model", help="default: the first that the server lists")
    server.add_argument(
        "--endpoint",
        choices=[str(kind) for kind in EndpointKind],
        default=str(EndpointKind.COMPLETIONS),
        help="default: %(default)s",
    )
    server.add_argument(
        "--api-key-env",
        metavar="NAME",
        help=f"the environment variable that has the key (default: {_API_KEY}, if it is set)",
    )
    server.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        default=TIMEOUT_S,
        help="of one request (default: %(default)g)",
    )
    _add_when(parser.add_argument_group("when requests are sent"))
    _add_what(parser.add_argument_group("what is asked"))
    out = parser.add_argument_group("what is told")
    for name, meaning in (
        ("ttft", "its first token came so soon"),
        ("itl", "99 of 100 of its gaps between tokens are so short"),
        ("tpot", "its tokens after the first took so long on average"),
    ):
        out.add_argument(
            f"--{name}-objective", type=float, metavar="MS", help=f"a request is good if {meaning}"
        )
    out.add_argument("--json", type=Path, metavar="FILE", help="all figures and every request")
    out.add_argument("--plots", type=Path, metavar="FOLDER", help="distributions and a timeline")


def _add_when(when: argparse._ArgumentGroup) -> None:
    when.add_argument("--concurrency", type=int, metavar="N", help="so many at a time (default: 1)")
    when.add_argument("--rate", type=float, metavar="R", help="so many a second, answered or not")
    when.add_argument("--arrivals", choices=["poisson", "constant", "bursty"], help="with --rate")
    when.add_argument(
        "--burstiness",
        type=float,
        metavar="SHAPE",
        help=f"of gamma-distributed intervals; less is burstier (default: {_BURSTINESS})",
    )
    when.add_argument("--requests", type=int, metavar="N", help=f"default: {NUM_REQUESTS}")
    when.add_argument("--duration", type=float, metavar="SECONDS", help="none is sent after it")
    when.add_argument("--warm-up", type=int, metavar="N", default=0, help="requests beforehand")


def _add_what(what: argparse._ArgumentGroup) -> None:
    what.add_argument("--input-tokens", metavar="LENGTHS", help=f"{FORMS} (default: 512)")
    what.add_argument("--output-tokens", metavar="LENGTHS", help="likewise (default: 64)")
    what.add_argument("--prefix-share", type=float, metavar="0..1", help="of a prompt is shared")
    what.add_argument(
        "--prefix-groups", type=int, metavar="N", help="so many shared beginnings (default: 1)"
    )
    what.add_argument("--turns", metavar="LENGTHS", help="of a conversation (default: 1)")
    what.add_argument(
        "--think-time",
        type=float,
        metavar="SECONDS",
        default=0.0,
        help="before a conversation's next turn (default: %(default)g)",
    )
    what.add_argument("--trace", type=Path, metavar="FILE", help="recorded requests, JSON lines")
    what.add_argument("--trace-speed", type=float, metavar="X", help="so many times as fast")
    what.add_argument("--trace-scale", type=float, metavar="X", help="multiplies all lengths")
    what.add_argument(
        "--prompts", choices=[str(form) for form in PromptForm], help="default: tokens, if possible"
    )
    what.add_argument(
        "--token-ids",
        metavar="FIRST-LAST",
        help="that prompts are drawn from (default: those of some words, by /tokenize)",
    )
    what.add_argument("--temperature", type=float, default=0.0, help="default: %(default)g")
    what.add_argument("--stop-at-eos", action="store_true", help="answers may be shorter")
    what.add_argument("--extra-body", metavar="JSON", help="members added to every request")
    what.add_argument("--seed", type=int, default=0, help="the same load again")


def load_of(arguments: argparse.Namespace) -> Load:
    num_requests = arguments.requests
    if num_requests is None and arguments.duration is None and arguments.trace is None:
        num_requests = NUM_REQUESTS
    for name in ("requests", "duration", "timeout"):
        _more_than_0(name, getattr(arguments, name))
    for name in ("think_time", "warm_up", "temperature"):
        if not 0 <= getattr(arguments, name) < float("inf"):
            raise ConfigError(name, "must be at least 0, and a number")
    return Load(
        url=arguments.url,
        workload=_workload(arguments),
        arrivals=_arrivals(arguments),
        num_requests=num_requests,
        duration_s=arguments.duration,
        num_warm_up=arguments.warm_up,
        seed=arguments.seed,
        think_s=arguments.think_time,
        model=arguments.model,
        endpoint=EndpointKind(arguments.endpoint),
        form=None if arguments.prompts is None else PromptForm(arguments.prompts),
        token_ids=_token_ids(arguments.token_ids),
        timeout_s=arguments.timeout,
        api_key=_api_key(arguments.api_key_env),
        ignore_eos=not arguments.stop_at_eos,
        temperature=arguments.temperature,
        extra=_extra_body(arguments.extra_body),
    )


def objectives_of(arguments: argparse.Namespace) -> Objectives:
    seconds = {}
    for name in ("ttft", "itl", "tpot"):
        value = getattr(arguments, f"{name}_objective")
        _more_than_0(f"{name}_objective", value)
        seconds[f"{name}_s"] = None if value is None else value / 1e3
    return Objectives(**seconds)


def _arrivals(arguments: argparse.Namespace) -> Arrivals:
    rate, concurrency = arguments.rate, arguments.concurrency
    _more_than_0("rate", rate)
    if concurrency is not None and not 1 <= concurrency <= _MOST_AT_A_TIME:
        raise ConfigError("concurrency", f"must be in 1..{_MOST_AT_A_TIME}")
    if rate is not None and concurrency is not None:
        raise ConfigError("rate", "not with --concurrency: requests wait for answers, or do not")
    if arguments.trace_speed is not None and (rate is not None or concurrency is not None):
        raise ConfigError("trace_speed", "not with --rate or --concurrency")
    if rate is None:
        if arguments.arrivals is not None:
            raise ConfigError("arrivals", "needs --rate")
        if arguments.burstiness is not None:
            raise ConfigError("burstiness", "needs --rate and --arrivals bursty")
        if concurrency is None and arguments.trace is not None:
            _more_than_0("trace_speed", arguments.trace_speed)
            return Recorded(arguments.trace_speed or 1.0)
        return ClosedLoop(concurrency or 1)
    return OpenLoop(rate, _burstiness(arguments))


def _burstiness(arguments: argparse.Namespace) -> float | None:
    if arguments.arrivals == "bursty":
        _more_than_0("burstiness", arguments.burstiness)
        return arguments.burstiness or _BURSTINESS
    if arguments.burstiness is not None:
        raise ConfigError("burstiness", "needs --arrivals bursty")
    return None if arguments.arrivals == "constant" else 1.0


def _workload(arguments: argparse.Namespace) -> Workload:
    if arguments.trace is not None:
        for name in _SYNTHETIC:
            if getattr(arguments, name) is not None:
                raise ConfigError(name, "not with --trace, which has lengths of its own")
        _more_than_0("trace_scale", arguments.trace_scale)
        return Trace(arguments.trace, arguments.trace_scale or 1.0).checked()
    for name in ("trace_speed", "trace_scale"):
        if getattr(arguments, name) is not None:
            raise ConfigError(name, "needs --trace")
    share, groups = arguments.prefix_share, arguments.prefix_groups
    if share is not None and not 0 <= share <= 1:
        raise ConfigError("prefix_share", "must be from 0 to 1")
    if groups is not None and share is None:
        raise ConfigError("prefix_groups", "needs --prefix-share")
    _more_than_0("prefix_groups", groups)
    return Synthetic(
        parse_lengths("input_tokens", arguments.input_tokens or "512"),
        parse_lengths("output_tokens", arguments.output_tokens or "64"),
        arguments.seed,
        share or 0.0,
        groups or 1,
        parse_lengths("turns", arguments.turns or "1", _MOST_TURNS),
    )


def _token_ids(text: str | None) -> range | None:
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]{1,9})-([0-9]{1,9})", text)
    if found is not None:
        first, last = map(int, found.groups())
        if first <= last < _MOST_IDS:
            return range(first, last + 1)
    raise ConfigError("token_ids", f"{text!r}: must be like 100-20000, and below {_MOST_IDS}")


def _api_key(given: str | None) -> str | None:
    name = given or _API_KEY
    key = os.environ.get(name)
    if given is not None and not key:
        raise ConfigError("api_key_env", f"${name} is not set, or empty")
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError("api_key_env", f"${name} has characters that no HTTP header may have")
    return key


def _extra_body(text: str | None) -> dict[str, object]:
    if text is None:
        return {}
    try:
        extra = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError("extra_body", f"no JSON: {error}") from error
    if not isinstance(extra, dict):
        raise ConfigError("extra_body", "must be an object, like '{\"top_k\": 1}'")
    return extra


def _more_than_0(field: str, value: float | None) -> None:
    if value is not None and not 0 < value < float("inf"):
        raise ConfigError(field, "must be more than 0")
