"""What commands tell their user. Answers go to stdout, everything else to stderr."""

import logging
import sys
from typing import TextIO


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def answer(text: str, end: str = "\n") -> None:
    sys.stdout.write(text + end)
    sys.stdout.flush()


def show_progress(stream: TextIO | None = None) -> None:
    """The engine's and the server's own words about what they are doing; to stderr if no other
    stream is named."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for name in ("engine", "kv_cache", "kv_transfer", "prefill_worker", "decode_worker", "kvrelay"):
        logging.getLogger(name).setLevel(logging.INFO)
