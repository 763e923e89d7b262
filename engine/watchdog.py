"""Notices an engine that has work and makes no steps."""


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

    def stalled_s(self, now: float) -> float | None:
        """For how long there has been work without a step, once that exceeds the timeout."""
        since, _, has_work = self._last
        if not has_work or now - since <= self.timeout_s:
            return None
        return now - since
