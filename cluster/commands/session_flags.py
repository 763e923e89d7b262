"""Flags of commands that answer with an engine of their own, or with a decode worker's."""

import argparse
from collections.abc import Callable, Sequence

from cluster.commands.engine_flags import given_knobs
from cluster.commands.plane_flags import (
    add_plane_flags,
    given_plane_flags,
    load_plane,
    plane_errors_as_config_errors,
)
from cluster.local_engine import LocalEngine, load_local_engine
from cluster.remote_engine import RemoteEngine
from cluster.served_model import ServedModel
from cluster.session import SessionBackend
from cluster.text_side import load_text_side
from decode_worker.answerer import LocalPrefill, PrefillCandidate, Route
from engine.config import EngineConfig
from engine.errors import ConfigError
from protos.address import Address
from protos.rpc import RpcConfig

# The knobs that mean something where there is no engine: they find the tokenizer.
_OF_TEXT = {"revision", "download_dir"}


def add_session_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a worker's engine instead of one here")
    group.add_argument("--session", metavar="HOST:PORT", help="a decode worker that answers")
    group.add_argument(
        "--prefill",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="a worker that may compute the prompt for it; may be repeated, the first is best",
    )
    group.add_argument(
        "--local-prefill",
        choices=[mode.name.lower() for mode in LocalPrefill],
        help="whether the decode worker computes prompts itself (default: auto, where sooner)",
    )
    add_plane_flags(parser)


def open_engine(
    arguments: argparse.Namespace,
    config: EngineConfig,
    names: Sequence[str] = (),
    chat_template: str | None = None,
    check: Callable[[ServedModel], object] | None = None,
) -> LocalEngine | RemoteEngine:
    """`check` is called before an engine is loaded here."""
    plane_flags = given_plane_flags(arguments)
    if arguments.session is None:
        given = {"prefill": arguments.prefill, "local_prefill": arguments.local_prefill}
        for name in [*(name for name, value in given.items() if value), *plane_flags]:
            raise ConfigError(name, "needs --session")
        return load_local_engine(config, names, chat_template, check)
    for name in given_knobs(arguments):
        if name not in _OF_TEXT:
            raise ConfigError(name, "is the worker's own; not with --session")
    plane = load_plane(RpcConfig(**plane_flags))
    with plane_errors_as_config_errors():
        address = str(Address.parse(arguments.session, "session"))
        candidates = [str(Address.parse(text, "prefill")) for text in arguments.prefill]
    mode = LocalPrefill[(arguments.local_prefill or LocalPrefill.AUTO.name).upper()]
    if mode is LocalPrefill.NEVER and not candidates:
        raise ConfigError("local_prefill", "'never' needs --prefill")
    route = Route(
        tuple(PrefillCandidate(candidate) for candidate in candidates), local_prefill=mode
    )
    text = load_text_side(config, names, chat_template, weights=False)
    return RemoteEngine(SessionBackend(address, plane, route=route), text)
