"""What commands tell their user. Answers go to stdout, everything else to stderr."""

import logging
import sys


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def answer(text: str, end: str = "\n") -> None:
    sys.stdout.write(text + end)
    sys.stdout.flush()


def show_progress() -> None:
    """The engine's and the server's own words about what they are doing."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for name in ("engine", "kv_cache", "kv_transfer", "prefill_worker", "decode_worker", "kvrelay"):
        logging.getLogger(name).setLevel(logging.INFO)
