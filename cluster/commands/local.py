"""`kvrelay local`: one engine, or one decode worker, behind OpenAI's HTTP API, without Ray."""

import argparse
import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import replace

import uvicorn

from cluster.access import check_access
from cluster.api_keys import ApiKeys
from cluster.bounded_http import ReadHttp
from cluster.commands.console import say, show_progress
from cluster.commands.engine_flags import add_engine_flags, engine_config
from cluster.commands.front_flags import add_front_flags, given_front_flags, given_http_flags
from cluster.commands.seen_flags import add_log_flags, given_log_flags
from cluster.commands.session_flags import add_session_flags, open_engine
from cluster.commands.signals import ending_signals
from cluster.front import Front
from cluster.front_address import HTTP_PORT, LOOPBACK, front_url, listen
from cluster.front_args import FrontArgs, HttpArgs
from cluster.garbage import leave_out_what_stays
from cluster.http import build_app
from cluster.http_exchange import HttpLimits
from cluster.local_engine import LocalEngine
from cluster.log_format import LogArgs
from cluster.metrics.meter import Meter
from cluster.open_files import raise_limit, tell_rarely
from cluster.remote_engine import RemoteEngine
from cluster.validation import checked
from engine.errors import ConfigError, UnavailableError
from protos.address import Address
from protos.errors import PlaneError
from protos.port import reserved

# After the first Ctrl-C: nothing new, and this long for answers under way.
_GRACE_S = 8
_FORCE_S = 10
_IDLE_CONNECTION_S = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", default="bundled", help="folder, Hugging Face id (default: bundled)"
    )
    add_front_flags(parser)
    add_session_flags(parser)
    add_log_flags(parser)
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    config = engine_config(arguments)
    limits = _http_limits(arguments)
    names = arguments.served_model_name or []
    if not all(names):
        raise ConfigError("served_model_name", "must not be empty")
    front = checked(FrontArgs, given_front_flags(arguments))
    keys = front.keys(os.environ)
    host = arguments.host or LOOPBACK
    check_access(keys, front.allow_unauthenticated, host=host)
    port = HTTP_PORT if arguments.port is None else arguments.port
    raise_limit()
    # Before the model, so that an address in use is told at once.
    with listen(host, port) as listener, kept(host, port):
        show_progress(log=checked(LogArgs, given_log_flags(arguments)))
        engine = open_engine(arguments, config, names, front.chat_template)
        asyncio.run(_serve(engine, limits, front, keys, listener))
    say("stopped")
    return 0


async def _serve(
    engine: LocalEngine | RemoteEngine,
    limits: HttpLimits,
    front_args: FrontArgs,
    keys: ApiKeys | None,
    listener: socket.socket,
) -> None:
    tell_rarely(asyncio.get_running_loop())
    model = front_args.model(await engine.start())
    try:
        app, front = build_app(
            engine.backend,
            model,
            limits,
            front_args.gate(keys),
            front_args.limits(keys),
            Meter(model, engine.collectors),
            allowed_origins=front_args.allowed_origins,
        )
        config = uvicorn.Config(
            app,
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            http=ReadHttp,
            timeout_keep_alive=_IDLE_CONNECTION_S,
            timeout_graceful_shutdown=_FORCE_S,
        )
        leave_out_what_stays()
        host, port = listener.getsockname()[:2]
        words = announcement(model.names[0], host, port, asks_key=keys is not None)
        server = Server(config, front, words)
        await server.serve(sockets=[listener])
    finally:
        await engine.stop()


class Server(uvicorn.Server):
    """Says when it is there, and ends as its user expects: the first Ctrl-C lets answers under
    way finish for a while and then tells their clients, the second one ends at once."""

    def __init__(self, config: uvicorn.Config, front: Front, announcement: str) -> None:
        super().__init__(config)
        self._front = front
        self._announcement = announcement

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own would raise them again afterwards."""
        loop = asyncio.get_running_loop()
        signals = ending_signals()
        for number in signals:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        say(self._announcement)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        say("stopping; Ctrl-C again to stop at once")
        error = UnavailableError("the server is stopping")
        timer = asyncio.get_running_loop().call_later(_GRACE_S, self._front.fail_all, error)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def announcement(name: str, host: str, port: int, more: str = "", *, asks_key: bool = False) -> str:
    url = front_url(host, port)
    key = " -H 'Authorization: Bearer KEY'" if asks_key else ""
    body = json.dumps({"messages": [{"role": "user", "content": "What does os.path.join do?"}]})
    return (
        f"\n{name} is served at {url}\n{more}"
        f"  try:   curl {url}/chat/completions{key} -d '{body}'\n"
        "  stop:  Ctrl-C\n"
    )


@contextlib.contextmanager
def kept(host: str, port: int) -> Iterator[None]:
    """ConfigError where another of ours is about to listen there; meanwhile others get this."""
    if port == 0:  # the system gives nobody else what it has given
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(reserved(Address(host, port), "port"))
        except PlaneError as error:
            raise ConfigError("port", error.message) from error
        yield


def _http_limits(arguments: argparse.Namespace) -> HttpLimits:
    given = given_http_flags(arguments)
    return replace(HttpLimits(), **checked(HttpArgs, given).model_dump(exclude_unset=True))
