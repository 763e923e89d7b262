"""The words of the command line, as typed values."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.simulate.arrivals import Arrivals, Day
from benchmarks.simulate.azure import load_azure
from benchmarks.simulate.cluster import ClusterPlan
from benchmarks.simulate.device import H200_LLAMA_8B, Device, load_device
from benchmarks.simulate.feed import Delays
from benchmarks.simulate.figures import Objective
from benchmarks.simulate.mooncake import load_mooncake
from benchmarks.simulate.plain import PLAIN_POLICIES
from benchmarks.simulate.roster import Death
from benchmarks.simulate.synthetic import GENERATORS
from benchmarks.simulate.traffic import Request, first_seconds, sped_up
from engine.errors import ConfigError
from router.config import RouterConfig
from router.policies import POLICIES
from router.workers import Leg

OURS = "cost"
ALL_POLICIES = (*POLICIES, *PLAIN_POLICIES)


@dataclass(frozen=True)
class Source:
    """Where traffic comes from; what it imitates, if it is made up."""

    trace: Path | None
    synthetic: str
    arrivals: Arrivals
    seconds: float | None
    seed: int

    def requests(self, speed: float) -> list[Request]:
        """A generator is asked for so many times the rate; a trace runs so many times as fast."""
        requests = self._requests(speed)
        if not requests:
            raise ConfigError("seconds", "no request comes in them")
        return requests

    def _requests(self, speed: float) -> list[Request]:
        if self.trace is None:
            rate = self.arrivals.rate * speed
            faster = Arrivals(
                rate, self.arrivals.seconds, self.arrivals.burstiness, self.arrivals.day
            )
            return GENERATORS[self.synthetic]().requests(faster, self.seed)
        load = load_azure if self.trace.suffix == ".csv" else load_mooncake
        requests = load(self.trace) if load is load_azure else load_mooncake(self.trace, self.seed)
        return first_seconds(sped_up(requests, speed), self.seconds)


def add_traffic(parser: argparse.ArgumentParser, speed: float | None) -> None:
    group = parser.add_argument_group("traffic")
    group.add_argument("--trace", type=Path, help="Mooncake's format (.jsonl) or Azure's (.csv)")
    group.add_argument(
        "--synthetic", choices=tuple(GENERATORS), default="sessions", help="without a trace"
    )
    group.add_argument("--rate", type=_above_0, default=3.4, help="synthetic requests a second")
    group.add_argument("--seconds", type=_above_0, help="of traffic; 600 of synthetic one")
    group.add_argument("--burstiness", type=_above_0, default=1.0, help="shape of the intervals")
    group.add_argument(
        "--day", type=_day, default=Day(), metavar="DEPTH:PERIOD", help="a rate that swings"
    )
    group.add_argument("--speed", type=_above_0, default=speed, help="so many times as fast")
    group.add_argument("--seed", type=int, default=0)


def source_of(words: argparse.Namespace) -> Source:
    arrivals = Arrivals(words.rate, words.seconds or 600.0, words.burstiness, words.day)
    return Source(words.trace, words.synthetic, arrivals, words.seconds, words.seed)


def add_cluster(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("cluster")
    group.add_argument("--device", type=Path, default=H200_LLAMA_8B, help="parameters (TOML)")
    group.add_argument("--prefill", type=int, default=8)
    group.add_argument("--decode", type=int, default=5)
    group.add_argument("--prefill-step-tokens", type=int, default=8192)
    group.add_argument("--decode-step-tokens", type=int, default=512)
    group.add_argument("--max-sequences", type=int, default=256)
    group.add_argument("--routers", type=int, default=1, help="of each cell")
    group.add_argument("--event-delay", type=_at_least_0, default=0.01, help="seconds")
    group.add_argument("--report-delay", type=_at_least_0, default=0.001, help="seconds")
    group.add_argument("--report-period", type=_above_0, default=0.5, help="seconds")
    group.add_argument(
        "--death", type=_death, action="append", default=[], metavar="AT:LEG:NUMBER[:RESTART]",
        help="a worker dies, and one in its place is there RESTART seconds after",
    )  # fmt: skip
    group.add_argument("--alpha", type=_above_0, default=3.0)
    group.add_argument("--refuse", action="store_true", help="what cannot keep the TTFT objective")
    group.add_argument("--ttft", type=_above_0, default=2.0, help="objective, seconds")
    group.add_argument("--tpot", type=_above_0, default=0.025, help="objective, seconds")


def plan_of(words: argparse.Namespace) -> ClusterPlan:
    return ClusterPlan(
        num_prefill=words.prefill,
        num_decode=words.decode,
        prefill_step_tokens=words.prefill_step_tokens,
        decode_step_tokens=words.decode_step_tokens,
        max_sequences=words.max_sequences,
        num_routers=words.routers,
        delays=Delays(words.event_delay, words.report_delay, words.report_period),
        deaths=tuple(words.death),
        router=RouterConfig(
            alpha=words.alpha,
            ttft_objective_s=words.ttft if words.refuse else None,
            inter_token_objective_s=words.tpot,
        ),
        seed=words.seed,
    )


def objective_of(words: argparse.Namespace) -> Objective:
    return Objective(words.ttft, words.tpot)


def device_of(words: argparse.Namespace) -> Device:
    return load_device(words.device)


def add_output(parser: argparse.ArgumentParser, *, pictures: bool) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", type=Path, help="all figures")
    if pictures:
        group.add_argument("--plots", type=Path, help="a folder for pictures (PNG)")


def _above_0(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return value


def _at_least_0(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be at least 0")
    return value


def share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0, and at most 1")
    return value


def _day(text: str) -> Day:
    depth, _, period = text.partition(":")
    try:
        day = Day(float(depth), float(period or 86_400))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: must be DEPTH or DEPTH:PERIOD") from error
    if not 0 <= day.depth < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: the depth must be from 0 to below 1")
    if not 0 < day.period_s < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: the period must be above 0")
    return day


def _death(text: str) -> Death:
    words = text.split(":")
    try:
        at, leg, number, *restart = words
        (restart_s,) = map(_at_least_0, restart) if restart else (None,)
        return Death(_at_least_0(at), Leg(leg), int(number), restart_s)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be SECONDS:prefill|decode:NUMBER[:SECONDS]"
        ) from error


def parse_numbers(field: str, text: str) -> Sequence[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError as error:
        raise ConfigError(field, f"{text!r}: must be whole numbers with commas") from error
    if min(numbers) < 1:
        raise ConfigError(field, f"{text!r}: every one must be at least 1")
    return numbers
