"""Notices an engine that has work and makes no steps."""

from protos.judging import overdue_s

FIRST = 5.0  # times the timeout: how long the first step takes, nobody has measured


class Watchdog:
    """Told of every step by the engine's thread, asked by anyone else; reads no clock."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._last: tuple[float, int, bool] = (0.0, -1, False)

    def note(self, now: float, num_steps: int, has_work: bool) -> None:
        """Before each step, and when there is nothing to do. A count that stands still keeps
        its first time."""
        _, steps, had_work = self._last
        if (steps, had_work) != (num_steps, has_work):
            self._last = (now, num_steps, has_work)

    def still_s(self, now: float) -> float:
        """For how long there has been work without a step."""
        since, _, has_work = self._last
        return now - since if has_work else 0.0

    def stalled_s(self, now: float, expected_s: float = 0.0) -> float | None:
        """The same, once that exceeds the timeout, and what a step that should take `expected_s`
        may: who takes it for stuck restarts it in the middle of every long prompt."""
        still_s = self.still_s(now)
        timeout_s = self.timeout_s * FIRST if self._last[1] <= 0 else self.timeout_s
        return still_s if still_s > max(timeout_s, overdue_s(expected_s)) else None
