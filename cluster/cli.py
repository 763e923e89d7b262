"""The `kvrelay` command."""

import argparse
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from cluster.commands.console import OutputError, answer, say
from cluster.commands.flag_names import Flag, told
from engine.errors import ConfigError, EngineError

# Each is a module of cluster.commands with `add_arguments` and `run`; loaded when it is called
# for, so that none pays for what another imports.
COMMANDS = {
    "serve": "serve a model on a Ray cluster, over HTTP",
    "local": "serve a model over HTTP without Ray, from one process or one pair of workers",
    "generate": "answer one prompt",
    "worker": "run a prefill or a decode worker",
    "status": "show how a running cluster is: pools, replicas, load, scaling",
    "bench": "put a server under load and measure it",
    "plan": "tell what of a model fits into a memory",
}
_INTERRUPTED = 130  # what shells expect of a program ended by Ctrl-C


def main(argv: Sequence[str] | None = None) -> int:
    # gRPC's library tells of every connection that ends, on stderr and not in our log
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    if sys.stderr is None:  # it is closed
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    words = sys.argv[1:] if argv is None else list(argv)
    command = words[0] if words and words[0] in COMMANDS else None
    arguments: argparse.Namespace | None = None
    flags: dict[str, Flag] = {}
    try:
        with _interrupts_end_it():
            parser, flags = _parser(command)
            arguments = parser.parse_args(words)
            _check_folder()
            module = _module(arguments.command)
        status: int = module.run(arguments)
    except OutputError as error:
        if not error.is_left:
            say(f"kvrelay: {error}")
        return 1
    except EngineError as error:
        say(f"kvrelay {command}: {told(error, arguments, flags)}")
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return _INTERRUPTED
    return status


@contextmanager
def _interrupts_end_it() -> Iterator[None]:
    """While modules are imported, in whose locks Python loses a KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _check_folder() -> None:
    """Where it has been removed, no relative path means anything, and neither torch nor Ray starts,
    which say so in words of their own."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError("working directory", "it has been removed; go to another") from error


class Parser(argparse.ArgumentParser):
    """What is wrong in one line, without the usage, which fills a screen; flags in full."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def flags(self) -> dict[str, Flag]:
        """By what their values are called; the first of several for one."""
        actions = reversed(self._option_string_actions.items())
        return {action.dest: Flag(name, action.default) for name, action in actions}

    def error(self, message: str) -> NoReturn:
        say(f"{self.prog}: {message.removeprefix('argument ')}; see `{self.prog} --help`")
        raise SystemExit(2)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Help and version are answers, too."""
        if file is sys.stdout:
            answer(message, end="")
        else:
            super()._print_message(message, file)


def _parser(command: str | None) -> tuple[argparse.ArgumentParser, dict[str, Flag]]:
    """With the command's own flags."""
    from protos.version import version  # half of what this module would take to import

    parser = Parser(
        prog="kvrelay", description="Serves large language models; see `kvrelay COMMAND --help`."
    )
    parser.add_argument("--version", action="version", version=f"kvrelay {version()}")
    flags: dict[str, Flag] = {}
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        subparser = commands.add_parser(name, help=text, description=text)
        if name == command:
            _module(name).add_arguments(subparser)
            flags = subparser.flags()
            parser.prog = subparser.prog  # what the command does not know is told by this parser
    return parser, flags


def _module(name: str) -> Any:
    return importlib.import_module(f"cluster.commands.{name}")


if __name__ == "__main__":
    sys.exit(main())
