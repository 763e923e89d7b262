"""Flags of what can be seen from outside: lines of log, and where metrics are."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, get_args

from cluster.log_format import LogFormat


def add_log_flags(parser: argparse.ArgumentParser, *, of_requests: bool = True) -> None:
    """`of_requests`: of a process that answers them."""
    seen = parser.add_argument_group("logs")
    seen.add_argument("--log-format", choices=get_args(LogFormat), help="default: text")
    if not of_requests:
        return
    seen.add_argument(
        "--log-requests",
        action="store_true",
        default=None,
        help="a line for each request that has ended; never what it says",
    )


def add_metrics_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--metrics-targets-file",
        metavar="FILE",
        help="where every ingress writes, on its machine, which pages Prometheus is to read",
    )


def given_log_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {"format": arguments.log_format, "requests": arguments.log_requests}
    return {name: value for name, value in given.items() if value is not None}


def given_targets_file(arguments: argparse.Namespace) -> str | None:
    file = arguments.metrics_targets_file
    return None if file is None else str(Path(file).absolute())
