"""Flags of the HTTP front: where it listens, who is let in, how much one request may ask."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cluster.api_keys import VARIABLE
from cluster.front_address import HTTP_PORT, LOOPBACK
from cluster.front_args import FrontArgs
from cluster.openai.reading.formats import REASONING_PARSERS, TOOL_PARSERS

_PREFIX = "front_"
_HELP = {
    "api_key_file": f"keys of those who are let in, one a line, for its owner's eyes only; or the "
    f"variable {VARIABLE}",
    "requests_per_minute": "of each key",
    "tokens_per_minute": "of each key, read and written",
    "max_prompt_tokens": "of each prompt (default: what the model takes)",
    "chat_template": "Jinja, instead of the model's own",
    "tool_call_parser": f"how tool calls are written: {', '.join(TOOL_PARSERS)}, none, or auto",
    "reasoning_parser": f"how reasoning is written: {', '.join(REASONING_PARSERS)}, none, or auto",
    "max_n": "choices of one prompt",
    "max_prompts": "prompts of one request",
    "least_priority": "the lowest `priority`, which is the soonest, that a request may have "
    "(default: 0 where there are keys, any where there are none)",
}
_FILES = ("api_key_file", "chat_template")
_METAVARS = {
    **dict.fromkeys(_FILES, "FILE"),
    **dict.fromkeys(("tool_call_parser", "reasoning_parser"), "NAME"),
}


def add_front_flags(parser: argparse.ArgumentParser) -> None:
    http = parser.add_argument_group("HTTP")
    http.add_argument("--host", help=f"address to listen on (default: {LOOPBACK})")
    http.add_argument("--port", type=int, help=f"0: any that is free (default: {HTTP_PORT})")
    http.add_argument("--served-model-name", nargs="+", metavar="NAME", help="names in requests")
    http.add_argument(
        "--allow-unauthenticated",
        action="store_true",
        default=None,
        dest=_PREFIX + "allow_unauthenticated",
        help="listen beyond this machine, to whoever asks",
    )
    http.add_argument(
        "--allowed-origins",
        nargs="+",
        metavar="ORIGIN",
        dest=_PREFIX + "allowed_origins",
        help="of web pages whose scripts may ask, like https://chat.example; *: of any",
    )
    http.add_argument("--max-body-bytes", type=int, metavar="N")
    http.add_argument("--request-timeout", type=float, metavar="SECONDS")
    for name, text in _HELP.items():
        default = FrontArgs.model_fields[name].default
        http.add_argument(
            "--" + name.replace("_", "-"),
            dest=_PREFIX + name,
            type=str if name in _METAVARS else int,
            metavar=_METAVARS.get(name, "N"),
            help=text if default is None else f"{text} (default: {default})",
        )


def given_http_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {
        "request_timeout_s": arguments.request_timeout,
        "max_body_bytes": arguments.max_body_bytes,
    }
    return {name: value for name, value in given.items() if value is not None}


def given_front_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """Those that were said; a path is the same wherever it is read."""
    given = {
        name.removeprefix(_PREFIX): value
        for name, value in vars(arguments).items()
        if name.startswith(_PREFIX) and value is not None
    }
    paths = {name: str(Path(given[name]).absolute()) for name in _FILES if name in given}
    return {**given, **paths}
