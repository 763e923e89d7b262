"""What commands tell their user. Answers go to stdout, everything else to stderr."""

import logging
import os
import sys
from contextlib import suppress
from typing import TextIO

from cluster.log_format import LogArgs
from engine.errors import EngineError


class OutputError(EngineError):
    """Stdout is full, or closed. `is_left`: by whoever read it, who needs no word of it."""

    def __init__(self, reason: str, *, is_left: bool = False) -> None:
        super().__init__(f"stdout: {reason}")
        self.is_left = is_left


def say(text: str) -> None:
    """Dropped where stderr takes nothing: nobody is left to be told of that."""
    with suppress(OSError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def answer(text: str, end: str = "\n") -> None:
    """As `say` does, with numbers for characters that the terminal's encoding does not have."""
    if sys.stdout is None:
        raise OutputError("is closed")
    encoding = sys.stdout.encoding or "utf-8"  # of one that is no file
    text = text.encode(encoding, "backslashreplace").decode(encoding)
    try:
        sys.stdout.write(text + end)
        sys.stdout.flush()
    except OSError as error:
        # Python would try what is left once more, and complain, when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        is_left = isinstance(error, BrokenPipeError)
        raise OutputError(error.strerror or str(error), is_left=is_left) from error


def show_progress(stream: TextIO | None = None, log: LogArgs | None = None) -> None:
    """The engine's and the server's own words about what they are doing; to stderr if no other
    stream is named."""
    log = log or LogArgs()
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(log.formatter())
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for name in ("engine", "kv_cache", "kv_transfer", "prefill_worker", "decode_worker", "kvrelay"):
        logging.getLogger(name).setLevel(logging.INFO)
    # Its warnings are of requests that are no HTTP, one a line: a stranger could fill a disk.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    level = logging.INFO if log.requests else logging.WARNING
    logging.getLogger("kvrelay.requests").setLevel(level)
