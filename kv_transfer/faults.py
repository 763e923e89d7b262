"""Faults on purpose, so that tests meet them at an exact point and not by luck.

    KVRELAY_FAULTS="holder.chunk:2=kill holder.commit=release"
    KVRELAY_FAULTS=@FILE

An action happens when its point is reached for the given time (the first by default): `kill`
and `stop` are signals to the own process, `fail` raises, `block` holds the calling thread for a
while, `hold` for as long as the same faults are asked for, which the log says, and any other word
is handed to the place that asked, which knows what it means: `stuck` holds up its engine as `hold`
does a thread, `slow` does so before each step, `break` fails a piece of a read as the network
would, `damage` announces a block with a checksum of other bytes, `twice` a chunk twice. A file is
read again whenever it was written, and counting begins anew. Without the variable nothing ever
happens.
"""

import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from kv_transfer.errors import TransferError

logger = logging.getLogger(__name__)

VARIABLE = "KVRELAY_FAULTS"
READ = "connector.read"  # a piece is about to be read, by a thread of the connector
POSTED = "connector.posted"  # it is being read, and nobody has seen the end
BREAK = "break"
DAMAGE = "damage"
TWICE = "twice"
BLOCK_S = 2.5
STUCK_S = 60.0  # at most
SLOW_S = 0.01
_LOOK_S = 0.02


class FaultError(ValueError):
    """A fault that cannot be read."""


class Faults:
    """Counts how often each point was reached. Any thread may call it."""

    def __init__(self, text: str = "") -> None:
        self._file = Path(text[1:]) if text.startswith("@") else None
        self._text, self._written_ns = "", 0
        self._actions: dict[tuple[str, int], str] = {}
        self._reached: Counter[str] = Counter()
        self._lock = threading.Lock()
        if self._file is None:
            self._read(text)

    @classmethod
    def of_environment(cls) -> "Faults":
        return cls(os.environ.get(VARIABLE, ""))

    def _read(self, text: str) -> None:
        self._text = text
        self._actions.clear()
        self._reached.clear()
        for word in text.split():
            place, is_one, action = word.partition("=")
            point, _, time = place.partition(":")
            if not (is_one and point and action) or not (time or "1").isdigit():
                raise FaultError(f"{word!r}, must be POINT[:TIME]=ACTION")
            self._actions[point, int(time or "1")] = action

    def reach(self, point: str) -> str | None:
        """The action that the caller must do itself, if there is one."""
        action = self._count(point)
        match action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "block":
                time.sleep(BLOCK_S)
            case "hold":
                hold = self.stuck()
                logger.warning("held at %s", point)
                hold()
            case "fail":
                raise TransferError(f"a fault was asked for at {point}")
        return action

    def _count(self, point: str) -> str | None:
        with self._lock:
            self._look()
            if not self._actions:
                return None
            self._reached[point] += 1
            return self._actions.get((point, self._reached[point]))

    def hold_up(self, action: str | None, call: Callable[[Callable[[object], None]], None]) -> None:
        """If that is what the action means, until other faults are asked for; `call` has an
        engine's thread do something before its next step."""
        match action:
            case "stuck":
                hold = self.stuck()
                call(lambda _: hold())
            case "slow":
                asked = self._text

                def rest(_: object) -> None:
                    if self._asked() == asked:
                        time.sleep(SLOW_S)
                        call(rest)

                call(rest)

    def stuck(self) -> Callable[[], None]:
        """Holds up who calls it, until other faults are asked for."""
        asked = self._text

        def hold() -> None:
            end = time.monotonic() + STUCK_S
            while time.monotonic() < end and self._asked() == asked:
                time.sleep(_LOOK_S)

        return hold

    def _look(self) -> None:
        if self._file is not None:
            written_ns, text = self._file.stat().st_mtime_ns, self._asked()
            if (written_ns, text) != (self._written_ns, self._text):
                self._read(text)
                self._written_ns = written_ns

    def _asked(self) -> str:
        return self._text if self._file is None else self._file.read_text()
